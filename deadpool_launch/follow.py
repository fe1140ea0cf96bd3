"""What a job looks like from its journal: ``JournalTail`` reads it, ``RunView`` adds it up.

``RunView`` is pure and is what displays, the timeline and the comparison of final states are made
from. It takes records in the journal's order and ignores fields and kinds that it does not know.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from deadpool_launch.journal import JOURNAL_NAME

#: Lines for people that a view keeps.
SAY_LINES = 12
#: Losses that it keeps of each rank; ranks are rarely more than a step apart.
LOSSES = 16

Record = dict[str, Any]


class NodeRole(StrEnum):
    """What a node is to the job at this moment."""

    ACTIVE = "active"
    SPARE = "spare"
    LOST = "lost"


@dataclass(slots=True)
class RankView:
    """The newest that is known of one rank; ``None`` where nothing was reported yet."""

    rank: int
    node: str
    pid: int
    epoch: int
    step: int | None = None
    duration_s: float | None = None
    #: Processes that this rank has had.
    processes: int = 1
    #: The last losses that it reported, each with its step.
    losses: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=LOSSES))

    @property
    def loss(self) -> float | None:
        """The newest loss."""
        return self.losses[-1][1] if self.losses else None

    def loss_at(self, step: int) -> float | None:
        """The newest loss as it was when the rank had completed that step."""
        return next((loss for at, loss in reversed(self.losses) if at <= step), None)


@dataclass(frozen=True, slots=True)
class StepView:
    """A step that one rank completed."""

    at: float
    rank: int
    step: int
    epoch: int
    loss: float | None


@dataclass(slots=True)
class IncidentView:
    """One incident: its records in order, and its verdict once it is closed."""

    number: int
    records: list[Record] = field(default_factory=list)
    #: The ``fault`` record of the rehearsed fault that it came from, if any.
    fault: Record | None = None
    verdict: str | None = None
    reason: str = ""
    #: Completed steps that were run again; the one that was broken off is not counted.
    replayed_steps: int | None = None

    @property
    def opened_at(self) -> float:
        """Time of the first sign."""
        return float(self.records[0]["at"])

    @property
    def fault_at(self) -> float:
        """When the fault happened: a rehearsed one's time, else that of the first sign."""
        return self.opened_at if self.fault is None else float(self.fault["at"])

    @property
    def closed_at(self) -> float | None:
        """Time of the verdict, or ``None`` while it is open.

        Replicas may be whole again only later, so the verdict need not be the last record.
        """
        return next((float(one["at"]) for one in self.records if "verdict" in one), None)


@dataclass(frozen=True, slots=True)
class EndView:
    """The job's verdict."""

    verdict: str
    exit_code: int
    reason: str


