"""All that a report says, as one document that JSON can hold. Pure; the page shows nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any

from deadpool_launch.report.account import AGAIN, CUT, RECOVERY, Account, account
from deadpool_launch.report.words import phase_label
from deadpool_launch.timeline import timeline
from deadpool_launch.view import IncidentView, RunView

#: Of the document's shape.
VERSION = 1
#: Points of a curve; of longer ones neighbours are put together.
MOST_POINTS = 600
#: What is known of a node: the newest so many.
_MOST_EVIDENCE = 20
_OF_INCIDENTS = (CUT, RECOVERY, AGAIN)


@dataclass(frozen=True, slots=True)
class StepRun:
    """One run of a step on all ranks: the longest time any took, the oldest replica any had."""

    step: int
    epoch: int
    at: float
    duration_s: float
    blocked_s: float
    #: Steps that the oldest replica was behind; None: not told, or there is none.
    lag: int | None


def document(view: RunView, alive: bool | None = None) -> dict[str, Any]:
    """Everything of the job as far as its journal goes. ``alive``: whether the launcher answers;
    None: nobody asked.
    """
    runs = step_runs(view)
    whole = account(view)
    return {
        "version": VERSION,
        "job": _job(view, alive),
        "steps": _steps(view, runs),
        "goodput": _goodput(whole),
        "incidents": [_incident(view, one, whole) for one in view.incidents.values()],
        "protection": _protection(view, runs),
        "checkpoints": _checkpoints(view),
        "launchers": [_launcher(view, record) for record in view.launchers],
        "nodes": [_node(view, name) for name in _all_nodes(view)],
        "exclude": exclude(view),
        "series": thinned(view, runs),
        "malformed_records": view.malformed,
    }


def state_text(view: RunView, alive: bool | None) -> str:
    """How the job stands, in a word or two."""
    if view.end is not None:
        return view.end.verdict
    if alive is None:
        return "no end in the journal"
    return "running" if alive else "ended without a word"


def exclude(view: RunView) -> list[str]:
    """Nodes that the next job should do without: by the job's end, or as far as it came."""
    if view.end is not None:
        return list(view.end.exclude)
    lasting: dict[str, bool] = {}
    for change in view.parts:
        lasting[change.node] = change.part.lasting
    return [node for node, lasts in lasting.items() if lasts]


def _all_nodes(view: RunView) -> list[str]:
    active = [str(node) for node in view.job.get("active", ())]
    return list(dict.fromkeys([*active, *view.nodes]))


def _job(view: RunView, alive: bool | None) -> dict[str, Any]:
    job, end = view.job, view.end
    begin = view.started_at or 0.0
    return {
        "job_id": str(job.get("job_id", "")),
        "script": str(job.get("script", "")),
        "script_args": [str(argument) for argument in job.get("script_args", ())],
        "site": str(job.get("site", "")),
        "version": str(job.get("version", "")),
        "world_size": int(job.get("world_size") or 0),
        "nproc_per_node": int(job.get("nproc_per_node") or 0),
        "active": len(job.get("active", ())),
        "spares": len(job.get("spares", ())),
        "extras": len(job.get("extras", ())),
        "unused": len(job.get("unused", ())),
        "started_at": begin,
        "newest_at": view.newest_at,
        "duration_s": max(0.0, view.newest_at - begin),
        "state": state_text(view, alive),
        "ended": end is not None,
        "exit_code": None if end is None else end.exit_code,
        "reason": "" if end is None else end.reason,
        "epoch": max((rank.epoch for rank in view.ranks.values()), default=0),
    }


# ---------------------------------------------------------------- steps


def step_runs(view: RunView) -> list[StepRun]:
    """Every run of every step by time; a step that was run again is there for each time."""
    found: dict[tuple[int, int], list[Any]] = {}
    for step in view.steps:
        if step.step < 1:
            continue
        entry = found.setdefault((step.epoch, step.step), [0.0, 0.0, 0.0, []])
        entry[0] = max(entry[0], step.at)
        entry[1] = max(entry[1], step.duration_s)
        entry[2] = max(entry[2], step.blocked_s)
        entry[3].append(step.confirmed)
    runs = []
    for (epoch, number), (at, duration_s, blocked_s, confirmed) in found.items():
        known = [each for each in confirmed if each is not None and each >= 0]
        lag = number - min(known) if known and len(known) == len(confirmed) else None
        runs.append(StepRun(number, epoch, at, duration_s, blocked_s, lag))
    return sorted(runs, key=lambda run: run.at)


def _steps(view: RunView, runs: Sequence[StepRun]) -> dict[str, Any]:
    durations = sorted(run.duration_s for run in runs)
    loss = view.loss
    return {
        "completed": view.step,
        "runs": len(runs),
        "run_again": sum(one.replayed_steps or 0 for one in view.incidents.values()),
        "median_s": median(durations) if durations else None,
        "p95_s": _at_share(durations, 0.95),
        "max_s": durations[-1] if durations else None,
        "loss": loss if loss is not None and isfinite(loss) else None,
    }


