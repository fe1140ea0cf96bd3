"""The conversation of a replicator with its node's mover (``replication.mover``), and the certainty
that the mover is dead when it has to be.

A receive that does not complete is the dangerous case: MPI might write into the arena later, when
the place belongs to another step. So whoever gives up a receive first kills the mover, and waits
until the kernel confirms that its process is gone. For this a mover whose process cannot be seen
from here (another process namespace) is not taken at all. Should the kernel not confirm it in time
(a driver can hold a process back), the file is unlinked: what MPI then writes, nobody reads.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import struct
import threading

from deadpool_runtime import protocol
from deadpool_runtime.replication import mover_messages as messages
from deadpool_runtime.replication.carriers.base import CarrierBroken, Range
from deadpool_runtime.replication.sockets import accept_handshake, first_message, messages_on

#: Time for the kernel to end a process after SIGKILL.
KILL_TIMEOUT_S = 5.0


class Move:
    """One request to the mover. ``settled``: it answered, or is gone. ``wake``: look again."""

    def __init__(self, target: str = "") -> None:
        self.target = target
        self.settled = threading.Event()
        self.wake = threading.Event()
        self.error: str | None = None

    def settle(self, error: str | None) -> None:
        if not self.settled.is_set():
            self.error = error
            self.settled.set()
            self.wake.set()


class MoverLink:
    """A connected mover: its world is up, and it does what it is asked until it is ``gone``."""

    def __init__(self, sock: socket.socket, pidfd: int, hello: messages.MoverHello) -> None:
        self.hello = hello
        self.world = f"{hello.world_id}-{hello.nonce}"
        self._sock = sock
        self._pidfd = pidfd
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._tags = itertools.count()
        self._spent: set[int] = set()
        self._moves: dict[int, Move] = {}
        self._reason = ""
        #: The process is gone (or hopeless) and every move is settled.
        self.gone = threading.Event()

    @property
    def reason(self) -> str:
        """Why the mover is gone or was told to go; empty while it is well."""
        return self._reason

    def new_tag(self) -> int:
        """An MPI tag that no other range from this node has, of those that are on their way.

        A send that was given up stays in MPI for good, and would be taken for a later one.
        """
        while True:
            tag = next(self._tags) % self.hello.tag_limit
            if tag not in self._spent:
                return tag

    def send(self, file: str, offset: int, nbytes: int, rank: int, tag: int) -> tuple[int, Move]:
        """Ask for a range to be sent."""
        number, move = next(self._numbers), Move()
        self._ask(number, move, messages.SendRange(number, file, offset, nbytes, rank, tag))
        return number, move

    def receive(self, target: Range, file: str, rank: int, tag: int) -> Move:
        """Ask for a range to be received; into nothing if ``file`` is empty."""
        number, move = next(self._numbers), Move(target.path if file else "")
        request = messages.ReceiveRange(number, file, target.offset, target.nbytes, rank, tag)
        self._ask(number, move, request)
        return move

    def forget_send(self, number: int, tag: int) -> None:
        """Do not wait for this send any more."""
        with self._lock:
            move = self._moves.pop(number, None)
        if move is not None:
            self._spent.add(tag)
            with contextlib.suppress(CarrierBroken):
                self._tell(messages.ForgetSend(number))

    def leave(self) -> None:
        """Tell the mover to end in good order."""
        with contextlib.suppress(CarrierBroken):
            self._tell(messages.Leave())

    def end(self, reason: str) -> None:
        """Kill the mover; every move settles once its process is gone."""
        self._reason = self._reason or reason
        with self._lock:
            if self.gone.is_set():
                return
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            # Wakes ``run`` even if the process does not end.
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def _ask(self, number: int, move: Move, request: messages.ToMover) -> None:
        with self._lock:
            if self.gone.is_set():
                raise CarrierBroken(self._reason)
            self._moves[number] = move
        self._tell(request)

    def _tell(self, request: messages.ToMover) -> None:
        data = protocol.frame(request)
        try:
            with self._lock:
                # A mover that runs reads at once: when there is no room it does not run.
                if self._sock.send(data, socket.MSG_DONTWAIT) == len(data):
                    return
            reason = "it does not read what it is asked"
        except OSError as error:
            reason = f"the connection to it is broken ({error.strerror})"
        self.end(f"the mover of this node was ended: {reason}")
        raise CarrierBroken(self._reason)

    def run(self) -> None:
        """Read the mover's answers until it is gone; a thread of its own does this."""
        try:
            for message in messages_on(self._sock, protocol.Codec(messages.FromMover)):
                self._heard(message)
        except protocol.ProtocolError as error:
            self._reason = self._reason or f"the mover of this node said {error}"
        self.end("the mover of this node ended")
        dead = _is_dead(self._pidfd, KILL_TIMEOUT_S)
        with self._lock:
            self.gone.set()
            moves, self._moves = self._moves, {}
            os.close(self._pidfd)
        for move in moves.values():
            if not dead and move.target:
                with contextlib.suppress(OSError):
                    os.unlink(move.target)
            move.settle(self._reason)

    def _heard(self, message: messages.FromMover) -> None:
        match message:
            case messages.Moved(number=number):
                self._settle(number, None)
            case messages.Refused(number=number, reason=reason):
                self._settle(number, f"the mover of this node refused: {reason}")
            case messages.Broken(reason=reason):
                self._reason = self._reason or f"MPI failed on this node: {reason}"
            case messages.MoverHello():
                self._reason = self._reason or "the mover of this node began anew"

    def _settle(self, number: int, error: str | None) -> None:
        with self._lock:
            move = self._moves.pop(number, None)
        if move is not None:
            move.settle(error)


def admit(sock: socket.socket, secret: bytes) -> messages.MoverHello:
    """Check that the peer knows the secret, prove that we do; what it says first."""
    accept_handshake(sock, secret)
    hello = first_message(sock, protocol.Codec(messages.FromMover))
    if not isinstance(hello, messages.MoverHello):
        raise protocol.ProtocolError("the first message is not a mover's hello")
    sock.settimeout(None)
    return hello


def pidfd_of_peer(sock: socket.socket) -> int:
    """A handle of the process at the other end; raises ``OSError`` where there is none."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, _gid = struct.unpack("iII", credentials)
    if uid != os.getuid() or pid <= 0:
        raise PermissionError("the process cannot be seen from here")
    return os.pidfd_open(pid)


def _is_dead(pidfd: int, timeout_s: float) -> bool:
    """Whether the process has ended, or does within the time."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
