"""A job on the bench: feeds events to the pure controller and checks every state it returns.

Used by the unit tests and by the scenario files. Short names (``said``, ``tick``) make one event
each; ``train_to`` and friends make the many that lead to a situation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from deadpool_launch.controller.config import Config
from deadpool_launch.controller.core import step
from deadpool_launch.controller.events import (
    Action,
    AgentConnected,
    AgentLost,
    AgentStartFailed,
    AgentWarm,
    Answered,
    CheckpointCommitted,
    CheckpointFailed,
    CommitCheckpoint,
    DeviceLines,
    DrainRequested,
    Event,
    FenceNode,
    Finish,
    IncidentClosed,
    IncidentMark,
    IncidentOpened,
    InventoryTaken,
    JobStarted,
    KillRanks,
    LimitNear,
    NodeReady,
    NodeStateSeen,
    PacesTold,
    PathsTried,
    RankExited,
    RankSaid,
    RankStopped,
    ReleaseNode,
    ReplicatorUp,
    Say,
    StackNotTaken,
    StandingsTold,
    StartAgent,
    StartRanks,
    StopRequested,
    TakeInventory,
    TakeStacks,
    TakeStandings,
    Tell,
    Tick,
    TryPaths,
)
from deadpool_launch.controller.invariants import validate
from deadpool_launch.controller.node import Node
from deadpool_launch.controller.states import State, initial_state
from deadpool_launch.controller.tables import NodeTable
from deadpool_launch.controller.wording import fold
from deadpool_runtime import protocol

MUCH_NBYTES = 1 << 40


class Bench:
    """One job; ``now`` is its clock, ``trace`` every action so far.

    ``arenas`` has the copies on each node: ``steps_done`` puts one on the rank's node and a replica
    at its holder. Each rank has the parameters in common with all others and a shard of its own.

    ``check``: look at every rule after every event, which for a thousand ranks takes its time.
    """

    def __init__(self, config: Config, check: bool = True) -> None:
        self.config = config
        self.check = check
        self.state: State = initial_state(config)
        self.now = 0.0
        self.trace: list[Action] = []
        self.arenas: dict[str, dict[tuple[int, bool, int], protocol.Copy]] = {}
        validate(self.state)

    # ------------------------------------------------------------ one event

    def feed(self, event: Event) -> list[Action]:
        before = self.state
        self.state, actions = step(before, event)
        if self.check:
            validate(self.state)
        assert self.state.epoch >= before.epoch
        self.trace += actions
        return actions

    def start(self) -> list[Action]:
        return self.feed(JobStarted(self.now))

    def connected(self, node: str) -> list[Action]:
        return self.feed(AgentConnected(self.now, node, f"{node}.host"))

    def warm(self, node: str, nbytes: int = MUCH_NBYTES) -> list[Action]:
        at = protocol.Address(f"{node}.host", 7000)
        return self.feed(AgentWarm(self.now, node, at, nbytes, "what is free in /dev/shm"))

    def replicator_up(self, node: str, port: int = 7001) -> list[Action]:
        at = protocol.Address(f"{node}.host", port)
        return self.feed(ReplicatorUp(self.now, node, at, "ended with signal 9"))

    def inventory(self, *nodes: str) -> list[Action]:
        """These nodes, or all that were asked, tell their copies."""
        asked = [node.name for node in self.state.nodes.values() if node.inventory_by is not None]
        actions = []
        for node in nodes or asked:
            copies = tuple(copy for _, copy in sorted(self.arenas.get(node, {}).items()))
            actions += self.feed(InventoryTaken(self.now, node, self.state.epoch, copies))
        return actions

    def agent_failed(self, node: str, reason: str = "srun exit code 1") -> list[Action]:
        return self.feed(AgentStartFailed(self.now, node, reason))

    def agent_lost(
        self, node: str, evidence: str = "agent connection closed", kind: str = "seen"
    ) -> list[Action]:
        return self.feed(AgentLost(self.now, node, evidence, kind))

    def ready(self, node: str, why: str = "was resumed in Slurm") -> list[Action]:
        return self.feed(NodeReady(self.now, node, why))

    def said(
        self,
        rank: int,
        body: protocol.FromRank,
        *,
        born: int | None = None,
        node: str | None = None,
    ) -> list[Action]:
        """From the process behind the rank now, unless told otherwise."""
        where, epoch = self._process(rank, born, node)
        return self.feed(RankSaid(self.now, where, rank, epoch, body))

    def all_said(self, ranks: Iterable[int], body: protocol.FromRank) -> list[Action]:
        return [action for rank in ranks for action in self.said(rank, body)]

    def exited(
        self,
        rank: int,
        exit_code: int | None = None,
        signal: int | None = None,
        *,
        born: int | None = None,
        node: str | None = None,
    ) -> list[Action]:
        where, epoch = self._process(rank, born, node)
        return self.feed(RankExited(self.now, where, rank, epoch, exit_code, signal))

    def stopped(self, rank: int, for_s: float = 5.0, *, born: int | None = None) -> list[Action]:
        where, epoch = self._process(rank, born, None)
        return self.feed(RankStopped(self.now, where, rank, epoch, for_s))

    def standings(
        self,
        node: str,
        standings: Iterable[protocol.Standing],
        moved: Iterable[int] = (),
        asked: int = 0,
    ) -> list[Action]:
        gone_on = tuple((rank, self.state.ranks[rank].born) for rank in moved)
        return self.feed(StandingsTold(self.now, node, tuple(standings), gone_on, asked))

    def standing(
        self, rank: int, step: int, step_s: float, *groups: protocol.GroupStanding
    ) -> protocol.Standing:
        """Of the process behind the rank now, in the current epoch."""
        born = self.state.ranks[rank].born
        return protocol.Standing(rank, born, self.state.epoch, step, step_s, list(groups))

    def paces(self, node: str, own_s: Iterable[float], epoch: int | None = None) -> list[Action]:
        """So long the ranks of the node take for a step, in the order of their numbers."""
        ranks = self.state.ranks_of_seat(self.state.seats.index(node))
        epoch = self.state.epoch if epoch is None else epoch
        times = list(own_s)
        paces = [
            protocol.Pace(rank, self.state.ranks[rank].born, epoch, 25, each_s, each_s, max(times))
            for rank, each_s in zip(ranks, times, strict=True)
        ]
        return self.feed(PacesTold(self.now, node, tuple(paces)))

    def devices(self, node: str, *lines: str) -> list[Action]:
        return self.feed(DeviceLines(self.now, node, lines))

    def tried(self, node: str, *unreached: str) -> list[Action]:
        """The node has called those that it was asked to; these did not answer."""
        return self.feed(PathsTried(self.now, node, self.state.trials, unreached))

    def no_stack(self, rank: int, reason: str) -> list[Action]:
        node, born = self._process(rank, None, None)
        return self.feed(StackNotTaken(self.now, node, rank, born, reason))

    def stop(self, signal: int) -> list[Action]:
        return self.feed(StopRequested(self.now, signal))

    def drain(
        self, node: str, why: str = "is drained (asked for)", request: int = 1
    ) -> list[Action]:
        return self.feed(DrainRequested(self.now, node, why, request))

    def node_state(self, node: str, state: str, health: str, reason: str = "") -> list[Action]:
        return self.feed(NodeStateSeen(self.now, node, state, health, reason))

    def limit_near(self, left_s: float, why: str = "SIGUSR1", ending: bool = False) -> list[Action]:
        return self.feed(LimitNear(self.now, why, left_s, ending))

    def tick(self) -> list[Action]:
        """Let time pass until the state's next deadline."""
        deadline = self.state.next_deadline()
        assert deadline is not None, "the state waits for nothing"
        self.now = max(self.now, deadline)
        return self.feed(Tick(self.now))

    def plan_overdue(self) -> list[Action]:
        """Let time pass until the plan's own deadline; who is cut off is asked before, in vain."""
        while self.state.connect_by is not None or self.state.paths is not None:
            self.tick()
        return self.tick()

    def tick_now(self) -> list[Action]:
        return self.feed(Tick(self.now))

    def _process(self, rank: int, born: int | None, node: str | None) -> tuple[str, int]:
        where = self.state.node_of(rank) if node is None else node
        return where, self.state.ranks[rank].born if born is None else born

    # ------------------------------------------------------------ many events

    @property
    def everyone(self) -> range:
        return range(self.config.world_size)

    def agents_up(self) -> list[Action]:
        """Start the job; every agent that was ordered comes up."""
        actions = self.start()
        for action in list(actions):
            if isinstance(action, StartAgent):
                actions += self.connected(action.node) + self.warm(action.node)
        return actions

    def ranks_up(self, ranks: Iterable[int]) -> list[Action]:
        return [
            action
            for rank in ranks
            for action in self.said(rank, protocol.RankUp(pid=100 + rank, store_port=9000 + rank))
        ]

    def begun(self) -> list[Action]:
        """The script runs everywhere."""
        return self.agents_up() + self.ranks_up(self.everyone)

    def train_to(self, step: int) -> list[Action]:
        """Bring the job up if need be, attach, complete steps 0 up to ``step`` on every rank."""
        actions: list[Action] = []
        if self.state.phase.value == "new":
            actions += self.begun()
            actions += self.attached(self.everyone)
        for number in range(self.state.newest + 1, step + 1):
            actions += self.steps_done(self.everyone, number)
        return actions

    def attached(self, ranks: Iterable[int]) -> list[Action]:
        return [action for rank in ranks for action in self.said(rank, self.attaching(rank))]

    def attaching(self, rank: int) -> protocol.Attached:
        sizes = [protocol.SegmentSize(ranks, 1 << 20) for ranks in self.segments(rank)]
        replica = [rank] if self.config.shrink else []
        return protocol.Attached("ddp", sizes, 1000, 0, replica)

    def segments(self, rank: int) -> list[tuple[int, ...]]:
        """What each rank has in common with all, and what it has alone."""
        alone = [] if self.config.shrink else [(rank,)]
        return list(dict.fromkeys([tuple(self.everyone), *alone]))

    def free(self, node: str) -> None:
        """A node of the allocation can be used that was none of the job's before."""
        self.state = replace(
            self.state,
            nodes=NodeTable({**self.state.nodes, node: Node(node)}),
            free=(*self.state.free, node),
        )

    def steps_done(self, ranks: Iterable[int], step: int) -> list[Action]:
        actions = []
        for rank in ranks:
            actions += self.said(rank, step_done(self.state.epoch, step))
            self.copied(rank, step)
        return actions

    def copied(self, rank: int, step: int, epoch: int | None = None) -> None:
        """The copy of a step is whole, here and at the holder."""
        segments = self.segments(rank)
        epoch = self.state.epoch if epoch is None else epoch
        mine = self.arenas.setdefault(self.state.node_of(rank), {})
        mine[rank, False, step % 3] = protocol.Copy(rank, step, epoch, False, segments, [])
        first = self.state.holders.get(rank)
        for holder in () if first is None else (first, *first.more):
            missing = [ranks for ranks in segments if ranks not in holder.segments]
            replica = protocol.Copy(rank, step, epoch, True, holder.segments, missing)
            self.arenas.setdefault(holder.node, {})[rank, True, step % 3] = replica

    def uncopied(self, rank: int, step: int) -> None:
        """No copy of this step of the rank is anywhere."""
        for arena in self.arenas.values():
            for key, copy in list(arena.items()):
                if (copy.rank, copy.step) == (rank, step):
                    del arena[key]

    def damaged(self, rank: int, step: int) -> None:
        """The rank's own copy of this step was found damaged."""
        del self.arenas[self.state.node_of(rank)][rank, False, step % 3]

    def snapshotted(self, ranks: Iterable[int], step: int, digest: str) -> list[Action]:
        shared = [protocol.SegmentDigest(tuple(self.everyone), digest)]
        return self.all_said(ranks, protocol.Snapshotted(self.state.epoch, step, shared))

    def protected(self, ranks: Iterable[int], step: int = 0) -> list[Action]:
        return self.all_said(ranks, protocol.Protected(self.state.epoch, step))

    def saved(self, ranks: Iterable[int], step: int, epoch: int | None = None) -> list[Action]:
        """Parts of a durable checkpoint are on disk."""
        epoch = self.state.epoch if epoch is None else epoch
        return self.all_said(ranks, protocol.Saved(epoch, step, 512 << 20, 3.1))

    def committed(self, step: int, *kept: int, epoch: int | None = None) -> list[Action]:
        """The checkpoint is complete; it and ``kept`` are there now."""
        epoch = self.state.epoch if epoch is None else epoch
        return self.feed(CheckpointCommitted(self.now, step, epoch, (step, *kept)))

    def not_committed(self, step: int, reason: str, epoch: int | None = None) -> list[Action]:
        epoch = self.state.epoch if epoch is None else epoch
        return self.feed(CheckpointFailed(self.now, step, epoch, reason))

    def holding(self, ranks: Iterable[int], step: int) -> list[Action]:
        """Their newest step begun is this one, and they begin no other."""
        epoch, number = self.state.epoch, self.state.halts
        return self.all_said(ranks, protocol.Holding(epoch, number, step))

    def at_boundary(self, ranks: Iterable[int], step: int) -> list[Action]:
        epoch, number = self.state.epoch, self.state.halts
        return self.all_said(ranks, protocol.AtBoundary(epoch, number, step))

    def at_the_end_of(self, step: int, node: str) -> list[Action]:
        """The node is to be drained, and every rank has come to the end of this step and parked."""
        actions = self.drain(node) + self.holding(self.everyone, step)
        return actions + self.at_boundary(self.everyone, step) + self.parked(self.everyone)

    def parked(self, ranks: Iterable[int]) -> list[Action]:
        return self.all_said(ranks, protocol.Parked(self.state.epoch, 0.01))

    def rebuilt(self, ranks: Iterable[int]) -> list[Action]:
        return self.all_said(ranks, protocol.GroupsRebuilt(self.state.epoch, 1))

    def restored(self, ranks: Iterable[int], digest: str = "d") -> list[Action]:
        assert self.state.incident is not None
        step = self.state.incident.step
        assert step is not None
        shared = [protocol.SegmentDigest(tuple(self.everyone), digest)]
        return self.all_said(ranks, protocol.Restored(self.state.epoch, step, shared))

    def restore_failed(self, rank: int, reason: str = "hash of segment 0 differs") -> list[Action]:
        assert self.state.incident is not None
        step = self.state.incident.step
        assert step is not None
        return self.said(rank, protocol.RestoreFailed(self.state.epoch, step, reason))

    def repaired(self, lost: Iterable[int]) -> list[Action]:
        """From the end of the gather window until ``Resume``; ``lost`` ranks come up anew."""
        lost = list(lost)
        survivors = [rank for rank in self.everyone if rank not in lost]
        actions = self.parked(survivors)
        actions += self.ranks_up(lost)
        actions += self.parked(lost)
        actions += self.inventory()
        actions += self.rebuilt(self.everyone)
        return actions + self.restored(self.everyone)

    @property
    def finish(self) -> Finish | None:
        return next((action for action in self.trace if isinstance(action, Finish)), None)


