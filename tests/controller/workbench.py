"""A job on the bench: feeds events to the pure controller and checks every state it returns.

Used by the unit tests and by the scenario files. Short names (``said``, ``tick``) make one event
each; ``train_to`` and friends make the many that lead to a situation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deadpool_launch.controller.config import Config
from deadpool_launch.controller.core import step
from deadpool_launch.controller.events import (
    Action,
    AgentConnected,
    AgentLost,
    AgentStartFailed,
    AgentWarm,
    Event,
    FenceNode,
    Finish,
    IncidentClosed,
    IncidentMark,
    IncidentOpened,
    JobStarted,
    KillRanks,
    RankExited,
    RankSaid,
    RankStopped,
    Say,
    StartAgent,
    StartRanks,
    StopRequested,
    Tell,
    Tick,
)
from deadpool_launch.controller.invariants import validate
from deadpool_launch.controller.states import State, initial_state
from deadpool_launch.controller.wording import fold
from deadpool_runtime import protocol


class Bench:
    """One job; ``now`` is its clock, ``trace`` every action so far.

    ``check``: look at every rule after every event, which for a thousand ranks takes its time.
    """

    def __init__(self, config: Config, check: bool = True) -> None:
        self.config = config
        self.check = check
        self.state: State = initial_state(config)
        self.now = 0.0
        self.trace: list[Action] = []
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

    def warm(self, node: str) -> list[Action]:
        return self.feed(AgentWarm(self.now, node))

    def agent_failed(self, node: str, reason: str = "srun exit code 1") -> list[Action]:
        return self.feed(AgentStartFailed(self.now, node, reason))

    def agent_lost(
        self, node: str, evidence: str = "agent connection closed", kind: str = "seen"
    ) -> list[Action]:
        return self.feed(AgentLost(self.now, node, evidence, kind))

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

    def stop(self, signal: int) -> list[Action]:
        return self.feed(StopRequested(self.now, signal))

    def tick(self) -> list[Action]:
        """Let time pass until the state's next deadline."""
        deadline = self.state.next_deadline()
        assert deadline is not None, "the state waits for nothing"
        self.now = max(self.now, deadline)
        return self.feed(Tick(self.now))

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
            actions += self.all_said(self.everyone, protocol.Attached(layout="ddp"))
        for number in range(self.state.newest + 1, step + 1):
            actions += self.steps_done(self.everyone, number)
        return actions

    def steps_done(self, ranks: Iterable[int], step: int, digest: str = "") -> list[Action]:
        return self.all_said(ranks, step_done(self.state.epoch, step, digest))

    def parked(self, ranks: Iterable[int], slots: Iterable[int]) -> list[Action]:
        return self.all_said(ranks, protocol.Parked(self.state.epoch, list(slots), 0.01))

    def rebuilt(self, ranks: Iterable[int]) -> list[Action]:
        return self.all_said(ranks, protocol.GroupsRebuilt(self.state.epoch, 1))

    def restored(self, ranks: Iterable[int], digest: str = "d") -> list[Action]:
        assert self.state.incident is not None
        step = self.state.incident.step
        assert step is not None
        return self.all_said(ranks, protocol.Restored(self.state.epoch, step, digest))

    def repaired(self, lost: Iterable[int], slots: Iterable[int]) -> list[Action]:
        """From the end of the gather window until ``Resume``; ``lost`` ranks come up anew."""
        lost = list(lost)
        survivors = [rank for rank in self.everyone if rank not in lost]
        actions = self.parked(survivors, slots)
        actions += self.ranks_up(lost)
        actions += self.parked(lost, ())
        actions += self.rebuilt(self.everyone)
        return actions + self.restored(self.everyone)

    @property
    def finish(self) -> Finish | None:
        return next((action for action in self.trace if isinstance(action, Finish)), None)


def step_done(epoch: int, step: int, digest: str = "") -> protocol.StepDone:
    """A step's report with nothing of interest in it."""
    return protocol.StepDone(
        epoch=epoch, step=step, own=b"", digest=digest, duration_s=0.1, blocked_s=0.0, loss=None
    )


def bench(**changes: Any) -> Bench:
    """Two active nodes of two ranks and one spare, unless told otherwise."""
    settings: dict[str, Any] = {"active": ("n1", "n2"), "spares": ("n3",), "nproc_per_node": 2}
    settings["park_s"] = 30.0
    settings.update(changes)
    return Bench(Config(**settings))


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
        case StartAgent(node=node):
            return f"start agent on {node}"
        case FenceNode(node=node, reason=reason):
            return f"fence {node}: {reason}"
        case StartRanks(node=node, epoch=epoch, node_index=index, ranks=ranks):
            return f"start ranks {fold(ranks)} on {node} as node {index}, epoch {epoch}"
        case KillRanks(node=node, ranks=ranks, reason=reason):
            return f"kill ranks {fold(ranks)} on {node}: {reason}"
        case Tell(ranks=ranks, body=body):
            return f"tell {fold(ranks)} {_message(body)}"
        case Say(text=text):
            return f"say: {text}"
        case IncidentOpened(number=number, at=at, reason=reason):
            return f"incident {number} opened at {at:g}: {reason}"
        case IncidentMark(number=number, at=at, phase=phase, detail=detail):
            return f"incident {number} {phase} at {at:g}: {detail}"
        case IncidentClosed(number=number, at=at, verdict=verdict, replayed_steps=replayed):
            return f"incident {number} closed at {at:g}: {verdict}, {replayed} replayed"
        case Finish(verdict=verdict, exit_code=code, reason=reason, detail=detail):
            tail = f" [{detail}]" if detail else ""
            return f"finish: {verdict} ({int(code)}): {reason}{tail}"


def _message(body: protocol.ToRank) -> str:
    parts = []
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if isinstance(value, protocol.Address):
            value = f"{value.host}:{value.port}"
        if value != b"":
            parts.append(f"{name}={value}")
    return " ".join([type(body).__name__, *parts])
