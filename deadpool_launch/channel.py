"""Authenticated message streams between launcher and agents, for asyncio.

Both ends prove that they know the job's secret before any message is read (see ``protocol.proof``).
What lives here: the handshake and a typed stream. What does not: deciding anything about who is at
the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from pathlib import Path
from typing import Any

from deadpool_runtime import protocol

SECRET_NAME = "secret"
SECRET_NBYTES = 32
#: Time for a peer to finish the handshake.
HANDSHAKE_S = 10.0


def write_secret(run_dir: Path) -> bytes:
    """Make the job's secret, readable by its user only, and return it."""
    secret = secrets.token_bytes(SECRET_NBYTES)
    fd = os.open(run_dir / SECRET_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(secret)
    return secret


def read_secret(run_dir: Path) -> bytes:
    """The job's secret; raises ``OSError`` where the run directory cannot be read."""
    return (run_dir / SECRET_NAME).read_bytes()


class MessageStream:
    """Messages over one authenticated connection. Not safe for concurrent ``receive`` calls."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, incoming: Any
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._frames = protocol.Frames()
        self._codec = protocol.Codec(incoming)
        self._ready: list[Any] = []

    def send(self, message: protocol.Message) -> None:
        """Queue ``message``; silently dropped when the connection is already closed (``receive``
        tells).
        """
        if not self._writer.is_closing():
            self._writer.write(protocol.frame(message))

    async def drain(self) -> None:
        """Wait until the peer has taken most of what was sent."""
        with contextlib.suppress(OSError):
            await self._writer.drain()

    async def receive(self) -> list[Any]:
        """The next messages, at least one; an empty list means the connection is closed."""
        while True:
            try:
                data = await self._reader.read(1 << 20)
            except OSError:
                return []
            if not data:
                return []
            messages = [self._codec.decode(body) for body in self._frames.feed(data)]
            if messages:
                return messages

    def close(self) -> None:
        """Close the connection without waiting for what is unsent."""
        self._writer.close()

    def abort(self) -> None:
        """Drop the connection at once (the peer sees a reset)."""
        transport = self._writer.transport
        transport.abort()


def set_dead_peer_limits(sock: socket.socket, timeout_s: float) -> None:
    """Let the kernel report a silent peer as an error after about ``timeout_s`` (a vanished node
    sends no reset).
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(timeout_s / 2)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))


async def accept_handshake(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes
) -> None:
    """The server's side; raises ``ProtocolError`` when the client does not prove the secret in
    time.
    """
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            server_nonce = protocol.new_nonce()
            writer.write(server_nonce)
            client_nonce = await reader.readexactly(protocol.NONCE_NBYTES)
            got = await reader.readexactly(protocol.PROOF_NBYTES)
            expected = protocol.proof(secret, "client", server_nonce, client_nonce)
            if not protocol.proof_holds(expected, got):
                raise protocol.ProtocolError("the client does not know this job's secret")
            writer.write(protocol.proof(secret, "server", server_nonce, client_nonce))
    except (TimeoutError, asyncio.IncompleteReadError, OSError) as error:
        raise protocol.ProtocolError(f"handshake broken off: {error}") from error


async def connect_handshake(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes
) -> None:
    """The client's side; raises ``ProtocolError`` when the server does not prove the secret in
    time.
    """
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            server_nonce = await reader.readexactly(protocol.NONCE_NBYTES)
            client_nonce = protocol.new_nonce()
            writer.write(
                client_nonce + protocol.proof(secret, "client", server_nonce, client_nonce)
            )
            got = await reader.readexactly(protocol.PROOF_NBYTES)
            expected = protocol.proof(secret, "server", server_nonce, client_nonce)
            if not protocol.proof_holds(expected, got):
                raise protocol.ProtocolError("the server does not know this job's secret")
    except (TimeoutError, asyncio.IncompleteReadError, OSError) as error:
        raise protocol.ProtocolError(f"handshake broken off: {error}") from error