def step_done(epoch: int, step: int, unprotected: int = 0) -> protocol.StepDone:
    """A step's report with nothing of interest in it."""
    return protocol.StepDone(
        epoch=epoch,
        step=step,
        duration_s=0.1,
        blocked_s=0.0,
        loss=None,
        unprotected=unprotected,
    )


def in_group(
    entered: int, wait_s: float = 0.0, name: str = "0", op: str = "all_reduce"
) -> protocol.GroupStanding:
    """In its ``entered``th collective of the group, or past it if it has not waited there."""
    return protocol.GroupStanding(name, entered, entered, wait_s > 0, op, wait_s)


def bench(**changes: Any) -> Bench:
    """Two active nodes of two ranks and one spare, unless told otherwise."""
    settings: dict[str, Any] = {"active": ("n1", "n2"), "spares": ("n3",), "nproc_per_node": 2}
    settings["park_s"] = 30.0
    settings.update(changes)
    return Bench(Config(**settings))


def recovering(**changes: object) -> Bench:
    """Rank 3 died in step 21; survivors are parked, its replacement builds."""
    job = bench(**changes)
    job.train_to(20)
    job.exited(3, signal=9)
    job.tick()
    job.parked([0, 1, 2])
    job.ranks_up([3])
    return job


def of_type(kind: type, actions: Iterable[Action]) -> list[Any]:
    """The actions of one kind, in order."""
    return [action for action in actions if isinstance(action, kind)]


