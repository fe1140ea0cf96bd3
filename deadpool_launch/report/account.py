"""Where the time of a job's nodes went: steps that count, and every loss by its name. Pure.

Each node has as many places as it has ranks, and each place has all of the job's time. At every
moment a place is in exactly one of the states below, so the parts add up to the total; all is
counted in whole microseconds of a place.

- A node that has no ranks (a spare, a lost one) is that, whatever the job does.
- Else the job starts, recovers, ends or trains.
- While it trains, a place is in a step that counts, held up in it by copies of the state, in a step
  that was run again later, in one that an incident cut short, or between steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from deadpool_launch.controller.roles import NodeRole
from deadpool_launch.view import IncidentView, RunView, StepView

_US = 1_000_000

#: What the job does, where a node with ranks is not in training.
START, RECOVERY, END, OPEN, UNTOLD = "start", "recovery", "end", "open", "untold"
_TRAINING = "training"
#: What becomes of the time in training.
PRODUCTIVE, COPIES, AGAIN, CUT, BETWEEN = "productive", "copies", "again", "cut", "between"
UNUSED = "unused"

#: Each kind of loss in words; those of an incident follow its number, those of a node its name.
_TEXTS = {
    START: "start, until the first step",
    BETWEEN: "between steps: data, evaluation, the script's own checkpoints",
    COPIES: "steps held up by copies of the state",
    CUT: "the step cut short, until it was noticed",
    RECOVERY: "recovery",
    AGAIN: "completed steps that were run again",
    UNTOLD: "the script tells nothing of its steps",
    OPEN: "behind the last completed step of the journal",
    END: "behind the last step",
    NodeRole.SPARE: "waited as a spare",
    NodeRole.ASIDE: "its ranks were set aside for want of nodes",
    NodeRole.LOST: "lost or given up",
    NodeRole.DRAINED: "drained",
    NodeRole.WORN: "given up: its processes died too often",
    UNUSED: "not used: more nodes than the job wanted",
}
_ORDER = list(_TEXTS)


@dataclass(frozen=True, slots=True)
class Cell:
    """One name for time: its kind, and the incident or the node that it belongs to."""

    kind: str
    incident: int | None = None
    node: str = ""

    @property
    def text(self) -> str:
        """The name in words."""
        if self.incident is not None:
            return f"incident {self.incident}: {_TEXTS[self.kind]}"
        return f"{self.node}: {_TEXTS[self.kind]}" if self.node else _TEXTS[self.kind]


@dataclass(frozen=True, slots=True)
class Account:
    """All time of all nodes. ``places``: how many each node has."""

    places: int
    nodes: int
    total_us: int
    productive_us: int
    losses: dict[Cell, int]

    @property
    def goodput(self) -> float:
        """The part of the total that went into steps that count; 0 of nothing."""
        return self.productive_us / self.total_us if self.total_us else 0.0

    def node_s(self, place_us: int) -> float:
        """As seconds of whole nodes."""
        return place_us / self.places / _US


#: From, until, and what it is.
Span = tuple[int, int, Cell]


def account(view: RunView) -> Account:
    """The account of a job as far as its journal goes; of one that has no plan yet it is empty."""
    active = [str(node) for node in view.job.get("active", ())]
    known = list(dict.fromkeys([*active, *view.nodes]))
    unused = [str(node) for node in view.job.get("unused", ()) if node not in known]
    if not view.job or view.started_at is None or not known:
        return Account(1, 0, 0, 0, {})
    places = max(1, int(view.job.get("nproc_per_node") or 1))
    begin, until = _us(view.started_at), _us(view.newest_at)
    until = max(begin, until)
    cells: dict[Cell, int] = defaultdict(int)
    phases = _phases(view, begin, until)
    told = _intervals(view, active, places)
    for node in known:
        windows = []
        for start, stop, cell in _roles(view, node, begin, until):
            if cell.kind != NodeRole.ACTIVE:
                cells[cell] += (stop - start) * places
                continue
            for a, b, phase in phases:
                a, b = max(a, start), min(b, stop)
                if a < b and phase.kind == _TRAINING:
                    windows.append((a, b, phase))
                elif a < b:
                    cells[phase] += (b - a) * places
        for place in range(places):
            _train(windows, told.get((node, place), []), cells)
    for node in unused:
        cells[Cell(UNUSED, node=node)] += (until - begin) * places
    count = len(known) + len(unused)
    productive = cells.pop(Cell(PRODUCTIVE), 0)
    losses = sorted(cells.items(), key=_by_kind)
    total = (until - begin) * places * count
    return Account(places, count, total, productive, {cell: us for cell, us in losses if us})


def _us(seconds: float) -> int:
    return round(seconds * _US)


def _by_kind(entry: tuple[Cell, int]) -> tuple[int, int, str]:
    cell, _ = entry
    return cell.incident or 0, _ORDER.index(cell.kind), cell.node


# ---------------------------------------------------------------- what a node is


def _roles(view: RunView, node: str, begin: int, until: int) -> Iterator[Span]:
    """What the node is to the job, without gaps from its beginning to its end."""
    plan = view.job.get("active", ())
    role: NodeRole = NodeRole.ACTIVE if node in plan else NodeRole.SPARE
    at = begin
    for change in view.parts:
        if change.node == node and change.part.role is not role:
            then = min(max(at, _us(change.at)), until)
            yield at, then, _role_cell(role, node)
            at, role = then, change.part.role
    yield at, until, _role_cell(role, node)


def _role_cell(role: NodeRole, node: str) -> Cell:
    return Cell(role, node=node)


# ---------------------------------------------------------------- what the job does


def _phases(view: RunView, begin: int, until: int) -> list[Span]:
    """What the job does, without gaps. An incident goes before all else."""
    steps = [step for step in view.steps if step.step >= 1]
    begins = sorted(_us(step.at) - _us(step.duration_s) for step in steps)
    spans: list[Span] = [(begin, until, Cell(_TRAINING))]
    if begins:
        spans = _painted(spans, begin, begins[0], Cell(START))
        last = max(_us(step.at) for step in steps)
        spans = _painted(spans, last, until, Cell(END if view.end is not None else OPEN))
    else:
        spans = _painted(spans, begin, until, Cell(UNTOLD if view.ranks else START))
    for incident in view.incidents.values():
        back = _back_at(incident, begins, until)
        cell = Cell(RECOVERY, incident.number)
        spans = _painted(spans, _us(incident.opened_at), back, cell)
    planned = {one.number for one in view.incidents.values() if one.planned}
    return [
        (a, b, Cell(_TRAINING, _ended_by(following, planned))) if what.kind == _TRAINING else span
        for span, (_, _, following) in zip(spans, [*spans[1:], spans[-1]], strict=True)
        for a, b, what in (span,)
    ]


def _ended_by(following: Cell, planned: set[int]) -> int | None:
    """The incident that cuts steps short where it begins, if that is what follows."""
    cuts = following.kind == RECOVERY and following.incident not in planned
    return following.incident if cuts else None


def _painted(spans: list[Span], start: int, stop: int, cell: Cell) -> list[Span]:
    """The spans with this one over whatever was there."""
    start, stop = max(start, spans[0][0]), min(stop, spans[-1][1])
    if start >= stop:
        return spans
    before = [(a, min(b, start), what) for a, b, what in spans if a < start]
    after = [(max(a, stop), b, what) for a, b, what in spans if b > stop]
    return [*before, (start, stop, cell), *after]


def _back_at(incident: IncidentView, begins: list[int], until: int) -> int:
    """When the ranks went on with steps after it, or the job ended."""
    restored = None
    for record in incident.records:
        if record.get("phase") == "state restored":
            restored = _us(float(record["at"]))
        elif record.get("phase") == "revoked":
            restored = None
    if restored is not None:
        return restored
    if incident.closed_at is None or incident.verdict == "stopped":
        return until
    closed = _us(incident.closed_at)
    place = bisect_left(begins, closed)
    return begins[place] if place < len(begins) else until


# ---------------------------------------------------------------- what a place does in training


#: From, until, how much of it copies held up, and the incident after which it was run again; None:
#: it counts, 0: it was run again without one. A journal has very many of them.
_Interval = tuple[int, int, int, int | None]


def _intervals(
    view: RunView, active: list[str], places: int
) -> dict[tuple[str, int], list[_Interval]]:
    """The steps of each place, one behind the other."""
    found: dict[tuple[str, int], list[_Interval]] = defaultdict(list)
    for step, again in _with_fate(view):
        node = step.node
        if not node and step.rank // places < len(active):
            node = active[step.rank // places]
        before = found[node, step.rank % places]
        stop = _us(step.at)
        start = stop - _us(step.duration_s)
        if before:
            start = max(start, before[-1][1])
        if start < stop:
            before.append((start, stop, _us(step.blocked_s), again))
    return found


def _with_fate(view: RunView) -> list[tuple[StepView, int | None]]:
    """Each step by time, with the incident after which it was run again; None: it counts, 0: it was
    run again without one.
    """
    opened = sorted((one.opened_at, number) for number, one in view.incidents.items())
    next_at: dict[tuple[int, int], float] = {}
    fates: list[tuple[StepView, int | None]] = []
    steps = sorted((step for step in view.steps if step.step >= 1), key=lambda step: step.at)
    for step in reversed(steps):
        run_again = next_at.get((step.rank, step.step))
        next_at[step.rank, step.step] = step.at
        number = None
        if run_again is not None:
            place = bisect_left(opened, (run_again, 0))
            number = opened[place - 1][1] if place else 0
        fates.append((step, number))
    fates.reverse()
    return fates


def _train(windows: list[Span], intervals: list[_Interval], cells: dict[Cell, int]) -> None:
    """Add what one place did while the job trained."""
    first = between = copies = productive = 0
    for start, stop, training in windows:
        at = start
        while first < len(intervals) and intervals[first][1] <= start:
            first += 1
        for index in range(first, len(intervals)):
            begun, ended, blocked, again = intervals[index]
            if begun >= stop:
                break
            a, b = max(begun, at), min(ended, stop)
            if a >= b:
                continue
            between += a - at
            if again is None:
                blocked = min(blocked, b - a)
                copies += blocked
                productive += b - a - blocked
            else:
                cells[Cell(AGAIN, again or None)] += b - a
            at = b
        if training.incident is None:
            between += stop - at
        else:
            cells[Cell(CUT, training.incident)] += stop - at
    for kind, us in ((BETWEEN, between), (COPIES, copies), (PRODUCTIVE, productive)):
        cells[Cell(kind)] += us
