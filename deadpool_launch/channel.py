"""Authenticated message streams between launcher and agents, for asyncio.

Both ends prove that they know the job's secret before any message is read (see ``protocol.proof``).
What lives here: the handshake and a typed stream. What does not: deciding anything about who is at
the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
from pathlib import Path
from typing import Any

from deadpool_runtime import protocol

SECRET_NAME = "secret"
SECRET_NBYTES = 32
#: Where the launcher listens, as HOST:PORT, for commands that are given beside the job.
ADDRESS_NAME = "address"
_ADDRESS = re.compile(r"([\w.:%-]{1,255}):(\d{1,5})", re.ASCII)
#: What no name of a host has between two dots.
_LONG_LABEL = re.compile(r"^\.|\.\.|[^.]{64}")
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


def write_address(run_dir: Path, host: str, port: int) -> None:
    """Say where the launcher of this run directory is reached, to its user only."""
    fresh = run_dir / f".{ADDRESS_NAME}.{os.getpid()}"
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(f"{host}:{port}\n")
    fresh.rename(run_dir / ADDRESS_NAME)


def read_address(run_dir: Path) -> tuple[str, int]:
    """The opposite; raises ``OSError``, or ``ValueError`` if there is something else."""
    text = (run_dir / ADDRESS_NAME).read_text(encoding="ascii", errors="replace").strip()
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found[2]) < 1 << 16 or _LONG_LABEL.search(found[1]):
        raise ValueError(f"{ADDRESS_NAME} is not HOST:PORT")
    return found[1], int(found[2])


def forget(run_dir: Path) -> None:
    """The job is over: nobody of it can be there any more."""
    for name in (ADDRESS_NAME, SECRET_NAME):
        (run_dir / name).unlink(missing_ok=True)


class BrokenOff(protocol.ProtocolError):
    """The peer went away, or took too long, before both had proved the secret."""


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

    def put_back(self, messages: list[Any]) -> None:
        """Let the next ``receive`` return these, which an earlier one returned."""
        self._ready = messages

    async def receive(self) -> list[Any]:
        """The next messages, at least one; an empty list means the connection is closed."""
        if self._ready:
            ready, self._ready = self._ready, []
            return ready
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
        raise BrokenOff(f"handshake broken off: {error}") from error


class Guests:
    """Connections that have not proved the secret, at most so many of them.

    A proof takes no time, so what stays without one makes room for those that come later, the
    oldest first: a stranger that connects and says nothing, a thousand times, takes neither all
    descriptors nor anybody's place.
    """

    def __init__(self, secret: bytes, most: int) -> None:
        self._secret = secret
        self._most = most
        self._there: dict[asyncio.StreamWriter, None] = {}

    async def prove(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """``accept_handshake``; one that had to make room is broken off."""
        self._there[writer] = None
        if len(self._there) > self._most:
            oldest = next(iter(self._there))
            del self._there[oldest]
            oldest.transport.abort()
        try:
            await accept_handshake(reader, writer, self._secret)
        finally:
            self._there.pop(writer, None)


async def connect_handshake(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    secret: bytes,
    timeout_s: float = HANDSHAKE_S,
) -> None:
    """The client's side; raises ``ProtocolError`` when the server does not prove the secret in
    time.
    """
    try:
        async with asyncio.timeout(timeout_s):
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
        raise BrokenOff(f"handshake broken off: {error}") from error
