"""How a job stands, as one document: from its journal, and its launcher's word if that answers.

Pure. The screen shows nothing else, and ``--json`` prints it.
"""

from __future__ import annotations

from collections import defaultdict
from math import isfinite
from statistics import median
from typing import Any

from deadpool_launch.controller.roles import NodeRole
from deadpool_launch.controller.states import Phase
from deadpool_launch.view import IncidentView, RankView, RunView
from deadpool_runtime.protocol import JobStanding

#: The launcher's phases in fewer words.
_STATES = {
    **dict.fromkeys((Phase.NEW, Phase.AGENTS, Phase.LAUNCHING), "starting"),
    Phase.TRAINING: "training",
    **dict.fromkeys((Phase.GATHERING, Phase.PARKING, Phase.INVENTORY), "recovering"),
    Phase.RESTORING: "recovering",
    Phase.CLEARING: "starting again",
    Phase.ENDED: "ending",
}
SILENT = "its launcher does not answer"


def status(view: RunView, standing: JobStanding | None, now: float) -> dict[str, Any]:
    """The document. ``standing``: the launcher's answer; ``now``: seconds since 1970."""
    end = view.end
    if end is not None:
        standing = None
    until = view.newest_at if end is not None else max(now, view.newest_at)
    ranks = view.present
    roles = dict(view.nodes)
    if standing is not None:
        roles.update({node: NodeRole(role) for node, role in standing.nodes.items()})
    nodes = _nodes(view, roles)
    loss = view.loss
    durations = [rank.duration_s for rank in ranks if rank.duration_s is not None]
    written = [record for record in view.checkpoints if "failed" not in record]
    last = list(view.incidents.values())[-1:]
    return {
        "job_id": str(view.job.get("job_id", "")),
        "script": str(view.job.get("script", "")),
        "state": _state(view, standing),
        "launcher_answers": None if end is not None else standing is not None,
        "exit_code": None if end is None else end.exit_code,
        "reason": "" if end is None else end.reason,
        "elapsed_s": view.since_start_s(until),
        "newest_s": max(0.0, until - view.newest_at),
        "world_size": int(view.job.get("world_size") or 0),
        "ranks_taking_part": len(ranks) if standing is None else standing.ranks,
        "epoch": max((rank.epoch for rank in ranks), default=0),
        "term": 1 + len(view.launchers) if standing is None else standing.term,
        "step": view.step,
        "step_s": median(durations) if durations else None,
        "loss": loss if loss is not None and isfinite(loss) else None,
        "nodes": nodes,
        "spares": sum(node["role"] == NodeRole.SPARE for node in nodes),
        "protection": protection(view, standing),
        "checkpoint": None
        if not written
        else {
            "step": written[-1]["step"],
            "age_s": max(0.0, until - float(written[-1]["at"])),
            "directory": str(written[-1].get("directory", "")),
        },
        "incidents": len(view.incidents),
        "last_incident": _incident(last[0], until) if last else None,
        "said": [{"at": at, "text": text} for at, text in view.says],
    }


def _state(view: RunView, standing: JobStanding | None) -> str:
    if view.end is not None:
        return view.end.verdict
    return SILENT if standing is None else state_word(standing)


def state_word(standing: JobStanding) -> str:
    """What the job is doing, in a word."""
    known: dict[str, str] = {str(phase): state for phase, state in _STATES.items()}
    return known.get(standing.phase, standing.phase)


def _nodes(view: RunView, roles: dict[str, NodeRole]) -> list[dict[str, Any]]:
    ranks_of: dict[str, list[RankView]] = defaultdict(list)
    for rank in view.ranks.values():
        ranks_of[rank.node].append(rank)
    why = {change.node: change.part.why for change in view.parts}
    rows = []
    for node, role in roles.items():
        ranks = ranks_of[node] if role is NodeRole.ACTIVE else []
        durations = [rank.duration_s for rank in ranks if rank.duration_s is not None]
        rows.append(
            {
                "node": node,
                "role": str(role),
                "why": why.get(node, "") if role not in (NodeRole.ACTIVE, NodeRole.SPARE) else "",
                "ready": node in view.ready,
                "ranks": sorted(rank.rank for rank in ranks),
                "step": min((rank.step for rank in ranks if rank.step is not None), default=None),
                "step_s": max(durations, default=None),
                "held_up_s": max((rank.blocked_s for rank in ranks), default=None),
            }
        )
    return rows


def protection(view: RunView, standing: JobStanding | None) -> dict[str, Any]:
    """Whether every rank could be lost now, and what the copies cost."""
    ranks = [rank for rank in view.present if rank.step is not None]
    behind = [
        (rank.step or 0) - rank.confirmed
        for rank in ranks
        if rank.confirmed is not None and rank.confirmed >= 0
    ]
    all_told = bool(ranks) and len(behind) == len(ranks)
    held_up = [rank.blocked_s / rank.duration_s for rank in ranks if rank.duration_s and rank.step]
    bare = _is_bare(view) if standing is None else standing.bare
    state = "none" if not ranks else "bare" if bare else "whole" if all_told else "not told"
    if state == "not told" and any(rank.confirmed == -1 for rank in ranks):
        state = "none"
    return {
        "state": state,
        "lag_steps": max(behind) if all_told else None,
        "unprotected_steps": view.unprotected,
        "held_up_share": min(1.0, median(held_up)) if held_up else None,
    }


def _is_bare(view: RunView) -> bool:
    """By the journal: after the last fault not every rank has a replica yet."""
    for incident in reversed(view.incidents.values()):
        if not incident.planned:
            phases = [record.get("phase") for record in incident.records]
            return "redundancy restored" not in phases and view.end is None
    return False


def _incident(incident: IncidentView, until: float) -> dict[str, Any]:
    closed = incident.closed_at
    newest = incident.records[-1]
    return {
        "number": incident.number,
        "reason": str(incident.records[0].get("detail", "")),
        "planned": incident.planned,
        "verdict": incident.verdict,
        "phase": str(newest.get("phase", "")),
        "age_s": max(0.0, until - incident.opened_at),
        "took_s": None if closed is None else closed - incident.opened_at,
        "replayed_steps": incident.replayed_steps,
    }
