"""What a carrier is: it moves ranges of arena files from one node to another, and nothing else.

A *link* joins the replicators of two nodes. It always has a TCP control connection; verdicts,
hashes, manifests and seals travel there only. The bytes of the chunks go by a carrier. For each
direction of a link a carrier has a sending end on one node and a receiving end on the other, used
as follows (``links.py`` does it):

1. The sender calls ``send(range)`` and gets a *ticket*: bytes that tell the other end how to get at
   the range. It must return at once.
2. The ticket travels to the receiver on the control connection.
3. The receiver may be told by ``expect(ticket, range)`` where the bytes will go, before it is done
   with earlier tickets.
4. The sender calls ``wait_sent(ticket)`` while the receiver calls ``receive(ticket, range)``, or
   ``discard(ticket)`` if it does not want the bytes any more.

All calls of an end but ``expect`` and ``close`` come from one thread, in the same order at both
ends: the n-th ticket that was made is the n-th that is received or discarded. At most
``MAX_TICKETS`` tickets of a link are neither received nor discarded, so what an end keeps per
ticket is bounded.

A carrier need not notice wrong bytes: every chunk is hashed by the receiver. Any failure is raised
as ``CarrierBroken``; both ends are closed then, and the chunk is sent again over TCP. TCP's own
failure ends the link.

``Kind`` is one of a node's carriers as a whole; it makes the ends. Nothing here imports torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

#: Tickets of one direction of a link that are on their way at the same time.
MAX_TICKETS = 8
#: Time for one range to be moved; a carrier that takes longer counts as broken.
MOVE_TIMEOUT_S = 10.0


class CarrierBroken(Exception):
    """The carrier cannot move anything on this link any more; the text says why."""


class Range(NamedTuple):
    """Bytes of an arena file. The file is at least ``offset + nbytes`` long while it is in use."""

    path: str
    offset: int
    nbytes: int


class Sender(ABC):
    """The sending end of one direction of a link."""

    @abstractmethod
    def send(self, source: Range) -> bytes:
        """Begin to move ``source``; returns its ticket without waiting for the other end."""

    @abstractmethod
    def wait_sent(self, ticket: bytes, timeout_s: float = MOVE_TIMEOUT_S) -> None:
        """Return when the carrier needs no further call to bring the range across.

        The bytes of the range do not change before the receiver said (on the control connection)
        that it has them, or the chunk was given up.
        """

    @abstractmethod
    def close(self) -> None:
        """Give everything up. From any thread, any number of times; a waiting ``wait_sent`` raises
        ``CarrierBroken``.
        """


class Receiver(ABC):
    """The receiving end of one direction of a link."""

    def expect(  # noqa: B027 - most carriers gain nothing by it
        self, ticket: bytes, target: Range
    ) -> None:
        """Announce that one ``receive`` with this target, or one ``discard``, will follow for the
        ticket, also after ``close``. The bytes may be written into ``target`` from now on until
        that call ended. Returns at once and never raises; may be called from another thread.
        """

    @abstractmethod
    def receive(self, ticket: bytes, target: Range, timeout_s: float = MOVE_TIMEOUT_S) -> None:
        """Return when the bytes of the ticket are in ``target``; sizes are equal. After an
        exception ``target`` holds anything, but nothing writes there any more.
        """

    @abstractmethod
    def discard(self, ticket: bytes, nbytes: int, timeout_s: float = MOVE_TIMEOUT_S) -> None:
        """Let the bytes of the ticket go to waste."""

    @abstractmethod
    def close(self) -> None:
        """Give everything up. From any thread, any number of times; a waiting ``receive`` raises
        ``CarrierBroken``.
        """


class Kind(ABC):
    """One carrier of this node, for all its links."""

    #: How the control messages, the log and ``links.PREFERENCE`` name it.
    name: str

    @abstractmethod
    def offer(self) -> bytes | None:
        """What the other node of a link must know to use this carrier with this node; None while
        the carrier cannot be used at all. Asked when a link opens and after each ``on_change``.
        """

    @abstractmethod
    def sender(self, theirs: bytes) -> Sender | None:
        """An end that sends to the node which offered ``theirs``; None if there is no way."""

    @abstractmethod
    def receiver(self, theirs: bytes) -> Receiver | None:
        """An end that receives from the node which offered ``theirs``; None if there is no way."""

    def watch(  # noqa: B027 - most carriers have nothing to watch
        self, on_change: Callable[[], None]
    ) -> None:
        """``on_change`` is to be called, from any thread, whenever ``offer`` has a new answer: the
        links then exchange offers and choose again. Carriers whose offer never changes ignore it.
        """

    def close(self) -> None:  # noqa: B027 - most carriers have nothing to close
        """The replicator ends: leave nothing behind."""
