"""What became of a run, from its journal and from the digests that its ranks wrote. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Record = dict[str, Any]
#: By rank: pairs of a step and the digest of the state after it, in the order of writing.
Digests = Mapping[int, Sequence[tuple[int, str]]]

RUNGS = {
    0: "retry",
    1: "local restart",
    2: "swap",
    3: "warm restart",
    4: "shrink",
    5: "durable",
    6: "stop",
}


@dataclass(frozen=True)
class Incident:
    """One incident: its verdict, the rung that it took, and what was lost."""

    verdict: str
    rung: int
    replayed_steps: int
    #: Time of the first completed step behind it, on the journal's clock.
    first_step_at: float | None


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    #: None: the launcher came to no verdict.
    exit_code: int | None
    reason: str
    incidents: tuple[Incident, ...]
    #: What Slurm calls the job's end.
    slurm_state: str
    #: Every digest is that of the undisturbed run; None: no rank completed a step.
    same_bits: bool | None
    #: Where the first difference is.
    difference: str
    #: The newest step that every rank completed.
    steps: int
    #: From the first strike to the first completed step behind the last incident, in seconds.
    first_step_s: float | None
    #: What was left on the nodes, a sentence each.
    left: tuple[str, ...]

    def as_json(self) -> Record:
        """The outcome for a JSON file."""
        return asdict(self)


def incidents(records: Sequence[Record]) -> tuple[Incident, ...]:
    """The incidents that a journal tells of; one without an end has the verdict ``open``."""
    found: dict[int, list[tuple[int, Record]]] = {}
    for at, record in enumerate(records):
        if record["kind"] == "incident":
            found.setdefault(record["number"], []).append((at, record))
    return tuple(_incident(marks, records) for marks in found.values())


def _incident(marks: Sequence[tuple[int, Record]], records: Sequence[Record]) -> Incident:
    closed = [record for _, record in marks if record["phase"] == "closed"]
    end = [at for at, record in marks if record["phase"] == "closed"] or [len(records)]
    verdict = str(closed[0]["verdict"]) if closed else "open"
    said = [record["rung"] for _, record in marks if record.get("rung") is not None]
    phases = {record["phase"] for _, record in marks}
    rung = said[-1] if said else _rung(verdict, phases, records, marks[0][0], end[0])
    first = [record["at"] for _, record in marks if record["phase"] == "first step"]
    replayed = int(closed[0].get("replayed_steps", 0)) if closed else 0
    return Incident(verdict, rung, replayed, first[-1] if first else None)


def _rung(
    verdict: str, phases: set[str], records: Sequence[Record], opened: int, closed: int
) -> int:
    """The rung, by what was done where the journal does not name it."""
    if verdict == "stopped":
        return 6
    if verdict == "shrunk":
        return 4
    if "durable checkpoint" in phases:
        return 5
    node: dict[int, str] = {}
    started: set[int] = set()
    moved = False
    for at, record in enumerate(records[:closed]):
        if record["kind"] != "rank":
            continue
        rank = record["rank"]
        if at > opened:
            started.add(rank)
            moved = moved or node.get(rank) != record["node"]
        node[rank] = record["node"]
    if moved:
        return 2
    if started and started == set(node):
        return 3
    return 1 if started else 0


def compare(expected: Digests, found: Digests, *, whole: bool) -> str:
    """Where a run first differs from the undisturbed one; an empty text: nowhere.

    Steps that were run again must give the same bits again. Of a ``whole`` run, one that came to
    its end, no rank may lack, and none may be behind the others.
    """
    for rank in sorted(expected):
        lines = found.get(rank, ())
        if not lines and whole:
            return f"rank {rank} completed no step"
        wanted = dict(expected[rank])
        for step, digest in lines:
            if step not in wanted:
                return f"rank {rank} completed step {step}, which the undisturbed run has not"
            if wanted[step] != digest:
                return f"rank {rank} differs after step {step}"
    last = {rank: max(step for step, _ in lines) for rank, lines in found.items() if lines}
    if whole and len(set(last.values())) > 1:
        return f"ranks end at different steps: {last}"
    return ""


def read_digests(texts: Mapping[int, str]) -> Digests:
    """The digests from the ranks' files; a last line without an end is left out."""
    return {rank: tuple(_lines(text)) for rank, text in texts.items()}


def _lines(text: str) -> Iterable[tuple[int, str]]:
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            step, _, digest = line.strip().partition(" ")
            yield int(step), digest


def common_step(found: Digests) -> int:
    """The newest step that every rank has completed; 0: none."""
    return min((max((step for step, _ in lines), default=0) for lines in found.values()), default=0)