class RunView:
    """The state of a job as far as its journal tells."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeRole] = {}
        #: Nodes whose agents can start ranks at once.
        self.ready: set[str] = set()
        self.ranks: dict[int, RankView] = {}
        self.steps: list[StepView] = []
        self.incidents: dict[int, IncidentView] = {}
        self.faults: list[Record] = []
        #: Digests by rank, then by part.
        self.finals: dict[int, dict[str, str]] = {}
        self.says: deque[tuple[float, str]] = deque(maxlen=SAY_LINES)
        self.end: EndView | None = None
        self.started_at: float | None = None
        self.newest_at: float = 0.0

    def apply_all(self, records: Iterable[Record]) -> None:
        """Apply several records in order."""
        for record in records:
            self.apply(record)

    def apply(self, record: Record) -> None:
        """Take one record into account."""
        at = float(record["at"])
        self.newest_at = at
        if self.started_at is None:
            self.started_at = at
        match record["kind"]:
            case "job":
                self._job(record)
            case "say":
                self.says.append((at, str(record["text"])))
            case "rank":
                self._rank(record)
            case "step":
                self._step(record)
            case "incident":
                self._incident(record)
            case "fault":
                self.faults.append(record)
            case "final":
                self.finals[record["rank"]] = dict(record["parts"])
            case "event":
                self._event(record)
            case "end":
                self.end = EndView(record["verdict"], record["exit_code"], record["reason"])
            case _:
                pass

    def since_start_s(self, at: float) -> float:
        """Seconds from the first record to ``at``; 0 while there is none."""
        return 0.0 if self.started_at is None else at - self.started_at

    @property
    def step(self) -> int:
        """The newest step that every rank has completed; 0 before the first."""
        if not self.ranks:
            return 0
        return min(rank.step or 0 for rank in self.ranks.values())

    @property
    def loss(self) -> float | None:
        """The mean over the ranks at ``step``, which some of them have left behind already."""
        step = self.step
        losses = [loss for rank in self.ranks.values() if (loss := rank.loss_at(step)) is not None]
        return sum(losses) / len(losses) if losses else None

    @property
    def open_incident(self) -> IncidentView | None:
        """The incident that has no verdict yet, if any."""
        newest = list(self.incidents.values())[-1:]
        return newest[0] if newest and newest[0].verdict is None else None

    def _job(self, record: Record) -> None:
        for node in record.get("active", ()):
            self.nodes[node] = NodeRole.ACTIVE
        for node in record.get("spares", ()):
            self.nodes[node] = NodeRole.SPARE

    def _rank(self, record: Record) -> None:
        number, node = record["rank"], record["node"]
        before = self.ranks.get(number)
        rank = RankView(number, node, record["pid"], record["epoch"])
        if before is not None:
            # The replacement goes on from what the rank had reached.
            rank.step, rank.processes = before.step, before.processes + 1
            rank.losses = before.losses
        self.ranks[number] = rank
        self.nodes[node] = NodeRole.ACTIVE

    def _step(self, record: Record) -> None:
        loss = record.get("loss")
        step = StepView(record["at"], record["rank"], record["step"], record["epoch"], loss)
        self.steps.append(step)
        rank = self.ranks.get(step.rank)
        if rank is not None:
            rank.step, rank.epoch = step.step, step.epoch
            rank.duration_s = record.get("duration_s")
            if loss is not None:
                rank.losses.append((step.step, loss))

    def _incident(self, record: Record) -> None:
        number = record["number"]
        if number not in self.incidents:
            # Faults since the last incident's first sign; the first of them caused this one.
            before = max((one.opened_at for one in self.incidents.values()), default=0.0)
            fault = next((one for one in self.faults if one["at"] > before), None)
            self.incidents[number] = IncidentView(number, fault=fault)
        incident = self.incidents[number]
        incident.records.append(record)
        if "verdict" in record:
            incident.verdict = record["verdict"]
            incident.reason = record.get("reason", "")
            incident.replayed_steps = record.get("replayed_steps")

    def _event(self, record: Record) -> None:
        match record.get("name"):
            case "AgentWarm":
                self.ready.add(record["node"])
            case "AgentLost" | "AgentStartFailed":
                self.ready.discard(record["node"])
                self.nodes[record["node"]] = NodeRole.LOST
            case _:
                pass


class JournalTail:
    """Reads what was added to a journal since the last call; the file may not exist yet."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / JOURNAL_NAME
        self._offset = 0

    def records(self) -> list[Record]:
        """The records added since the last call; a line still being written waits for the next."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines() if line]


# ---------------------------------------------------------------- comparing two runs


#: Digests of nothing: an empty part, one without schedulers, an empty ``job.state``. Written out,
#: since the runtime that makes them needs torch and the launcher does without.
NOTHING = frozenset(
    {
        "99aa06d3014798d86001c324468d497f",
        "8860515d84491aa5eb378f1e0b4a3efb",
        "82c6b749a4c2e3569464a2fcb480f24a",
    }
)


@dataclass(frozen=True, slots=True)
class PartComparison:
    """One part of the final state (parameters, optimizer, …) over all ranks."""

    part: str
    equal_ranks: tuple[int, ...]
    other_ranks: tuple[int, ...]
    #: No rank of either run has anything in this part.
    empty: bool = False

    @property
    def equal(self) -> bool:
        """Every rank has the same bits in both runs."""
        return not self.other_ranks


def compare_finals(reference: RunView, disturbed: RunView) -> list[PartComparison]:
    """Part by part, on which ranks both runs ended with the same digest.

    A rank or part that only one of the runs reported counts as different. Empty if neither run
    reported any.
    """
    parts: dict[str, None] = {}
    for finals in (reference.finals, disturbed.finals):
        for digests in finals.values():
            parts.update(dict.fromkeys(digests))
    ranks = sorted({*reference.finals, *disturbed.finals})
    rows = []
    for part in parts:
        equal = [
            rank
            for rank in ranks
            if (digest := reference.finals.get(rank, {}).get(part)) is not None
            and digest == disturbed.finals.get(rank, {}).get(part)
        ]
        other = [rank for rank in ranks if rank not in equal]
        seen = {
            finals[rank].get(part)
            for finals in (reference.finals, disturbed.finals)
            for rank in finals
        }
        empty = not other and seen <= NOTHING
        rows.append(PartComparison(part, tuple(equal), tuple(other), empty))
    return rows


# ---------------------------------------------------------------- curves


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One step of the job: the mean over the ranks of what they reported."""

    step: int
    loss: float
    #: When the last rank completed it, in seconds since the epoch.
    at: float


def loss_curve(view: RunView) -> list[CurvePoint]:
    """The loss of each step, by step; of a step that was run again, the last run counts."""
    newest: dict[int, dict[int, StepView]] = {}
    for step in view.steps:
        if step.loss is not None:
            newest.setdefault(step.step, {})[step.rank] = step
    return [
        CurvePoint(
            number,
            sum(step.loss or 0.0 for step in by_rank.values()) / len(by_rank),
            max(step.at for step in by_rank.values()),
        )
        for number, by_rank in sorted(newest.items())
    ]


def steps_run_again(view: RunView, incident: IncidentView) -> list[int]:
    """The steps that were run again because of this incident.

    These are the completed ones that the journal counts, then the one that was broken off.
    """
    if incident.replayed_steps is None or incident.closed_at is None:
        return []
    before = max((step.epoch for step in view.steps if step.at <= incident.opened_at), default=0)
    after = [
        step.step for step in view.steps if step.epoch > before and step.at >= incident.opened_at
    ]
    first = min(after, default=None)
    return [] if first is None else list(range(first, first + incident.replayed_steps + 1))
