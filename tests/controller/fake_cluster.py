"""A cluster that exists only as a heap of events: nodes, agents and ranks that obey the controller.

Deterministic for a seed. Ranks train in lockstep as a collective makes them do, hold three slots,
unwind on ``Revoke``, rebuild only together, and restore only from a source that really holds the
step; so a wrong decision of the controller shows as a job that hangs, as an assertion here, or as a
wrong final state. Messages of one node keep their order in either direction; everything else may
overtake.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from workbench import Bench, step_done

from deadpool_launch.controller.config import Config
from deadpool_launch.controller.events import (
    Action,
    AgentConnected,
    AgentLost,
    AgentStartFailed,
    AgentWarm,
    Event,
    FenceNode,
    Finish,
    JobStarted,
    KillRanks,
    RankExited,
    RankSaid,
    RankStopped,
    StartAgent,
    StartRanks,
    StopRequested,
    Tell,
    Tick,
)
from deadpool_runtime import protocol

LAST_STEP = 8
#: Long after every deadline of ``quick_config`` was used to its end many times.
END_OF_TIME = 1000.0


def quick_config(
    nodes: int, spares: int, nproc_per_node: int, spare_start: str, gather_s: float = 0.05
) -> Config:
    """Short deadlines, so that escalation happens within a few simulated seconds."""
    return Config(
        active=tuple(f"n{i}" for i in range(nodes)),
        spares=tuple(f"s{i}" for i in range(spares)),
        nproc_per_node=nproc_per_node,
        spare_start=spare_start,
        heartbeat_timeout_s=0.5,
        agent_start_s=5,
        rank_start_s=5,
        park_s=2,
        build_s=6,
        restore_s=4,
        kill_s=1,
        gather_s=gather_s,
    )


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong at a time; ``target`` picks a node or rank."""

    at: float
    kind: str
    target: int


FAULT_KINDS = (
    "kill",  # the process dies by a signal
    "power",  # the node goes away, its agent is missed later
    "freeze",  # the process stops, its agent sees it
    "deaf",  # the process no longer answers Revoke or Plan
    "unkillable",  # the process stops and outlives SIGKILL
    "raise",  # the script raises inside a step
    "fail",  # the script fails outside a step
    "bad-start",  # agents no longer come up on the node
    "slow-up",  # new processes on the node never come up
    "corrupt",  # the next state the process restores is wrong
)


@dataclass
class Process:
    """The script in one process."""

    rank: int
    born: int
    node: str
    mode: str = "new"  # new, script, building, train, raised, parked, planned, waiting, over, gone
    epoch: int = 0
    step: int = -1
    slots: dict[int, str] = field(default_factory=dict)
    plan: protocol.Plan | None = None
    busy: bool = False
    rebuilding: bool = False
    frozen: bool = False
    deaf: bool = False
    unkillable: bool = False
    corrupt: bool = False
    attached: bool = False