def told(kind: type, actions: Iterable[Action]) -> list[tuple[tuple[int, ...], Any]]:
    """Which ranks were told messages of one kind, in order."""
    return [(a.ranks, a.body) for a in actions if isinstance(a, Tell) and isinstance(a.body, kind)]


def render(actions: Iterable[Action]) -> list[str]:
    """A line for each action; equal messages to several ranks in a row become one line."""
    merged: list[Action] = []
    for action in actions:
        last = merged[-1] if merged else None
        if isinstance(action, Tell) and isinstance(last, Tell) and last.body == action.body:
            merged[-1] = Tell(last.ranks + action.ranks, last.body)
        else:
            merged.append(action)
    return [_line(action) for action in merged]


def _line(action: Action) -> str:
    match action:
        case StartAgent(node=node, born=born):
            return f"start agent on {node}" + (f", its no. {born}" if born > 1 else "")
        case FenceNode(node=node, reason=reason):
            return f"fence {node}: {reason}"
        case ReleaseNode(node=node, reason=reason):
            return f"release {node}: {reason}"
        case StartRanks(node=node, epoch=epoch, node_index=index, ranks=ranks):
            return f"start ranks {fold(ranks)} on {node} as node {index}, epoch {epoch}"
        case KillRanks(node=node, ranks=ranks, reason=reason):
            return f"kill ranks {fold(ranks)} on {node}: {reason}"
        case Tell(ranks=ranks, body=body):
            return f"tell {fold(ranks)} {_message(body)}"
        case TakeInventory(node=node, epoch=epoch):
            return f"take inventory of {node}, epoch {epoch}"
        case TakeStandings(node=node, number=number):
            return f"take standings of {node}, no. {number}"
        case TryPaths(node=node, number=number, peers=peers):
            return f"try paths from {node} to {', '.join(peers)}, no. {number}"
        case TakeStacks(node=node, ranks=ranks):
            return f"take stacks of {fold(ranks)} on {node}"
        case CommitCheckpoint(step=step, epoch=epoch):
            return f"commit the checkpoint of step {step}, epoch {epoch}"
        case Answered(request=request, done=done, text=text, mistaken=mistaken):
            how = "done" if done else "mistaken" if mistaken else "denied"
            return f"answer {request}, {how}: {text}"
        case Say(text=text):
            return f"say: {text}"
        case IncidentOpened(number=number, at=at, reason=reason):
            return f"incident {number} opened at {at:g}: {reason}"
        case IncidentMark(number=number, at=at, phase=phase, detail=detail):
            return f"incident {number} {phase} at {at:g}: {detail}"
        case IncidentClosed(number=number, at=at, verdict=verdict, replayed_steps=replayed):
            how = verdict if verdict == "stopped" else f"{verdict} on rung {action.rung}"
            return f"incident {number} closed at {at:g}: {how}, {replayed} replayed"
        case Finish(verdict=verdict, exit_code=code, reason=reason, detail=detail):
            tail = f" [{detail}]" if detail else ""
            return f"finish: {verdict} ({int(code)}): {reason}{tail}"


