"""The MPI carrier, as the replicator has it: no MPI here, only requests to the node's mover.

``MpiKind`` listens on a Unix socket in the arena for the mover that the launcher starts on each
node (``replication.mover``). While one is connected, ``offer`` names its MPI world, and links
between nodes of one and the same world can use it. A mover of a later world replaces an older one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from deadpool_runtime import protocol
from deadpool_runtime.replication import mover_messages as messages
from deadpool_runtime.replication.carriers.base import (
    MOVE_TIMEOUT_S,
    CarrierBroken,
    Kind,
    Range,
    Receiver,
    Sender,
)
from deadpool_runtime.replication.carriers.mover_link import (
    KILL_TIMEOUT_S,
    Move,
    MoverLink,
    admit,
    pidfd_of_peer,
)
from deadpool_runtime.replication.mpi_leftovers import remove_leftovers
from deadpool_runtime.replication.sockets import connections, short_path

#: Time a receive that is under way gets to end by itself when its end of the link is closed; it
#: does within milliseconds unless the other node is in trouble.
CLOSE_GRACE_S = 0.25
#: MPI tag and size of the range.
_TICKET = struct.Struct("!IQ")


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """What ``MpiKind.offer`` tells: the world, and this node's place in it."""

    world: str
    rank: int


class MpiKind(Kind):
    """Links between nodes of one MPI world."""

    name = "mpi"

    def __init__(self, arena: Path, node: str, secret: bytes) -> None:
        self.arena = arena
        self._node = node
        self._secret = secret
        self._lock = threading.Lock()
        self._mover: MoverLink | None = None
        self._latest_world = 0
        self._watchers: list[Callable[[], None]] = []
        self._socket_path = arena / messages.SOCKET_NAME
        self._socket_path.unlink(missing_ok=True)
        self._server = socket.socket(socket.AF_UNIX)
        with short_path(self._socket_path) as short:
            self._server.bind(short)
        self._socket_path.chmod(0o600)
        self._server.listen()
        threading.Thread(target=self._accept, name="deadpool-movers", daemon=True).start()

    @property
    def mover(self) -> MoverLink | None:
        """The connected mover, if there is one."""
        with self._lock:
            mover = self._mover
        return None if mover is None or mover.reason else mover

    def offer(self) -> bytes | None:
        """The world this node's mover is in."""
        mover = self.mover
        if mover is None:
            return None
        return msgspec.msgpack.encode(Offer(mover.world, mover.hello.rank))

    def sender(self, theirs: bytes) -> MpiSender | None:
        """An end if the other node is in the same world."""
        found = self._shared(theirs)
        return found and MpiSender(self.arena, *found)

    def receiver(self, theirs: bytes) -> MpiReceiver | None:
        """An end if the other node is in the same world."""
        found = self._shared(theirs)
        return found and MpiReceiver(self.arena, *found)

    def watch(self, on_change: Callable[[], None]) -> None:
        """Called when a world comes up and when it is gone."""
        self._watchers.append(on_change)

    def close(self) -> None:
        """Send the mover away and take the socket down."""
        # Wakes the thread that waits in accept; closing the socket would not.
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        with self._lock:
            mover, self._mover = self._mover, None
        if mover is not None:
            mover.leave()
            if not mover.gone.wait(CLOSE_GRACE_S):
                mover.end("the replicator ends")
                mover.gone.wait(KILL_TIMEOUT_S)
        self._socket_path.unlink(missing_ok=True)
        remove_leftovers()

    def _shared(self, theirs: bytes) -> tuple[MoverLink, int] | None:
        try:
            offer = msgspec.msgpack.decode(theirs, type=Offer)
        except (msgspec.DecodeError, msgspec.ValidationError):
            return None
        mover = self.mover
        if mover is None or mover.world != offer.world or mover.hello.rank == offer.rank:
            return None
        return mover, offer.rank

    def _accept(self) -> None:
        with self._server:
            for sock in connections(self._server):
                threading.Thread(
                    target=self._serve, args=(sock,), name="deadpool-mover", daemon=True
                ).start()

    def _serve(self, sock: socket.socket) -> None:
        """Thread: one mover from its connection to its end."""
        with sock:
            try:
                pidfd = pidfd_of_peer(sock)
            except OSError:
                return
            try:
                mover = MoverLink(sock, pidfd, admit(sock, self._secret))
            except (OSError, protocol.ProtocolError):
                os.close(pidfd)
                return
            if self._replace(mover):
                self._tell_watchers()
            else:
                mover.end("it is of no use here")
            mover.run()
            with self._lock:
                if self._mover is mover:
                    self._mover = None
            self._tell_watchers()

    def _replace(self, mover: MoverLink) -> bool:
        """Let ``mover`` take over, unless a later world was here before."""
        hello = mover.hello
        if not 0 <= hello.rank < len(hello.nodes) or hello.nodes[hello.rank] != self._node:
            return False
        with self._lock:
            if hello.world_id <= self._latest_world:
                return False
            self._latest_world = hello.world_id
            before, self._mover = self._mover, mover
        if before is not None:
            before.end(f"MPI world {hello.world_id} takes the place of {before.hello.world_id}")
        return True

    def _tell_watchers(self) -> None:
        for on_change in list(self._watchers):
            on_change()


