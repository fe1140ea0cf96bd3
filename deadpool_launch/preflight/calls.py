"""The nodes call the launcher and each other, as agents, replicators and ranks will.

Each node's probe listens on a port of the system's choice, comes to the launcher, is told whom to
call, and stays until the others have called too. Both ends of every call prove that they know the
secret in the run directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any

from deadpool_launch import channel
from deadpool_launch.agent.paths import unreached
from deadpool_runtime.protocol import Address, ProtocolError

#: Each node calls so many others.
MOST_CALLED = 16
#: Time for all nodes to come once the first is there, and for a call, in seconds.
GATHER_S = 15.0
CALL_S = 10.0
#: The longest that all of it takes.
ALL_S = 2 * GATHER_S + 3 * CALL_S
_BROKEN = (OSError, TimeoutError, ValueError, KeyError, TypeError, ProtocolError)


def to_call(node: str, nodes: Sequence[str], most: int = MOST_CALLED) -> tuple[str, ...]:
    """Whom ``node`` calls: all others, or ``most`` that are spread over the circle of all nodes.

    Every node is called by as many as it calls.
    """
    count = len(nodes)
    at = nodes.index(node)
    steps = range(1, count)
    if len(steps) > most:
        steps_taken = sorted({1 + index * (count - 2) // (most - 1) for index in range(most)})
    else:
        steps_taken = list(steps)
    return tuple(nodes[(at + step) % count] for step in steps_taken)


class Exchange:
    """The launcher's side, for as long as it is entered."""

    def __init__(self, host: str, secret: bytes, expected: int) -> None:
        #: Where nodes come to.
        self.address = Address(host, 0)
        self._secret = secret
        self._expected = expected
        self._met: dict[str, Address] = {}
        self._all_there = asyncio.Event()
        self._left = expected
        self._all_done = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._meeting: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Exchange:
        self._server = await asyncio.start_server(self._meet, "0.0.0.0", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.address = Address(self.address.host, port)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in tuple(self._meeting):
            task.cancel()
        await asyncio.gather(*self._meeting, return_exceptions=True)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._meeting.add(task)
        try:
            with contextlib.suppress(*_BROKEN):
                await channel.accept_handshake(reader, writer, self._secret)
                await self._serve(reader, writer)
        finally:
            self._meeting.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = await _receive(reader, CALL_S)
        self._met[said["node"]] = Address(said["host"], said["port"])
        if len(self._met) >= self._expected:
            self._all_there.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_there.wait(), GATHER_S)
        # Those who come later are called by nobody else, but they call.
        self._all_there.set()
        others = to_call(said["node"], sorted(self._met))
        _send(writer, {name: [self._met[name].host, self._met[name].port] for name in others})
        await _receive(reader, 2 * CALL_S)
        self._left -= 1
        if self._left <= 0:
            self._all_done.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_done.wait(), 2 * CALL_S)
        _send(writer, {})
        await writer.drain()
        writer.write_eof()


async def call(node: str, launcher: Address, secret: bytes) -> dict[str, Any]:
    """A node's side: whom it did not reach. ``launcher``: why not that, empty if it did."""
    try:
        async with asyncio.timeout(CALL_S):
            reader, writer = await asyncio.open_connection(launcher.host, launcher.port)
            await channel.connect_handshake(reader, writer, secret)
    except _BROKEN as error:
        why = str(error) or f"no answer within {CALL_S:g} s"
        return {"launcher": f"{launcher.host}:{launcher.port}: {why}", "unreached": [], "called": 0}
    server = await asyncio.start_server(lambda r, w: _answer(r, w, secret), "0.0.0.0", 0)
    try:
        host, port = writer.get_extra_info("sockname")[0], server.sockets[0].getsockname()[1]
        _send(writer, {"node": node, "host": host, "port": port})
        others = await _receive(reader, GATHER_S + CALL_S)
        peers = {name: Address(*where) for name, where in others.items()}
        # A firewall refuses as well; here the other end does listen.
        missed = await unreached(peers, secret, CALL_S, refused=False)
        _send(writer, {})
        with contextlib.suppress(*_BROKEN):
            await _receive(reader, 3 * CALL_S)
        return {"launcher": "", "unreached": missed, "called": len(peers)}
    except _BROKEN as error:
        return {"launcher": f"it broke off ({error})", "unreached": [], "called": 0}
    finally:
        server.close()
        writer.transport.abort()


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes
) -> None:
    with contextlib.suppress(*_BROKEN):
        await channel.accept_handshake(reader, writer, secret)
        # The caller ends the connection once it has seen the proof.
        await asyncio.wait_for(reader.read(), CALL_S)
    writer.transport.abort()


def _send(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
    writer.write(json.dumps(value).encode() + b"\n")


async def _receive(reader: asyncio.StreamReader, timeout_s: float) -> dict[str, Any]:
    line = await asyncio.wait_for(reader.readline(), timeout_s)
    found = json.loads(line)
    if not isinstance(found, dict):
        raise TypeError("no object")
    return found
