"""Authenticated message connections between replicators, with blocking sockets.

The same handshake as ``deadpool_launch.channel`` has for asyncio: both ends prove that they know
the job's secret before anything else is read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deadpool_runtime import protocol

#: Time to connect, and for each step of the handshake.
HANDSHAKE_S = 5.0
#: A peer that is silent for this long on a link counts as gone.
DEAD_PEER_S = 3.0
#: Why no connection can be accepted for a moment: the other end is gone already, or there is no
#: descriptor or memory left.
_PASSING = frozenset(
    (errno.ECONNABORTED, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
)
_PAUSE_S = 0.05


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A name for ``path`` that fits into the 108 bytes of a Unix socket's address."""
    if len(os.fsencode(path)) < 100:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _exactly(sock: socket.socket, nbytes: int, by: float | None = None) -> bytes:
    """``by``: when all of it must be there, on the monotonic clock; without, the socket's limit
    counts from each piece to the next.
    """
    data = bytearray()
    while len(data) < nbytes:
        if by is not None:
            sock.settimeout(max(0.001, by - time.monotonic()))
        more = sock.recv(nbytes - len(data))
        if not more:
            raise protocol.ProtocolError("the other end closed the connection")
        data += more
    return bytes(data)


def accept_handshake(sock: socket.socket, secret: bytes) -> None:
    """The server's side; ``ProtocolError`` or ``OSError`` if the client does not prove the secret
    in time. Leaves the socket with its time limit.
    """
    sock.settimeout(HANDSHAKE_S)
    nonce, by = protocol.new_nonce(), time.monotonic() + HANDSHAKE_S
    sock.sendall(nonce)
    theirs = _exactly(sock, protocol.NONCE_NBYTES, by)
    got = _exactly(sock, protocol.PROOF_NBYTES, by)
    sock.settimeout(HANDSHAKE_S)
    if not protocol.proof_holds(protocol.proof(secret, "client", nonce, theirs), got):
        raise protocol.ProtocolError("the client does not know this job's secret")
    sock.sendall(protocol.proof(secret, "server", nonce, theirs))


def connect_handshake(sock: socket.socket, secret: bytes) -> None:
    """The client's side; ``ProtocolError`` or ``OSError`` if the server does not prove the secret
    in time. Leaves the socket with its time limit.
    """
    sock.settimeout(HANDSHAKE_S)
    theirs = _exactly(sock, protocol.NONCE_NBYTES)
    nonce = protocol.new_nonce()
    sock.sendall(nonce + protocol.proof(secret, "client", theirs, nonce))
    try:
        got = _exactly(sock, protocol.PROOF_NBYTES)
    except protocol.ProtocolError:
        # A server that knows another secret says no more than that.
        raise protocol.ProtocolError("the server did not accept this job's secret") from None
    if not protocol.proof_holds(protocol.proof(secret, "server", theirs, nonce), got):
        raise protocol.ProtocolError("the server does not know this job's secret")


def first_message(sock: socket.socket, codec: protocol.Codec) -> Any:
    """Read one message and not a byte more."""
    length = int.from_bytes(_exactly(sock, 4), "big")
    if length > protocol.MAX_FRAME_NBYTES:
        raise protocol.ProtocolError(f"a frame of {length} bytes is too long")
    return codec.decode(_exactly(sock, length))


def messages_on(sock: socket.socket, codec: protocol.Codec) -> Iterator[Any]:
    """Every message of a blocking socket until its other end closes it or it fails."""
    frames = protocol.Frames()
    while True:
        try:
            data = sock.recv(1 << 18)
        except OSError:
            return
        if not data:
            return
        for body in frames.feed(data):
            yield codec.decode(body)


def connections(server: socket.socket) -> Iterator[socket.socket]:
    """Every connection that comes, until ``server`` is shut."""
    while True:
        try:
            sock, _ = server.accept()
        except OSError as error:
            if error.errno not in _PASSING:
                return
            time.sleep(_PAUSE_S)
            continue
        yield sock


def shut(sock: socket.socket) -> None:
    """End the connection and wake every thread that waits in a call on it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