class FakeCluster:
    """Runs one job against the controller until its verdict."""

    def __init__(self, config: Config, seed: int, faults: list[Fault], attaches: bool) -> None:
        self.config = config
        self.bench = Bench(config)
        self.random = random.Random(seed)
        self.faults = faults
        self.attaches = attaches
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.order: dict[tuple[str, str], float] = {}
        self.dead: set[str] = set()
        self.bad: set[str] = set()
        self.slow: set[str] = set()
        self.agents: set[str] = set()
        self.processes: dict[int, Process] = {}
        self.own: dict[int, set[int]] = {}
        self.happened: list[Fault] = []

    # ------------------------------------------------------------ time

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.heap, (self.now + delay_s, self.count, what))

    def delay(self, most_s: float = 0.2) -> float:
        return self.random.uniform(0.001, most_s)

    def in_order(self, node: str, way: str, what: Callable[[], None]) -> None:
        """Deliver after all that went the same way before."""
        time = max(self.order.get((node, way), 0.0), self.now + self.delay(0.02))
        self.order[node, way] = time
        self.later(time - self.now, what)

    def run(self) -> Finish:
        for fault in self.faults:
            self.later(fault.at, partial(self.strike, fault))
        self.feed(JobStarted(self.now))
        while self.bench.finish is None:
            deadline = self.bench.state.next_deadline()
            if deadline is not None and (not self.heap or deadline <= self.heap[0][0]):
                self.now = max(self.now, deadline)
                self.feed(Tick(self.now))
                continue
            assert self.heap, f"the job waits for nothing: {self.bench.state}"
            self.now, _, what = heapq.heappop(self.heap)
            assert self.now < END_OF_TIME, f"the job does not end: {self.bench.state}"
            what()
        return self.bench.finish

    def feed(self, event: Event) -> None:
        self.bench.now = self.now
        for action in self.bench.feed(event):
            self.perform(action)

    # ------------------------------------------------------------ what agents do

    def perform(self, action: Action) -> None:
        match action:
            case StartAgent(node=node):
                self.start_agent(node)
            case FenceNode(node=node):
                self.dead.add(node)
                self.end_node(node)
            case StartRanks(node=node, epoch=epoch, ranks=ranks):
                self.in_order(node, "down", lambda: self.start_ranks(node, epoch, ranks))
            case KillRanks(node=node, ranks=ranks):
                self.in_order(node, "down", lambda: self.kill(node, ranks))
            case Tell(ranks=ranks, body=body):
                for rank in ranks:
                    node = self.bench.state.node_of(rank)
                    self.in_order(node, "down", partial(self.hear, node, rank, body))
            case _:
                pass

    def start_agent(self, node: str) -> None:
        if node in self.dead or node in self.bad:
            if self.random.random() < 0.5:
                failed = AgentStartFailed
                self.later(self.delay(), lambda: self.feed(failed(self.now, node, "srun")))
            return
        self.agents.add(node)
        self.up(node, lambda: AgentConnected(self.now, node, f"{node}.host"))
        self.later(self.delay(1.0), lambda: self.up(node, lambda: AgentWarm(self.now, node)))

    def up(self, node: str, event: Callable[[], Event]) -> None:
        """From the node's agent to the launcher."""
        if node not in self.dead:
            self.in_order(node, "up", lambda: self.feed(event()))

    def start_ranks(self, node: str, epoch: int, ranks: tuple[int, ...]) -> None:
        if node in self.dead:
            return
        for rank in ranks:
            process = self.processes[rank] = Process(rank, epoch, node)
            if node not in self.slow:
                self.later(self.delay(), partial(self.say, process, protocol.RankUp(1, 9000)))

    def kill(self, node: str, ranks: tuple[int, ...]) -> None:
        for rank in ranks:
            process = self.processes.get(rank)
            if process and process.node == node and not process.unkillable:
                self.exit(process, signal=9)

    def exit(self, process: Process, *, code: int | None = None, signal: int | None = None) -> None:
        if process.mode == "gone" or process.node in self.dead:
            return
        process.mode = "gone"
        rank, born, node = process.rank, process.born, process.node
        self.up(node, lambda: RankExited(self.now, node, rank, born, code, signal))
        if code != 0:
            self.break_collectives()

    def end_node(self, node: str) -> None:
        lost = [p for p in self.processes.values() if p.node == node and p.mode != "gone"]
        for process in lost:
            process.mode = "gone"
        if lost:
            self.break_collectives()

    def say(self, process: Process, body: protocol.FromRank) -> None:
        if process.mode == "gone" or process.frozen:
            return
        if isinstance(body, protocol.StepDone):
            self.own.setdefault(process.rank, set()).add(body.step)
        rank, born, node = process.rank, process.born, process.node
        self.up(node, lambda: RankSaid(self.now, node, rank, born, body))

    # ------------------------------------------------------------ what ranks do

    def hear(self, node: str, rank: int, body: protocol.ToRank) -> None:
        process = self.processes.get(rank)
        if not process or process.node != node or process.mode == "gone" or process.frozen:
            return
        match body:
            case protocol.Begin():
                process.epoch = max(process.epoch, body.epoch)
                process.mode = "building" if body.replacement else "script"
                self.later(self.delay(0.5), lambda: self.first_step(process))
            case protocol.Revoke(epoch=epoch):
                self.revoke(process, epoch)
            case protocol.Plan():
                if process.mode == "parked" and body.epoch == process.epoch and not process.deaf:
                    process.mode, process.plan, process.rebuilding = "planned", body, False
            case protocol.Resume(epoch=epoch):
                if process.mode == "planned" and process.epoch == epoch:
                    process.mode = "train"
            case protocol.RaiseIt():
                if process.mode == "raised":
                    self.fail(process, "raised in a step")
            case protocol.AllEnded():
                if process.mode == "waiting":
                    process.mode = "over"
                    self.later(self.delay(), lambda: self.end(process))
            case _:
                pass
        self.pump()

    def first_step(self, process: Process) -> None:
        if process.mode not in ("script", "building") or process.frozen:
            return
        if process.mode == "building":
            self.park(process)
            return
        if not self.attaches:
            self.later(LAST_STEP * 0.3, lambda: self.end(process))
            return
        process.attached = True
        self.say(process, protocol.Attached("ddp"))
        if process.epoch < self.heard_of(process):
            self.park(process)
            return
        process.mode = "train"
        self.complete(process, 0)
        self.pump()

    def heard_of(self, process: Process) -> int:
        return process.plan.epoch if process.plan else process.epoch

    def complete(self, process: Process, step: int) -> None:
        process.step = step
        process.slots[step] = value(step)
        for old in sorted(process.slots)[:-3]:
            del process.slots[old]
        self.say(process, step_done(process.epoch, step, "same" if step < 2 else ""))

    def revoke(self, process: Process, epoch: int) -> None:
        if epoch <= process.epoch or process.deaf:
            return
        if process.mode == "train" and process.busy and self.random.random() < 0.3:
            self.complete(process, process.step + 1)  # the step was past its collectives
        process.epoch = epoch
        process.busy = False
        if process.mode in ("train", "raised", "waiting", "parked", "planned"):
            self.park(process)
        elif process.mode == "script" and self.attaches:
            process.mode = "building"  # parks when it comes to its first step

    def park(self, process: Process) -> None:
        process.mode = "parked"
        if not process.attached:
            process.attached = True
            self.say(process, protocol.Attached("ddp"))
        said = protocol.Parked(process.epoch, sorted(process.slots), 0.01)
        self.later(self.delay(), lambda: self.say(process, said))

    def fail(self, process: Process, error: str) -> None:
        self.say(process, protocol.ScriptFailed(error, "traceback", 1))
        process.mode = "over"
        self.later(self.delay(), lambda: self.exit(process, code=1))

    def end(self, process: Process) -> None:
        if process.mode in ("over", "script") and not process.frozen:
            self.say(process, protocol.ScriptEnded())
            process.mode = "over"
            self.later(self.delay(), lambda: self.exit(process, code=0))

    def break_collectives(self) -> None:
        """A peer went away: some ranks raise, others hang until they are told."""
        for process in self.processes.values():
            if self.random.random() < 0.5:
                self.later(self.delay(0.3), partial(self.break_one, process, process.epoch))

    def break_one(self, process: Process, epoch: int) -> None:
        if process.frozen or process.busy or process.epoch != epoch:
            return
        if process.mode == "train":
            process.mode = "raised"
            error = "connection closed"
            self.say(process, protocol.StepRaised(process.epoch, process.step + 1, error))
        elif process.mode == "script" and not self.attaches:
            self.fail(process, "connection closed")

    def pump(self) -> None:
        """Let ranks do what they do together."""
        world = [self.processes.get(rank) for rank in range(self.config.world_size)]
        if any(p is None or p.mode == "gone" or p.frozen for p in world):
            return
        ranks = [p for p in world if p is not None]
        if all(p.mode == "planned" for p in ranks) and len({p.epoch for p in ranks}) == 1:
            for p in ranks:
                if not p.rebuilding:
                    p.rebuilding = True
                    self.say(p, protocol.GroupsRebuilt(p.epoch, 1))
                    self.later(self.delay(), partial(self.restore, p, p.epoch))
        for p in ranks:
            together = all(
                q.epoch == p.epoch and q.mode in ("train", "waiting") and q.step >= p.step
                for q in ranks
            )
            if p.mode != "train" or p.busy or not together:
                continue
            if p.step == LAST_STEP:
                p.mode = "waiting"
                self.say(p, protocol.StepsEnded(p.epoch, p.step))
            else:
                p.busy = True
                self.later(self.delay(0.3), partial(self.step_ends, p, p.epoch))

    def step_ends(self, process: Process, epoch: int) -> None:
        if process.mode == "train" and process.epoch == epoch and process.busy:
            process.busy = False
            if not process.frozen:
                self.complete(process, process.step + 1)
                self.pump()

    def restore(self, process: Process, epoch: int) -> None:
        plan = process.plan
        if process.mode != "planned" or process.epoch != epoch or process.frozen or process.deaf:
            return
        assert plan is not None
        assert plan.epoch == epoch
        step = plan.step
        if process.rank in plan.sources:
            assert step not in process.slots, "who holds the step needs no source"
            source = self.processes[plan.sources[process.rank]]
            if source.mode == "gone":
                return  # hangs until the loss is known
            assert step in source.slots, "a source holds the step it sends"
            assert step in self.own[process.rank], "the own part was kept"
            process.slots[step] = value(step)
        assert step in process.slots, "who has no source holds the step"
        process.slots = {k: v for k, v in process.slots.items() if k <= step}
        if process.corrupt:
            process.corrupt = False
            self.say(process, protocol.Restored(epoch, step, "corrupt"))
            return
        process.step = step
        self.say(process, protocol.Restored(epoch, step, process.slots[step]))

    # ------------------------------------------------------------ faults

    def strike(self, fault: Fault) -> None:
        nodes = (*self.config.active, *self.config.spares)
        node = nodes[fault.target % len(nodes)]
        process = self.processes.get(fault.target % self.config.world_size)
        if fault.kind == "bad-start":
            self.bad.add(node)
        elif fault.kind == "slow-up":
            self.slow.add(node)
        elif fault.kind == "power":
            self.power_off(node)
        elif process is None or process.mode == "gone":
            return
        else:
            self.strike_process(fault.kind, process)
        self.happened.append(fault)

    def power_off(self, node: str) -> None:
        if node in self.dead:
            return
        self.dead.add(node)
        self.end_node(node)
        if node in self.agents:
            kind, delay = self.random.choice([("seen", 0.01), ("inferred", 0.5)])
            self.later(delay, lambda: self.feed(AgentLost(self.now, node, "silent", kind)))

    def strike_process(self, kind: str, process: Process) -> None:
        rank, born, node = process.rank, process.born, process.node
        match kind:
            case "kill":
                self.exit(process, signal=9)
            case "freeze" | "unkillable":
                process.frozen = True
                process.unkillable = kind == "unkillable"
                stopped = RankStopped
                self.later(
                    0.3, lambda: self.up(node, lambda: stopped(self.now, node, rank, born, 0.3))
                )
            case "deaf":
                process.deaf = True
            case "corrupt":
                process.corrupt = True
            case "raise" if process.mode == "train" and not process.busy:
                process.mode = "raised"
                said = protocol.StepRaised(process.epoch, process.step + 1, "ValueError")
                self.say(process, said)
            case "raise" | "fail" if process.mode in ("script", "train") and not process.frozen:
                self.fail(process, "ValueError")
            case _:
                pass

    def stop(self, at: float, signal: int) -> None:
        self.later(at, lambda: self.feed(StopRequested(self.now, signal)))


def value(step: int) -> str:
    """The state after a step, which depends on nothing else."""
    return f"state {step}"
