"""Strangers at the launcher's port: they are refused, told of once, and keep nobody out."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest
from job_specs import job_spec

from deadpool_launch.agent.line import LauncherLine
from deadpool_launch.agents import SPARE_GUESTS, AgentServer
from deadpool_launch.controller import events
from deadpool_launch.controller.mail import Mailbox
from deadpool_launch.refusals import Refusals
from deadpool_runtime import protocol

SECRET = b"s" * 32
LONG_S = 60
SPEC = job_spec(job_id="7", heartbeat_s=10.0)


class Door:
    """A server for the agent of n1, what it noted, and what it gave to the controller."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.events: list[events.Event] = []
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.address = self.socket.getsockname()[:2]
        self.server = AgentServer(
            secret=SECRET,
            spec=SPEC,
            expected={"n1"},
            heartbeat_timeout_s=600.0,
            emit=lambda event, number: self.events.append(event),
            note=self.notes.append,
            mail={"n1": Mailbox()},
            answer=self.answer,
        )

    async def answer(self, question: protocol.Question) -> protocol.Answer:
        raise AssertionError(f"nobody asks anything here: {question}")

    async def agent(self, secret: bytes = SECRET) -> LauncherLine:
        line = LauncherLine(
            self.address,
            secret,
            hello=lambda host, heard, to: protocol.AgentHello(
                "n1", host, 1, "test", protocol.PROTOCOL_VERSION, to.term, heard
            ),
            on_broken=lambda reason: None,
            on_gone=lambda reason: None,
            on_part=keep_nothing,
        )
        await asyncio.wait_for(line.connect(), LONG_S)
        return line

    def connected(self) -> list[str]:
        return [e.node for e in self.events if isinstance(e, events.AgentConnected)]


def at_the_door(visit: Callable[[Door], Awaitable[None]]) -> Door:
    async def run() -> Door:
        door = Door()
        await door.server.listen(door.socket)
        await visit(door)
        await door.server.close()
        return door

    return asyncio.run(run())


def keep_nothing(part: protocol.LogPart, term: int) -> protocol.LogKept:
    raise AssertionError(f"no agent here keeps a log: {part}")


async def closed(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the other end closes the connection or resets it."""
    got = b""
    try:
        while more := await asyncio.wait_for(reader.read(1 << 16), LONG_S):
            got += more
    except ConnectionError:
        pass
    return got


def test_strangers_who_say_nothing_keep_no_agent_out() -> None:
    async def visit(door: Door) -> None:
        silent = [await asyncio.open_connection(*door.address) for _ in range(4 * SPARE_GUESTS)]
        # The oldest made room for the newest; nobody had to wait for a time-out.
        got = await asyncio.gather(*(closed(reader) for reader, _ in silent[: 2 * SPARE_GUESTS]))
        assert all(len(data) <= protocol.NONCE_NBYTES for data in got)
        await door.agent()
        for _, writer in silent:
            writer.close()

    door = at_the_door(visit)
    assert door.connected() == ["n1"]
    assert len(door.notes) < 10


def test_strangers_who_talk_are_refused_and_told_of_once() -> None:
    giant = b"\xff\xff\xff\xff" + bytes(60)
    hello = protocol.frame(protocol.AgentHello("n1", "h", 1, "v", protocol.PROTOCOL_VERSION))

    async def visit(door: Door) -> None:
        for said in (b"GET / HTTP/1.0\r\n\r\n" + bytes(64), giant, hello + bytes(64), bytes(64)):
            for _ in range(5):
                reader, writer = await asyncio.open_connection(*door.address)
                writer.write(said)
                assert len(await closed(reader)) <= protocol.NONCE_NBYTES
                writer.close()
        await door.agent()

    door = at_the_door(visit)
    assert door.connected() == ["n1"]
    refusal = "connection from 127.0.0.1 refused"
    why = "the client does not know this job's secret"
    assert door.notes == [f"{refusal}: {why}", f"{refusal} 10 times by now: {why}"]


def test_a_proof_that_was_heard_on_the_wire_serves_nobody_else() -> None:
    async def visit(door: Door) -> None:
        mine = bytes(protocol.NONCE_NBYTES)
        reader, writer = await asyncio.open_connection(*door.address)
        nonce = await reader.readexactly(protocol.NONCE_NBYTES)
        heard = mine + protocol.proof(SECRET, "client", nonce, mine)
        writer.write(heard)
        # It is right on the connection for which it was made.
        assert len(await reader.readexactly(protocol.PROOF_NBYTES)) == protocol.PROOF_NBYTES
        writer.close()
        reader, writer = await asyncio.open_connection(*door.address)
        await reader.readexactly(protocol.NONCE_NBYTES)
        writer.write(heard)
        assert await closed(reader) == b""
        writer.close()

    door = at_the_door(visit)
    assert door.connected() == []
    assert [note for note in door.notes if "does not know this job's secret" in note]


def test_refusals_are_told_of_ever_more_rarely() -> None:
    refusals = Refusals()
    told = [refusals.text("10.0.0.9", "why") for _ in range(1000)]
    assert [number for number, text in enumerate(told, 1) if text] == [1, 10, 100, 1000]
    others = [refusals.text(f"10.0.1.{number}", "why") for number in range(1000)]
    assert sum(text is not None for text in others) < 260


@pytest.mark.parametrize(
    "report",
    [
        protocol.RankExited(1, 1, 0, None),
        protocol.RankExited(-1, 1, 0, None),
        protocol.Paces([protocol.Pace(9, 1, 1, 25, 0.1, 0.1, 0.1)]),
        protocol.Standings([protocol.Standing(9, 1, 1, 5, 60.0, [])], [], 0),
        protocol.Standings([], [(9, 1)], 0),
    ],
    ids=lambda report: type(report).__name__,
)
def test_an_agent_that_tells_of_a_rank_that_there_is_not_is_lost(
    report: protocol.FromAgent,
) -> None:
    async def visit(door: Door) -> None:
        line = await door.agent()
        line.send(protocol.RankExited(0, 1, 0, None))
        line.send(report)
        async with asyncio.timeout(LONG_S):
            while not isinstance(door.events[-1], events.AgentLost):
                await asyncio.sleep(0.01)

    told, lost = at_the_door(visit).events[1:]
    assert isinstance(told, events.RankExited)
    assert isinstance(lost, events.AgentLost)
    assert lost.evidence.startswith("agent sent word of rank ")
    assert lost.evidence.endswith(", which the job does not have")
