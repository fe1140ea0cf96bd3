"""What replicators say to each other, and what a replicator and its agent say.

Frames, codec and proof of the secret are those of ``protocol``. The bytes of the state travel on
the same link by a carrier (see ``carriers.base``).

A *stream* is one copy, or a part of one, on its way over a link: a ``Put`` from an owner's node to
its holder, or what answers a ``Fetch``. The end that dialled the link numbers its streams. The
receiving end says ``StreamReady`` when its slot is prepared; then come ``Chunk`` messages, each
answered by one ``ChunkDone``, at most ``carriers.base.MAX_TICKETS`` unanswered.
"""

from __future__ import annotations

from enum import StrEnum

from deadpool_runtime.protocol import Address, Message
from deadpool_runtime.replication.manifest import Manifest

# ---------------------------------------------------------------- replicator <-> replicator


class LinkHello(Message, frozen=True):
    """First message on the control connection, from the end that dialled. ``offers``: by name of a
    carrier, what the other end needs to know to use it with ``node``.
    """

    node: str
    link: str
    offers: dict[str, bytes]


class LinkWelcome(Message, frozen=True):
    """Answer to ``LinkHello``, once the data connection of the link is there too."""

    node: str
    offers: dict[str, bytes]


class DataHello(Message, frozen=True):
    """The only message on a data connection: it belongs to ``link``, raw chunks follow."""

    link: str


class Offers(Message, frozen=True):
    """The sender's carriers changed; choose again."""

    offers: dict[str, bytes]


class CarrierLost(Message, frozen=True):
    """The sending end of that carrier broke: close the receiving end, nothing more comes."""

    carrier: str
    reason: str


class Put(Message, frozen=True):
    """Keep a replica of ``manifest.rank``: the parts ``present`` follow. The manifest has sizes but
    no hashes yet; or it is that of a sealed copy, and where a replica of this very copy is sealed
    already the answer is ``PutSealed`` at once.

    ``replaces``: whether another replica of the same step may be overwritten.
    """

    stream: int
    epoch: int
    manifest: Manifest
    present: tuple[int, ...]
    replaces: bool


class Fetch(Message, frozen=True):
    """Send the segments of these ranks of the copy of ``rank`` after ``step``; the own part too if
    ``base``. ``replica``: as in ``protocol.Piece``.
    """

    stream: int
    epoch: int
    rank: int
    step: int
    replica: bool
    segments: list[tuple[int, ...]]
    base: bool


class FetchBegun(Message, frozen=True):
    """Answer to ``Fetch``: the copy's manifest, and which of its parts will follow."""

    stream: int
    manifest: Manifest
    present: tuple[int, ...]


class StreamReady(Message, frozen=True):
    """The slot for the stream is prepared: send chunks."""

    stream: int


class Chunk(Message, frozen=True):
    """A chunk can be received by ``carrier`` with ``ticket``. The own part is chunk 0 of segment
    ``manifest.OWN``.
    """

    stream: int
    segment: int
    chunk: int
    nbytes: int
    hash: bytes
    carrier: str
    ticket: bytes


class Verdict(StrEnum):
    """What became of a chunk at the receiving end."""

    #: It is in the slot and has the announced hash.
    TAKEN = "taken"
    #: It has another hash: send it again.
    WANTED = "wanted"
    #: The carrier broke: send it again by another.
    LOST = "lost"
    #: It was not wanted any more.
    DISCARDED = "discarded"


class ChunkDone(Message, frozen=True):
    """Answer to ``Chunk``. ``reason``: why the carrier broke, if it did."""

    stream: int
    segment: int
    chunk: int
    verdict: Verdict
    carrier: str
    reason: str


class PutEnd(Message, frozen=True):
    """Every chunk of the put was taken, and this is the manifest with all hashes: seal."""

    stream: int
    manifest: Manifest


class PutSealed(Message, frozen=True):
    """The replica is sealed."""

    stream: int


class FetchEnd(Message, frozen=True):
    """Every chunk that was asked for was taken."""

    stream: int


class StreamRefused(Message, frozen=True):
    """The stream is over, and nothing came of it; either end may say so."""

    stream: int
    reason: str


OnLink = (
    LinkHello
    | LinkWelcome
    | DataHello
    | Offers
    | CarrierLost
    | Put
    | Fetch
    | FetchBegun
    | StreamReady
    | Chunk
    | ChunkDone
    | PutEnd
    | PutSealed
    | FetchEnd
    | StreamRefused
)

# ---------------------------------------------------------------- replicator <-> agent


class Up(Message, frozen=True):
    """First message to the agent: the replicator listens there, and its Unix socket exists."""

    address: Address


class Fence(Message, frozen=True):
    """Write nothing more that belongs to an epoch before ``epoch``; answer when that holds."""

    epoch: int


class Fenced(Message, frozen=True):
    """Answer to ``Fence``: copies of older epochs on this node do not change any more, but for
    those that the node's own ranks write.
    """

    epoch: int


ToAgent = Up | Fenced
FromAgent = Fence