def _at_share(ordered: Sequence[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def thinned(view: RunView, runs: Sequence[StepRun], most: int = MOST_POINTS) -> list[list[Any]]:
    """For each point of the curves: seconds since the start, the last of its steps, the least,
    middle and greatest time of a step, the greatest time held up, the greatest lag.
    """
    size = -(-len(runs) // most) if runs else 1
    points = []
    for first in range(0, len(runs), size):
        part = runs[first : first + size]
        durations = [run.duration_s for run in part]
        lags = [run.lag for run in part if run.lag is not None]
        points.append(
            [
                round(view.since_start_s(part[-1].at), 3),
                part[-1].step,
                round(min(durations), 6),
                round(median(durations), 6),
                round(max(durations), 6),
                round(max(run.blocked_s for run in part), 6),
                max(lags, default=None),
            ]
        )
    return points


# ---------------------------------------------------------------- time


def _goodput(whole: Account) -> dict[str, Any]:
    return {
        "share": whole.goodput,
        "nodes": whole.nodes,
        "total_node_s": whole.node_s(whole.total_us),
        "productive_node_s": whole.node_s(whole.productive_us),
        "losses": [
            {
                "kind": cell.kind,
                "text": cell.text,
                "incident": cell.incident,
                "node": cell.node,
                "node_s": whole.node_s(us),
                "share": us / whole.total_us,
            }
            for cell, us in whole.losses.items()
        ],
    }


def _incident(view: RunView, incident: IncidentView, whole: Account) -> dict[str, Any]:
    rows = timeline(incident)
    closed = incident.closed_at
    bare = [one for one in incident.records if one.get("phase") == "redundancy restored"]
    spent = {cell.kind: us for cell, us in whole.losses.items() if cell.incident == incident.number}
    last = incident.records[-1] if closed is None else _closing(incident)
    return {
        "number": incident.number,
        "planned": incident.planned,
        "reason": str(incident.records[0].get("detail", "")),
        "fault": None if incident.fault is None else str(incident.fault.get("fault", "")),
        "since_start_s": view.since_start_s(incident.opened_at),
        "opened_at": incident.opened_at,
        "verdict": incident.verdict,
        "outcome": str(last.get("detail", "")) if closed is not None else "",
        "took_s": None if closed is None else closed - incident.opened_at,
        "noticed_s": None if incident.fault is None else incident.opened_at - incident.fault_at,
        "bare_s": float(bare[-1]["at"]) - incident.opened_at if bare else None,
        "replayed_steps": incident.replayed_steps,
        "rung": incident.rung,
        "node_s": {kind: whole.node_s(spent.get(kind, 0)) for kind in _OF_INCIDENTS},
        "phases": [
            {
                "phase": row.phase,
                "label": phase_label(row.phase, incident.verdict),
                "detail": row.detail,
                "since_s": row.since_s,
                "took_s": row.took_s,
            }
            for row in rows
        ],
    }


def _closing(incident: IncidentView) -> dict[str, Any]:
    return next(record for record in incident.records if "verdict" in record)


# ---------------------------------------------------------------- copies, checkpoints, launchers


def _protection(view: RunView, runs: Sequence[StepRun]) -> dict[str, Any]:
    lags = [run.lag for run in runs if run.lag is not None]
    duration_s = sum(run.duration_s for run in runs)
    blocked_s = sum(run.blocked_s for run in runs)
    return {
        "unprotected_steps": view.unprotected,
        "lag_steps_median": median(lags) if lags else None,
        "lag_steps_max": max(lags, default=None),
        "held_up_share": blocked_s / duration_s if duration_s else None,
        "held_up_max_s": max((run.blocked_s for run in runs), default=None),
        "bare_s": sum(bare_spans(view)),
    }


def bare_spans(view: RunView) -> list[float]:
    """How long after each first sign not every rank had a replica."""
    spans = []
    for incident in view.incidents.values():
        back = [one for one in incident.records if one.get("phase") == "redundancy restored"]
        until = float(back[-1]["at"]) if back else view.newest_at
        if not incident.planned:
            spans.append(max(0.0, until - incident.opened_at))
    return spans


def _checkpoints(view: RunView) -> dict[str, Any]:
    written = [record for record in view.checkpoints if "failed" not in record]
    failed = [record for record in view.checkpoints if "failed" in record]
    newest = written[-1] if written else None
    return {
        "written": len(written),
        "failed": [
            {"step": record["step"], "reason": str(record["failed"])} for record in failed[-10:]
        ],
        "newest_step": None if newest is None else newest["step"],
        "newest_at": None if newest is None else float(newest["at"]),
        "directory": "" if newest is None else str(newest.get("directory", "")),
    }


def _launcher(view: RunView, record: dict[str, Any]) -> dict[str, Any]:
    return {
        "term": record.get("term"),
        "at": float(record["at"]),
        "since_start_s": view.since_start_s(float(record["at"])),
        "node": str(record.get("node", "")),
        "ended": str(record.get("ended", "")),
    }


# ---------------------------------------------------------------- nodes


def _node(view: RunView, name: str) -> dict[str, Any]:
    changes = [change for change in view.parts if change.node == name]
    last = changes[-1].part if changes else None
    role = view.nodes.get(name)
    evidence = view.evidence.get(name, [])
    return {
        "node": name,
        "planned_as": "active" if name in view.job.get("active", ()) else "spare",
        "role": "" if role is None else str(role),
        "why": "" if last is None else last.why,
        "lasting": last is not None and last.lasting,
        "ranks": sorted(rank.rank for rank in view.ranks.values() if rank.node == name),
        "changes": [
            {
                "since_start_s": view.since_start_s(change.at),
                "role": str(change.part.role),
                "why": change.part.why,
            }
            for change in changes
        ],
        "evidence": [
            {"since_start_s": view.since_start_s(at), "text": text}
            for at, text in evidence[-_MOST_EVIDENCE:]
        ],
    }
