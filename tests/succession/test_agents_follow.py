"""Real lines of agents and keepers of the log on loopback, with launchers of which only the server
is real: who is found, who is refused, and what a launcher does that stood still.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from job_specs import job_spec

from deadpool_launch.agent.keeper import LogKeeper
from deadpool_launch.agent.line import LauncherLine
from deadpool_launch.agents import AgentServer
from deadpool_launch.controller import events
from deadpool_launch.controller.mail import Mailbox
from deadpool_launch.succession.lead import CutOff, Lead, Superseded
from deadpool_launch.succession.rules import Allegiance
from deadpool_runtime import protocol

SECRET = b"s" * 32
NODES = ("n1", "n2", "n3", "n4")
HEARTBEAT_TIMEOUT_S = 0.5
LONG_S = 60.0

SPEC = job_spec(world_size=3)


async def until(what: str, holds: Callable[[], Any]) -> None:
    try:
        async with asyncio.timeout(LONG_S):
            while not holds():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not within {LONG_S:g} s: {what}") from None


class Launcher:
    """The server and the lead of a launcher on ``host``; ``lost``: agents that it lost."""

    def __init__(self, host: str, term: int, mail: dict[str, Mailbox]) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = self.socket.getsockname()[:2]
        self.lost: list[str] = []
        self.successor = ""
        self.lead = Lead(
            wanted=2,
            host=host,
            nodes=NODES,
            send=lambda node, message: self.server.tell(node, message),
            linked=lambda: self.server.links,
            followed_by=lambda: self.successor,
            heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
            give_up_s=1.0,
            note=lambda text: None,
        )
        self.server = AgentServer(
            secret=SECRET,
            spec=SPEC,
            expected=set(NODES),
            heartbeat_timeout_s=LONG_S,
            emit=self.emit,
            note=lambda text: None,
            mail=mail,
            answer=self.answer,
            term=term,
            lead=self.lead,
        )

    async def answer(self, question: protocol.Question) -> protocol.Answer:
        raise AssertionError(f"nobody asks anything here: {question}")

    def emit(self, event: events.Event, number: int) -> None:
        if isinstance(event, events.AgentLost):
            self.lost.append(event.node)

    async def listen(self) -> None:
        await self.server.listen(self.socket)

    async def have_kept(self, fit: list[str]) -> None:
        self.lead.settle(fit)
        self.lead.record(b"the log", True)
        await self.lead.copied()
        await until("copies", lambda: len(self.lead._told) == 2)


class Keeper(LogKeeper):
    """Starts its launcher in this process."""

    launchers: list[tuple[str, int]]
    next_one: Callable[[str, int], Awaitable[protocol.Address]]

    async def _start_launcher(self, term: int) -> None:
        self.launchers.append((self._node, term))
        self._launcher = await self.next_one(self._node, term)
        for stream in self._streams.values():
            stream.send(protocol.LauncherAt(self._launcher))


class Agent:
    """The connections of one agent."""

    def __init__(self, node: str, launcher: Launcher) -> None:
        self.node = node
        self.gone = ""
        self.line = LauncherLine(
            launcher.address,
            SECRET,
            hello=lambda host, heard, to: protocol.AgentHello(
                node, host, 1, "0", protocol.PROTOCOL_VERSION, to.term, heard, [], to.seen
            ),
            on_broken=lambda reason: None,
            on_gone=lambda reason: None,
            on_part=lambda part, term: self.keeper.part(part, term),
        )
        self.keeper = Keeper(node, Path("/nowhere"), SECRET, self.line)
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.line.connect()
        self.tasks = [asyncio.create_task(self.obey()), asyncio.create_task(self.beat())]

    async def obey(self) -> None:
        while True:
            await self.line.orders(LONG_S)

    async def beat(self) -> None:
        while True:
            self.line.beat()
            await asyncio.sleep(0.1)

    @property
    def obeys(self) -> Allegiance:
        return self.line._allegiance

    def stop(self) -> None:
        self.keeper.close()
        for task in self.tasks:
            task.cancel()


class Job:
    """Four agents and their launchers, the first on ``n4``."""

    def __init__(self) -> None:
        self.mail = {node: Mailbox() for node in NODES}
        self.launchers = [Launcher("n4", 1, self.mail)]
        self.agents = {node: Agent(node, self.launchers[0]) for node in NODES}
        self.started: list[tuple[str, int]] = []
        for agent in self.agents.values():
            agent.keeper.launchers = self.started
            agent.keeper.next_one = self.next_launcher

    async def next_launcher(self, node: str, term: int) -> protocol.Address:
        launcher = Launcher(node, term, self.mail)
        self.launchers.append(launcher)
        await launcher.listen()
        return protocol.Address(*launcher.address)

    async def __aenter__(self) -> Job:
        await self.launchers[0].listen()
        for agent in self.agents.values():
            await agent.start()
        await self.launchers[0].have_kept(["n1", "n2", "n3", "n4"])
        return self

    async def __aexit__(self, *_: object) -> None:
        for agent in self.agents.values():
            agent.stop()
        for launcher in self.launchers:
            await launcher.server.close()


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deadpool_launch.agent.line._GATHER_S", 1.0)
    monkeypatch.setattr("deadpool_launch.agent.keeper._AGAIN_S", 0.2)


def test_host_that_vanishes_is_followed_by_one_launcher_which_all_others_obey() -> None:
    async def play() -> None:
        async with Job() as job:
            first, lost = job.launchers[0], job.agents["n4"]
            # Nothing comes from n4 any more, and nothing is closed.
            lost.stop()
            first.server.tell = lambda node, message: None  # type: ignore[method-assign]
            for link in first.server.links.values():
                link.stream.send = lambda message: None  # type: ignore[method-assign]
            await until("a launcher", lambda: len(job.launchers) == 2)
            second = job.launchers[1]
            await until("agents", lambda: set(second.server.links) == {"n1", "n2", "n3"})
            assert job.started == [("n1", 100_000)]
            assert {job.agents[node].obeys.term for node in ("n1", "n2", "n3")} == {100_000}
            # The old one is asked whether it still leads: nobody says so.
            del first.server.tell
            for link in first.server.links.values():
                del link.stream.send
            with pytest.raises(CutOff):
                await first.lead.confirmed(first.lead._clock())
            first.successor = "n1"
            with pytest.raises(Superseded, match="n1"):
                await first.lead.confirmed(first.lead._clock())

    asyncio.run(play())


def test_keeper_that_is_cut_off_with_one_other_does_not_take_over() -> None:
    async def play() -> None:
        async with Job() as job:
            first = job.launchers[0]
            for node in ("n1", "n2"):
                job.agents[node].line._address = ("127.0.0.1", 1)
                first.server.drop(node)
            await until(
                "it asks", lambda: job.agents["n2"].node in job.agents["n1"].keeper._streams
            )
            await asyncio.sleep(2 * HEARTBEAT_TIMEOUT_S)
            assert job.started == []
            await first.lead.confirmed(first.lead._clock())

    asyncio.run(play())


def test_launcher_that_is_started_again_at_its_address_in_time_is_not_replaced() -> None:
    async def play() -> None:
        async with Job() as job:
            first = job.launchers[0]
            for node in NODES:
                first.server.drop(node)
            await until("agents", lambda: set(first.server.links) == set(NODES))
            assert job.started == []
            assert {agent.obeys.term for agent in job.agents.values()} == {1}

    asyncio.run(play())


def test_agent_that_was_told_what_no_log_has_is_turned_away() -> None:
    async def play() -> None:
        async with Job() as job:
            agent = job.agents["n2"]
            agent.line._heard = 7
            job.launchers[0].server.drop("n2")
            with pytest.raises(Exception, match="told what is in no log"):
                await agent.tasks[0]

    asyncio.run(play())
