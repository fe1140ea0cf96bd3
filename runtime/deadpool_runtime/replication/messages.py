"""What a rank and the replicator of its node say to each other, over a Unix socket in the arena.

The bytes of the state never travel there: both ends have the arena's files. Frames and codec are
those of ``protocol``.
"""

from __future__ import annotations

from deadpool_runtime.protocol import Holder, Message, Piece
from deadpool_runtime.replication.manifest import Manifest

# ---------------------------------------------------------------- rank -> replicator


class RankHello(Message, frozen=True):
    """First message of a connection. A later connection of the same rank replaces an older one."""

    rank: int
    born: int


class SetHolder(Message, frozen=True):
    """From now on replicas of this rank go to ``holder`` and belong to ``epoch``. Whatever of an
    older epoch is under way for this rank is given up. None: there is no holder.

    ``restoring``: other ranks may still fetch what nodes have of the step that all go back to, so
    nothing of it is replaced. The same is said again without it when all have what they need.
    """

    epoch: int
    holder: Holder | None
    restoring: bool = False


class SnapshotBegun(Message, frozen=True):
    """A copy is being written into this slot of the rank; sizes are final, hashes and the own part
    follow. What the slot held before is gone.
    """

    manifest: Manifest
    slot: int


class ChunksCopied(Message, frozen=True):
    """These chunks of a segment are in the slot and will not change: ``hashes`` of the chunks from
    ``first`` on.
    """

    step: int
    segment: int
    first: int
    hashes: list[bytes]


class SnapshotSealed(Message, frozen=True):
    """The copy is whole; ``manifest`` is the one in the slot."""

    manifest: Manifest
    slot: int


class SnapshotDropped(Message, frozen=True):
    """The copy was given up, or its slot is used for a step without replicas."""

    step: int


class Assemble(Message, frozen=True):
    """Put a copy of ``step`` together from ``pieces`` in this slot of the rank's and seal it, then
    answer.

    ``held``: not in a slot of this rank's, but in one for replicas of the rank of the one piece
    there is, which has what that piece names and the own part; ``slot`` means nothing then.
    """

    epoch: int
    step: int
    pieces: list[Piece]
    slot: int
    held: bool = False


ToReplicator = (
    RankHello
    | SetHolder
    | SnapshotBegun
    | ChunksCopied
    | SnapshotSealed
    | SnapshotDropped
    | Assemble
)

# ---------------------------------------------------------------- replicator -> rank


class Confirmed(Message, frozen=True):
    """Every holder verified and sealed the replica of ``step``; or there is no holder, and the copy
    on this node is all there is.
    """

    epoch: int
    step: int


class Unconfirmed(Message, frozen=True):
    """The replica of ``step`` will not be confirmed; the next one may."""

    epoch: int
    step: int
    reason: str


class Assembled(Message, frozen=True):
    """The slot of ``step`` is sealed, every hash verified."""

    epoch: int
    step: int


class AssembleFailed(Message, frozen=True):
    """A piece could not be had; damaged copies have been marked as such where they lie."""

    epoch: int
    step: int
    reason: str


class LinkNote(Message, frozen=True):
    """Something the user should read: a link changed its carrier, say."""

    text: str


FromReplicator = Confirmed | Unconfirmed | Assembled | AssembleFailed | LinkNote