class MpiSender(Sender):
    """Asks the mover to send; a ticket is the MPI tag and the size."""

    def __init__(self, arena: Path, mover: MoverLink, rank: int) -> None:
        self._arena = arena
        self._mover = mover
        self._rank = rank
        self._closed = False
        self._sent: dict[bytes, tuple[int, Move]] = {}

    def send(self, source: Range) -> bytes:
        """See ``Sender``."""
        file = _file_in(self._arena, source)
        if self._closed:
            raise CarrierBroken("closed")
        tag = self._mover.new_tag()
        ticket = _TICKET.pack(tag, source.nbytes)
        self._sent[ticket] = self._mover.send(file, source.offset, source.nbytes, self._rank, tag)
        return ticket

    def wait_sent(self, ticket: bytes, timeout_s: float = MOVE_TIMEOUT_S) -> None:
        """See ``Sender``."""
        number, move = self._sent[ticket]
        if not self._closed:
            move.wake.wait(timeout_s)
        self._sent.pop(ticket, None)
        if move.settled.is_set():
            if move.error is not None:
                raise CarrierBroken(move.error)
            return
        self._mover.forget_send(number, _TICKET.unpack(ticket)[0])
        if self._closed:
            raise CarrierBroken("closed")
        raise CarrierBroken(f"the other node's mover did not take a chunk within {timeout_s:g} s")

    def close(self) -> None:
        """See ``Sender``."""
        self._closed = True
        for ticket, (number, move) in list(self._sent.items()):
            move.wake.set()
            self._mover.forget_send(number, _TICKET.unpack(ticket)[0])


class MpiReceiver(Receiver):
    """Asks the mover to receive."""

    def __init__(self, arena: Path, mover: MoverLink, rank: int) -> None:
        self._arena = arena
        self._mover = mover
        self._rank = rank
        self._closed = False
        self._moves: dict[bytes, Move] = {}

    def expect(self, ticket: bytes, target: Range) -> None:
        """Begin to receive, so that ranges come in while earlier ones are received and hashed.

        What goes wrong is raised by the ``receive`` that follows.
        """
        # A ticket that came twice would hide the first move, which then nobody could give up.
        if ticket not in self._moves:
            with contextlib.suppress(CarrierBroken):
                self._begin(ticket, target, _file_in(self._arena, target))

    def receive(self, ticket: bytes, target: Range, timeout_s: float = MOVE_TIMEOUT_S) -> None:
        """See ``Receiver``."""
        if ticket not in self._moves:
            self._begin(ticket, target, _file_in(self._arena, target))
        self._finish(ticket, timeout_s)

    def discard(self, ticket: bytes, nbytes: int, timeout_s: float = MOVE_TIMEOUT_S) -> None:
        """See ``Receiver``."""
        if ticket not in self._moves:
            self._begin(ticket, Range("", 0, nbytes), "")
        self._finish(ticket, timeout_s)

    def close(self) -> None:
        """See ``Receiver``."""
        self._closed = True
        for move in list(self._moves.values()):
            move.wake.set()

    def _begin(self, ticket: bytes, target: Range, file: str) -> None:
        try:
            tag, nbytes = _TICKET.unpack(ticket)
        except struct.error:
            raise CarrierBroken("the ticket is not one of MPI") from None
        if self._closed:
            raise CarrierBroken("closed")
        if nbytes != target.nbytes:
            raise CarrierBroken(f"{nbytes} bytes were sent where {target.nbytes} are due")
        self._moves[ticket] = self._mover.receive(target, file, self._rank, tag)

    def _finish(self, ticket: bytes, timeout_s: float) -> None:
        move = self._moves[ticket]
        if not self._closed:
            move.wake.wait(timeout_s)
        if self._closed:
            move.settled.wait(CLOSE_GRACE_S)
        if not move.settled.is_set():
            late = f"a chunk did not arrive within {timeout_s:g} s"
            self._mover.end("closed while a chunk was under way" if self._closed else late)
            move.settled.wait()
        del self._moves[ticket]
        if move.error is not None:
            raise CarrierBroken(move.error)
        if self._closed:
            raise CarrierBroken("closed")


def _file_in(arena: Path, moved: Range) -> str:
    """The name of the range's file, which must lie in the arena itself."""
    folder, name = os.path.split(moved.path)
    if folder != str(arena) or not name.startswith(messages.FILE_PREFIXES):
        raise CarrierBroken(f"{moved.path} is not a slot file of {arena}")
    return name
