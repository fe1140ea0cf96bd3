"""What a job looks like from its journal. Pure.

``RunView`` is what displays, reports, the timeline and the comparison of final states are made
from. It takes records in the journal's order (``follow.JournalTail`` reads them) and ignores fields
and kinds that it does not know.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from deadpool_launch.controller.roles import NodeRole, Part
from deadpool_launch.controller.wording import exit_text

#: Lines for people that a view keeps.
SAY_LINES = 12
#: No time and no duration of a job is so many seconds.
_LATEST = 1e11
#: Roles of nodes that the job does not use any more.
_GIVEN_UP = (NodeRole.LOST, NodeRole.DRAINED, NodeRole.WORN)
#: Losses that it keeps of each rank; ranks are rarely more than a step apart.
LOSSES = 16

Record = dict[str, Any]


@dataclass(slots=True)
class RankView:
    """The newest that is known of one rank; ``None`` where nothing was reported yet."""

    rank: int
    node: str
    pid: int
    epoch: int
    step: int | None = None
    duration_s: float | None = None
    #: Of it, how long the runtime held the rank back.
    blocked_s: float = 0.0
    #: The newest step of which it has a confirmed replica, -1 before the first; None: not told.
    confirmed: int | None = None
    #: Steps of its present process that went on without a replica of the step before.
    unprotected: int = 0
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
    duration_s: float = 0.0
    blocked_s: float = 0.0
    confirmed: int | None = None
    node: str = ""


@dataclass(frozen=True, slots=True)
class PartView:
    """A node became something else to the job."""

    at: float
    node: str
    part: Part


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
    #: The highest rung that it took.
    rung: int | None = None

    @property
    def opened_at(self) -> float:
        """Time of the first sign."""
        return float(self.records[0]["at"])

    @property
    def planned(self) -> bool:
        """Nobody was lost: ranks were moved, or taken back in."""
        return bool(self.records[0].get("planned"))

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
    #: Nodes that the next job should do without.
    exclude: tuple[str, ...] = ()


class RunView:
    """The state of a job as far as its journal tells. ``keep_steps``: every step that was completed
    is wanted, not only the newest of each rank.

    A record that is not as it should be (a disk's, or another version's) is counted in
    ``malformed`` and changes nothing else that can be avoided.
    """

    def __init__(self, *, keep_steps: bool = True) -> None:
        self._keep_steps = keep_steps
        self.malformed = 0
        #: The plan, as the first record has it; empty before that.
        self.job: Record = {}
        #: Launchers that took over, checkpoints that were written, or not.
        self.launchers: list[Record] = []
        self.checkpoints: list[Record] = []
        self.nodes: dict[str, NodeRole] = {}
        #: How that changed, and what is known of each node that speaks for or against it.
        self.parts: list[PartView] = []
        self.evidence: dict[str, list[tuple[float, str]]] = {}
        #: Steps that some rank began without a replica of the step before, and the newest such.
        self.unprotected = 0
        self._unprotected_step = -1
        self._aside: set[int] = set()
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
        try:
            self._apply(record)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            self.malformed += 1

    def _apply(self, record: Record) -> None:
        at = float(record["at"])
        if not 0.0 <= at < _LATEST:
            raise ValueError(f"{at} is no time")
        self.newest_at = at
        if self.started_at is None:
            self.started_at = at
        match record["kind"]:
            case "job":
                self._job(record)
            case "launcher":
                self.launchers.append(record)
            case "checkpoint":
                self.checkpoints.append({**record, "step": int(record["step"])})
            case "node":
                self._part(at, record)
            case "say":
                self.says.append((at, str(record["text"])))
            case "rank":
                self._rank(record)
            case "step":
                self._step(record)
            case "incident":
                self._incident(record)
            case "fault":
                self.faults.append({**record, "fault": str(record["fault"])})
            case "final":
                self.finals[_count(record["rank"])] = dict(record["parts"])
            case "event":
                self._event(at, record)
            case "end":
                self.end = EndView(
                    str(record["verdict"]),
                    int(record["exit_code"]),
                    str(record["reason"]),
                    tuple(map(str, record.get("exclude", ()))),
                )
            case _:
                pass

    def since_start_s(self, at: float) -> float:
        """Seconds from the first record to ``at``; 0 while there is none."""
        return 0.0 if self.started_at is None else at - self.started_at

    @property
    def step(self) -> int:
        """The newest step that every rank which takes part has completed; 0 before the first."""
        return min((rank.step or 0 for rank in self.present), default=0)

    @property
    def present(self) -> list[RankView]:
        """The ranks that take part: all but those which an incident left without a node."""
        return [rank for rank in self.ranks.values() if rank.rank not in self._aside]

    @property
    def loss(self) -> float | None:
        """The mean over the ranks at ``step``, which some of them have left behind already."""
        step = self.step
        losses = [loss for rank in self.present if (loss := rank.loss_at(step)) is not None]
        return sum(losses) / len(losses) if losses else None

    @property
    def open_incident(self) -> IncidentView | None:
        """The incident that has no verdict yet, if any."""
        newest = list(self.incidents.values())[-1:]
        return newest[0] if newest and newest[0].verdict is None else None

    def _job(self, record: Record) -> None:
        active = [str(node) for node in record.get("active", ())]
        spares = [str(node) for key in ("spares", "extras") for node in record.get(key, ())]
        counts = {key: _count(record.get(key) or 0) for key in ("world_size", "nproc_per_node")}
        self.job = {**record, **counts}
        self.nodes.update(dict.fromkeys(active, NodeRole.ACTIVE))
        self.nodes.update(dict.fromkeys(spares, NodeRole.SPARE))

    def _part(self, at: float, record: Record) -> None:
        part = Part(NodeRole(record["role"]), str(record["why"]), bool(record["lasting"]))
        self._becomes(at, str(record["node"]), part)

    def _becomes(self, at: float, node: str, part: Part) -> None:
        if self.nodes.get(node) is not part.role or part.why:
            self.nodes[node] = part.role
            self.parts.append(PartView(at, node, part))

    def _rank(self, record: Record) -> None:
        number, node = _count(record["rank"]), str(record["node"])
        before = self.ranks.get(number)
        rank = RankView(number, node, int(record["pid"]), int(record["epoch"]))
        if before is not None:
            # The replacement goes on from what the rank had reached.
            rank.step, rank.processes = before.step, before.processes + 1
            rank.losses = before.losses
        self.ranks[number] = rank
        self._aside.discard(number)
        if self.nodes.get(node) is not NodeRole.ACTIVE:
            self._becomes(float(record["at"]), node, Part(NodeRole.ACTIVE))

    def _step(self, record: Record) -> None:
        loss, confirmed = record.get("loss"), record.get("confirmed")
        loss = None if loss is None else float(loss)
        number = _count(record["rank"])
        rank = self.ranks.get(number)
        step = StepView(
            float(record["at"]),
            number,
            _count(record["step"]),
            int(record["epoch"]),
            loss,
            _span_s(record.get("duration_s")),
            _span_s(record.get("blocked_s")),
            None if confirmed is None else int(confirmed),
            "" if rank is None else rank.node,
        )
        if self._keep_steps:
            self.steps.append(step)
        if rank is not None:
            rank.step, rank.epoch = step.step, step.epoch
            rank.duration_s = None if record.get("duration_s") is None else step.duration_s
            rank.blocked_s, rank.confirmed = step.blocked_s, step.confirmed
            unprotected = int(record.get("unprotected") or 0)
            if unprotected > rank.unprotected and step.step > self._unprotected_step:
                self.unprotected += 1
                self._unprotected_step = step.step
            rank.unprotected = unprotected
            if loss is not None:
                rank.losses.append((step.step, loss))

    def _incident(self, record: Record) -> None:
        number = int(record["number"])
        if number not in self.incidents:
            # Faults since the last incident's first sign; the first of them caused this one.
            before = max((one.opened_at for one in self.incidents.values()), default=0.0)
            fault = next((one for one in self.faults if one["at"] > before), None)
            self.incidents[number] = IncidentView(number, fault=fault)
        incident = self.incidents[number]
        incident.records.append(record)
        if "verdict" in record:
            incident.verdict = str(record["verdict"])
            incident.reason = str(record.get("reason", ""))
            replayed, rung = record.get("replayed_steps"), record.get("rung")
            incident.replayed_steps = None if replayed is None else int(replayed)
            incident.rung = None if rung is None else int(rung)
            if incident.verdict != "stopped":
                self._aside = {
                    rank.rank
                    for rank in self.ranks.values()
                    if self.nodes.get(rank.node) is not NodeRole.ACTIVE
                }

    def _event(self, at: float, record: Record) -> None:
        name = record.get("name")
        if name == "AgentWarm":
            self.ready.add(str(record["node"]))
        elif name in ("AgentLost", "AgentStartFailed"):
            node = str(record["node"])
            self.ready.discard(node)
            # One that was given up before stays what it is: its agent leaves it for that.
            if self.nodes.get(node) not in _GIVEN_UP:
                why = str(record.get("evidence") or record.get("reason") or "was lost")
                self._becomes(at, node, Part(NodeRole.LOST, why))
        text = _evidence(record)
        if text:
            self.evidence.setdefault(str(record["node"]), []).append((at, text))


def _count(value: Any) -> int:
    """A number of ranks or steps, or one that counts from 0."""
    count = int(value)
    if count < 0:
        raise ValueError(f"{count} is no count")
    return count


def _span_s(value: Any) -> float:
    """A duration; what is none counts as nothing."""
    seconds = 0.0 if value is None else float(value)
    return seconds if 0.0 < seconds < _LATEST else 0.0


def _evidence(record: Record) -> str:
    """What a record says about its node; empty if it says nothing that matters."""
    match record.get("name"):
        case "AgentLost":
            kind = record.get("evidence_kind", "")
            return f"{record['evidence']}{f' ({kind})' if kind else ''}"
        case "AgentStartFailed":
            return str(record["reason"])
        case "ReplicatorUp":
            return f"its replicator {record['reason']}"
        case "NodeStateSeen":
            reason = f": {record['reason']}" if record.get("reason") else ""
            return f"Slurm has it as {record['state']}{reason}"
        case "DeviceLines":
            return "; ".join(map(str, record["lines"]))
        case "DrainRequested":
            return str(record["why"])
        case "RankExited" if record.get("signal") or record.get("exit_code"):
            how = exit_text(record.get("exit_code"), record.get("signal"))
            return f"rank {record['rank']} died there ({how})"
        case "RankStopped":
            return f"rank {record['rank']} stood still there for {float(record['for_s']):.1f} s"
        case _:
            return ""
