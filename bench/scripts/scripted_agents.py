"""Agents of many nodes in one process, for ``bench/scale.py``; they answer for ranks that do not
exist.

Orders come on stdin: ``start NODE`` and ``lose NODE``. What is told on stdout: ``training TIME``
when every rank may train, and ``report JSON`` when all were told to go on after a loss.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from deadpool_launch.agent.line import LauncherGone, LauncherLine
from deadpool_launch.channel import read_secret
from deadpool_runtime import protocol
from deadpool_runtime.replication.naming import Ranks, packed

#: Every order that is waited for in an incident, and what the launcher had to know last before.
_AFTER = {"Revoke": "loss", "TakeInventory": "Parked", "Plan": "Inventory", "Resume": "Restored"}
_MUCH_NBYTES = 1 << 40


class Crowd:
    """All agents, and when they were told what."""

    def __init__(self, host: str, port: int, run_dir: Path, nproc: int, step_s: float) -> None:
        self.address = (host, port)
        self.secret = read_secret(run_dir)
        self.nproc = nproc
        self.step_s = step_s
        self.agents: dict[str, Agent] = {}
        self.told_at: dict[str, float] = {}
        self.sent_at: dict[str, float] = {}
        self.lost_at = 0.0
        self.nbytes = self.orders = 0
        self._training: set[int] = set()
        self._resumed: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._shards: dict[int, Ranks] = {}

    def shard(self, rank: int, world_size: int) -> Ranks:
        """The segment of a rank: that of all ranks at the same place of their nodes."""
        place = rank % self.nproc
        if place not in self._shards:
            self._shards[place] = packed(tuple(range(place, world_size, self.nproc)))
        return self._shards[place]

    def start(self, node: str) -> None:
        """Have the agent of this node connect."""
        agent = self.agents[node] = Agent(self, node)
        task = asyncio.create_task(agent.live())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def lose(self, node: str) -> None:
        """The node loses power."""
        self.lost_at = self.sent_at["loss"] = time.monotonic()
        self.agents.pop(node).lose()

    def told(self, order: protocol.ToAgent, world_size: int) -> None:
        """An agent has an order."""
        if not self.lost_at and not isinstance(order, protocol.TellRanks):
            return
        now = time.monotonic()
        name = type(order).__name__
        if isinstance(order, protocol.TellRanks):
            name = type(order.body).__name__
        if self.lost_at:
            self.told_at[name] = now
            self.orders += 1
            self.nbytes += len(protocol.frame(order))
            if name == "Resume" and isinstance(order, protocol.TellRanks):
                self._resumed |= set(order.ranks)
                if len(self._resumed) == world_size:
                    self._report(now)
        elif name == "Protect" and isinstance(order, protocol.TellRanks):
            before = len(self._training)
            self._training |= set(order.ranks)
            if before < world_size == len(self._training):
                print(f"training {now}", flush=True)

    def said(self, body: protocol.Message) -> None:
        """An agent or a rank said something."""
        self.sent_at[type(body).__name__] = time.monotonic()

    def _report(self, now: float) -> None:
        told_s = {
            order: self.told_at[order] - self.sent_at[before] for order, before in _AFTER.items()
        }
        # By the clock of the journal, which says when each was decided.
        ahead_s = time.time() - time.monotonic()
        report = {
            "told_s": told_s,
            "told_at": {order: self.told_at[order] + ahead_s for order in _AFTER},
            "loss_to_resume_s": round(now - self.lost_at, 3),
            "nbytes": self.nbytes,
            "orders": self.orders,
        }
        print(f"report {json.dumps(report)}", flush=True)


def _keep_nothing(part: protocol.LogPart, term: int) -> protocol.LogKept:
    """Nobody keeps the launcher's log here."""
    raise AssertionError("no standby launcher was asked for")


