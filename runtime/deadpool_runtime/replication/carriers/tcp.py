"""The carrier that is always there: a second TCP connection of the link, the *data connection*.

Bytes go from the sender's mapping into the kernel and from there into the receiver's mapping; none
are copied in Python. There is no ``Kind``: every link has a data connection (``links.py``).
"""

from __future__ import annotations

import contextlib
import socket
import struct

from deadpool_runtime.replication.carriers.base import (
    MOVE_TIMEOUT_S,
    CarrierBroken,
    Range,
    Receiver,
    Sender,
)
from deadpool_runtime.replication.carriers.files import Maps

#: How messages and log name it.
NAME = "tcp"
#: Asked of the kernel for each direction; it may give less.
BUFFER_NBYTES = 8 << 20
_TICKET = struct.Struct("!QQ")
_SCRAP_NBYTES = 1 << 20


def widen(sock: socket.socket) -> None:
    """Ask for large buffers. Before connecting or listening, else TCP's window stays small."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_NBYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_NBYTES)


def _limit(sock: socket.socket, option: int, timeout_s: float) -> None:
    """A blocking socket with the kernel's own time limit: fewer system calls than a Python one."""
    whole = int(timeout_s)
    sock.setsockopt(
        socket.SOL_SOCKET, option, struct.pack("ll", whole, int((timeout_s - whole) * 1e6))
    )


def _shut(sock: socket.socket) -> None:
    """Wake whoever waits in a call on the socket."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


class TcpSender(Sender):
    """Sends on the data connection, which the caller closes after ``close``."""

    def __init__(self, sock: socket.socket, maps: Maps) -> None:
        self._sock = sock
        self._maps = maps
        self._sent = 0
        self._begun: dict[bytes, Range] = {}
        _limit(sock, socket.SO_SNDTIMEO, MOVE_TIMEOUT_S)

    def send(self, source: Range) -> bytes:
        """Nothing is sent yet: the receiver reads only when it has the ticket."""
        ticket = _TICKET.pack(self._sent, source.nbytes)
        self._sent += 1
        self._begun[ticket] = source
        return ticket

    def wait_sent(self, ticket: bytes, timeout_s: float = MOVE_TIMEOUT_S) -> None:
        """Hand the bytes to the kernel."""
        source = self._begun.pop(ticket)
        try:
            if timeout_s != MOVE_TIMEOUT_S:
                _limit(self._sock, socket.SO_SNDTIMEO, timeout_s)
            self._sock.sendall(self._maps.view(source))
        except BlockingIOError:
            raise CarrierBroken(f"nothing could be sent for {timeout_s} s") from None
        except OSError as error:
            raise CarrierBroken(f"sending failed: {error}") from error

    def close(self) -> None:
        """End the connection, for both directions."""
        _shut(self._sock)


class TcpReceiver(Receiver):
    """Receives on the data connection, which the caller closes after ``close``."""

    def __init__(self, sock: socket.socket, maps: Maps) -> None:
        self._sock = sock
        self._maps = maps
        self._received = 0
        self._scrap: memoryview | None = None
        _limit(sock, socket.SO_RCVTIMEO, MOVE_TIMEOUT_S)

    def receive(self, ticket: bytes, target: Range, timeout_s: float = MOVE_TIMEOUT_S) -> None:
        """Read the next bytes of the connection into the mapping."""
        self._check(ticket, target.nbytes, timeout_s)
        try:
            view = self._maps.view(target)
        except OSError as error:
            raise CarrierBroken(f"the slot cannot be written: {error}") from error
        self._read(view, timeout_s)

    def discard(self, ticket: bytes, nbytes: int, timeout_s: float = MOVE_TIMEOUT_S) -> None:
        """Read the next bytes of the connection and forget them."""
        self._check(ticket, nbytes, timeout_s)
        if self._scrap is None:
            self._scrap = memoryview(bytearray(_SCRAP_NBYTES))
        for begin in range(0, nbytes, _SCRAP_NBYTES):
            self._read(self._scrap[: min(_SCRAP_NBYTES, nbytes - begin)], timeout_s)

    def _check(self, ticket: bytes, nbytes: int, timeout_s: float) -> None:
        if ticket != _TICKET.pack(self._received, nbytes):
            raise CarrierBroken("the ticket is not that of the next bytes of the connection")
        self._received += 1
        if timeout_s != MOVE_TIMEOUT_S:
            _limit(self._sock, socket.SO_RCVTIMEO, timeout_s)

    def _read(self, view: memoryview, timeout_s: float) -> None:
        at = 0
        while at < len(view):
            try:
                count = self._sock.recv_into(view[at:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise CarrierBroken(f"nothing came for {timeout_s} s") from None
            except OSError as error:
                raise CarrierBroken(f"receiving failed: {error}") from error
            if count == 0:
                raise CarrierBroken("the other end closed the connection")
            at += count

    def close(self) -> None:
        """End the connection, for both directions."""
        _shut(self._sock)
