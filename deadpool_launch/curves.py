"""A job's losses step by step, and the steps that were run again. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from deadpool_launch.view import IncidentView, RunView, StepView


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
