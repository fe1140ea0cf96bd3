"""A job's figures in Prometheus' text format. Pure.

Few of them, and none for each rank: a job of thousands of ranks is one target with a page of lines.
``docs/watching.md`` lists the names, and is tested to have all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf, isinf, isnan
from statistics import median

from deadpool_launch.controller.roles import NodeRole
from deadpool_launch.status.facts import protection
from deadpool_launch.view import RunView

#: Of what ``exposition`` returns.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: How an incident can end.
VERDICTS = ("continued", "shrunk", "regrown", "restarted", "stopped")

Labels = dict[str, str]


@dataclass(frozen=True, slots=True)
class Metric:
    """A name, what it counts, and how to get its values: each with its labels."""

    name: str
    kind: str
    text: str


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("deadpool_info", "gauge", "The job, in labels; always 1."),
        Metric("deadpool_start_time_seconds", "gauge", "When the job's journal began."),
        Metric("deadpool_newest_record_time_seconds", "gauge", "When it was last written to."),
        Metric("deadpool_ended", "gauge", "1 once the job has its verdict."),
        Metric("deadpool_exit_code", "gauge", "The verdict's exit code; absent before."),
        Metric("deadpool_ranks", "gauge", "Ranks of the job."),
        Metric("deadpool_nodes", "gauge", "Nodes by what they are to the job."),
        Metric("deadpool_epoch", "gauge", "Grows with every reconfiguration."),
        Metric("deadpool_launcher_term", "gauge", "Grows with every launcher that takes over."),
        Metric("deadpool_step", "gauge", "Newest step that every rank has completed."),
        Metric("deadpool_step_seconds", "gauge", "Its time, the middle one of the ranks."),
        Metric("deadpool_step_held_up_seconds", "gauge", "Of it, held up by copies; the most."),
        Metric("deadpool_loss", "gauge", "Mean over the ranks of what they reported of it."),
        Metric("deadpool_incidents_total", "counter", "Incidents by verdict."),
        Metric("deadpool_incident_open", "gauge", "1 while an incident has no verdict."),
        Metric("deadpool_recovery_seconds_total", "counter", "From first signs to verdicts."),
        Metric("deadpool_steps_run_again_total", "counter", "Completed steps that were run again."),
        Metric("deadpool_replicas_whole", "gauge", "1 if every rank has a replica."),
        Metric("deadpool_replica_lag_steps", "gauge", "Steps that the oldest replica is behind."),
        Metric("deadpool_unprotected_steps_total", "counter", "Steps begun without a replica."),
        Metric("deadpool_checkpoints_total", "counter", "Durable checkpoints, complete or not."),
        Metric("deadpool_checkpoint_step", "gauge", "Step of the newest complete one."),
    )
}


def exposition(view: RunView) -> str:
    """The page that Prometheus reads."""
    lines = []
    samples: dict[str, list[tuple[Labels, float]]] = {name: [] for name in METRICS}
    for name, labels, value in _samples(view):
        samples[name].append((labels, value))
    for name, found in samples.items():
        if found:
            metric = METRICS[name]
            lines += [f"# HELP {name} {metric.text}", f"# TYPE {name} {metric.kind}"]
            lines += [f"{name}{_labels(labels)} {_number(value)}" for labels, value in found]
    return "\n".join(lines) + "\n"


def _samples(view: RunView) -> Iterator[tuple[str, Labels, float]]:
    job, ranks = view.job, view.present
    about = {key: str(job.get(key, "")) for key in ("job_id", "script", "site", "version")}
    yield "deadpool_info", about, 1
    if view.started_at is not None:
        yield "deadpool_start_time_seconds", {}, view.started_at
        yield "deadpool_newest_record_time_seconds", {}, view.newest_at
    yield "deadpool_ended", {}, view.end is not None
    if view.end is not None:
        yield "deadpool_exit_code", {}, view.end.exit_code
    yield "deadpool_ranks", {}, int(job.get("world_size") or 0)
    roles = Counter(view.nodes.values())
    for role in NodeRole:
        yield "deadpool_nodes", {"role": str(role)}, roles[role]
    yield "deadpool_epoch", {}, max((rank.epoch for rank in ranks), default=0)
    yield "deadpool_launcher_term", {}, _term(view)
    yield "deadpool_step", {}, view.step
    durations = [rank.duration_s for rank in ranks if rank.duration_s is not None]
    if durations:
        yield "deadpool_step_seconds", {}, median(durations)
        yield "deadpool_step_held_up_seconds", {}, max(rank.blocked_s for rank in ranks)
    if view.loss is not None:
        yield "deadpool_loss", {}, view.loss
    yield from _of_incidents(view)
    yield from _of_copies(view)


def _term(view: RunView) -> int:
    terms = [record.get("term") for record in view.launchers]
    return max((term for term in terms if isinstance(term, int)), default=1)


def _of_incidents(view: RunView) -> Iterator[tuple[str, Labels, float]]:
    incidents = list(view.incidents.values())
    verdicts = Counter(one.verdict for one in incidents if one.verdict is not None)
    for verdict in dict.fromkeys((*VERDICTS, *verdicts)):
        yield "deadpool_incidents_total", {"verdict": verdict}, verdicts[verdict]
    yield "deadpool_incident_open", {}, view.open_incident is not None
    took = [one.closed_at - one.opened_at for one in incidents if one.closed_at is not None]
    yield "deadpool_recovery_seconds_total", {}, sum(took)
    yield "deadpool_steps_run_again_total", {}, sum(one.replayed_steps or 0 for one in incidents)


def _of_copies(view: RunView) -> Iterator[tuple[str, Labels, float]]:
    known = protection(view, None)
    if known["state"] != "not told":
        yield "deadpool_replicas_whole", {}, known["state"] == "whole"
    if known["lag_steps"] is not None:
        yield "deadpool_replica_lag_steps", {}, known["lag_steps"]
    yield "deadpool_unprotected_steps_total", {}, view.unprotected
    failed = sum("failed" in record for record in view.checkpoints)
    complete = len(view.checkpoints) - failed
    yield "deadpool_checkpoints_total", {"result": "complete"}, complete
    yield "deadpool_checkpoints_total", {"result": "failed"}, failed
    steps = [int(record["step"]) for record in view.checkpoints if "failed" not in record]
    if steps:
        yield "deadpool_checkpoint_step", {}, steps[-1]


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    kept = "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in value
    )
    return kept.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if isnan(value):
        return "NaN"
    if isinf(value):
        return "+Inf" if value == inf else "-Inf"
    return repr(float(value)) if value != int(value) else str(int(value))


def names_in(text: str) -> set[str]:
    """The metrics that a page has values of."""
    return set(_names(text.splitlines()))


def _names(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        if line and not line.startswith("#"):
            yield line.partition(" ")[0].partition("{")[0]