class Agent:
    """One agent with its ranks."""

    def __init__(self, crowd: Crowd, node: str) -> None:
        self._crowd = crowd
        self._node = node
        self._line = LauncherLine(
            crowd.address,
            crowd.secret,
            hello=lambda host, heard, to: protocol.AgentHello(
                node, host, os.getpid(), "scripted", protocol.PROTOCOL_VERSION, to.term, heard
            ),
            on_broken=lambda reason: None,
            on_gone=lambda reason: None,
            on_part=_keep_nothing,
        )
        self._born: dict[int, int] = {}
        self._training: set[int] = set()
        #: Ranks that have copies on this node.
        self._kept: set[int] = set()
        self._step = 0
        self._epoch = 1
        self._spec: protocol.JobSpec | None = None
        self._task: asyncio.Task[None] | None = None

    def lose(self) -> None:
        """The connection breaks, and nothing is said any more."""
        if self._task is not None:
            self._task.cancel()

    async def live(self) -> None:
        """Connect, obey, until there is no launcher."""
        self._task = asyncio.current_task()
        beating = stepping = None
        try:
            self._spec = spec = await self._line.connect()
            self._line.send(
                protocol.AgentReady(0.0, protocol.Address(self._node, 1), _MUCH_NBYTES, "free")
            )
            beating = asyncio.create_task(self._beat(spec.heartbeat_s))
            stepping = asyncio.create_task(self._train())
            while True:
                for order in await self._line.orders(0.0):
                    self._crowd.told(order, spec.world_size)
                    self._obey(order, spec)
        except (LauncherGone, protocol.ProtocolError, asyncio.CancelledError):
            pass
        finally:
            for task in (beating, stepping):
                if task is not None:
                    task.cancel()
            await self._line.hang_up()

    async def _beat(self, interval_s: float) -> None:
        while True:
            self._line.beat()
            await asyncio.sleep(interval_s)

    async def _train(self) -> None:
        while True:
            await asyncio.sleep(self._crowd.step_s)
            if self._training:
                self._step += 1
                self._say_all(self._training, self._done())

    def _done(self) -> protocol.StepDone:
        return protocol.StepDone(self._epoch, self._step, self._crowd.step_s, 0.0, 1.0, 0)

    def _say(self, rank: int, body: protocol.FromRank) -> None:
        self._crowd.said(body)
        self._line.send(protocol.RankSaid(rank, self._born[rank], body))

    def _say_all(self, ranks: Iterable[int], body: protocol.FromRank) -> None:
        for rank in sorted(ranks):
            self._say(rank, body)

    def _digests(self, rank: int, world_size: int) -> list[protocol.SegmentDigest]:
        return [protocol.SegmentDigest(self._crowd.shard(rank, world_size), "0123456789abcdef")]

    def _obey(self, order: protocol.ToAgent, spec: protocol.JobSpec) -> None:
        match order:
            case protocol.StartRanks(epoch=epoch, ranks=ranks):
                for rank in ranks:
                    self._born[rank] = epoch
                    self._say(rank, protocol.RankUp(rank + 1, 1))
            case protocol.TellRanks(ranks=ranks, body=body):
                for rank in ranks:
                    self._tell(rank, body, spec)
            case protocol.KillRanks(ranks=ranks):
                for rank in ranks:
                    self._training.discard(rank)
                    self._line.send(protocol.RankExited(rank, self._born[rank], None, 9))
            case protocol.TakeInventory(epoch=epoch):
                kept = protocol.Inventory(epoch, self._copies(spec))
                self._crowd.said(kept)
                self._line.send(kept)
            case protocol.StopAgent():
                self._training.clear()
                self._line.send(protocol.AgentLeaving([]))
            case _:
                pass

    def _copies(self, spec: protocol.JobSpec) -> list[protocol.Copy]:
        """Of every rank of the node its own copies, and the replicas of the node before it."""
        copies = []
        for rank in sorted(self._kept):
            shard = self._crowd.shard(rank, spec.world_size)
            before = (rank - spec.nproc_per_node) % spec.world_size
            for step in (0, 1):
                copies.append(protocol.Copy(rank, step, 1, False, [shard], []))
                copies.append(protocol.Copy(before, step, 1, True, [], [shard]))
        return copies

    def _tell(self, rank: int, body: protocol.ToRank, spec: protocol.JobSpec) -> None:
        world = spec.world_size
        match body:
            case protocol.Begin(epoch=epoch, replacement=replacement):
                size = protocol.SegmentSize(self._crowd.shard(rank, world), 1 << 20)
                self._say(rank, protocol.Attached("scripted", [size], 1000))
                if replacement:
                    self._say(rank, protocol.Parked(epoch, 0.0))
            case protocol.Protect(epoch=epoch):
                for step in (0, 1):
                    self._say(rank, protocol.Snapshotted(epoch, step, self._digests(rank, world)))
                self._say(rank, protocol.Protected(epoch, 1))
                self._step = max(self._step, 1)
                self._say(rank, self._done())
                self._training.add(rank)
                self._kept.add(rank)
            case protocol.Revoke(epoch=epoch):
                self._training.discard(rank)
                self._epoch = epoch
                self._say(rank, protocol.Parked(epoch, 0.0))
            case protocol.Plan(epoch=epoch, step=step):
                self._step = step
                self._epoch = epoch
                self._say(rank, protocol.GroupsRebuilt(epoch, 1))
                self._say(rank, protocol.Restored(epoch, step, self._digests(rank, world)))
            case protocol.Resume(epoch=epoch):
                self._training.add(rank)
                self._say(rank, protocol.Protected(epoch, self._step))
                done = protocol.StepDone(epoch, self._step + 1, 0.1, 0.0, 1.0, 0)
                self._say(rank, done)
            case _:
                pass


async def main(host: str, port: int, run_dir: Path, nproc: int, step_s: float) -> None:
    """Obey what comes on stdin until it is closed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    crowd = Crowd(host, port, run_dir, nproc, step_s)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        what, node = line.decode().split()
        getattr(crowd, what)(node)


if __name__ == "__main__":
    _, host, port, run_dir, nproc, step_s = sys.argv
    asyncio.run(main(host, int(port), Path(run_dir), int(nproc), float(step_s)))