def _message(body: protocol.ToRank) -> str:
    parts = []
    for name in body.__struct_fields__:
        value = getattr(body, name)
        quiet = ("pieces", "checkpoint", "aside", "former", "shards", "keep")
        if name in quiet and not value:
            continue
        parts.append(f"{name}={_value(value)}")
    return " ".join([type(body).__name__, *parts])


def _value(value: object) -> str:
    match value:
        case protocol.Address(host=host, port=port):
            return f"{host}:{port}"
        case protocol.Holder(node=node, address=address, segments=segments, deputy=deputy):
            also = f", deputy at {_value(deputy)}" if deputy is not None else ""
            also += "".join(f", then {_value(each)}" for each in value.more)
            return f"{node}@{address.port}{_segments(segments)}{also}"
        case protocol.Piece(source=source, rank=rank, replica=replica, segments=segments):
            kind = ("replica" if replica else "copy") + (" (base)" if value.base else "")
            kind += " (adopted)" if value.adopted else ""
            return f"{kind} of {rank} at {source.host}:{source.port}{_segments(segments)}"
        case list():
            return "[" + ", ".join(map(_value, value)) + "]"
        case _:
            return str(value)


def _segments(segments: list[tuple[int, ...]]) -> str:
    return " with " + " and ".join(fold(ranks) for ranks in segments) if segments else ""
