"""The published 100,000-step result as a preset, with everything that had to be assumed. Pure.

Published (arXiv 2607.01646): over a job of 100,000 steps faults cost 5.3 % of the time that they
cost under checkpoint-restart, 18.8 times less; and, in the abstract, a recovery takes less than
40 s on up to 512 A100. How long a step, a restart and the replay were is not known here. Both
costs grow with the number of faults, so the ratio depends on these three and hardly on the MTBF::

    (restart + replay) / (swap + half a step)

The restart and the step time are assumed, and the time between two checkpoints, which decides the
replay, is *solved for*: it is the one with which the published ratio comes out.
"""

from __future__ import annotations

from dataclasses import dataclass

from deadpool_launch.whatif.job import Job
from deadpool_launch.whatif.strategies import ASSUMED, DEADPOOL, FIXED, Strategy

RATIO = 18.8
SHARE = 0.053
#: Enough for the interval of the ratio to be narrower than the ratio's own rounding.
SEEDS = 400
_PUBLISHED = "arXiv 2607.01646"


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What the ratio depends on."""

    step_s: float = 10.0
    restart_s: float = 300.0
    swap_s: float = 40.0


def expected(assumptions: Assumptions, save_every: int) -> float:
    """The ratio for few faults that come at any time: each loses half an interval, or half a step.

    ``save_every``: steps between two checkpoints.
    """
    each = assumptions
    replay_s = save_every * each.step_s / 2
    return (each.restart_s + replay_s) / (each.swap_s + each.step_s / 2)


def solved(assumptions: Assumptions) -> int:
    """The steps between two checkpoints with which ``RATIO`` comes out."""
    each = assumptions
    replay_s = RATIO * (each.swap_s + each.step_s / 2) - each.restart_s
    return max(1, round(2 * replay_s / each.step_s))


def preset(assumptions: Assumptions) -> tuple[Job, Strategy, Strategy]:
    """The job, and checkpoint-restart and DEADPOOL as the publication compares them."""
    each = assumptions
    job = Job(steps=100_000, step_s=each.step_s, nodes=128, spares=64, queue_s=3600.0)
    restart = FIXED
    for key in ("transient", "permanent", "reload"):
        restart = restart.changed(key, each.restart_s, f"{ASSUMED}; the job stays in its nodes")
    restart = restart.changed("save", 0.0, f"{ASSUMED}; written in the background").changed(
        "save-every",
        solved(each) * each.step_s,
        f"solved for: {solved(each)} steps, with which the published ratio comes out",
    )
    swap = DEADPOOL.changed("overhead", 0.0, f"{_PUBLISHED}, abstract: zero overhead")
    swap = swap.changed("save", 0.0, f"{ASSUMED}; none is needed")
    swap = swap.changed("save-every", job.undisturbed_s, f"{ASSUMED}; none is needed")
    for key in ("transient", "permanent"):
        swap = swap.changed(key, each.swap_s, f"{_PUBLISHED}, abstract: under 40 s; taken as 40 s")
    return job, restart, swap


def lines(assumptions: Assumptions) -> list[str]:
    """Everything that is assumed or quoted, a line each."""
    each = assumptions
    return [
        f"published: {SHARE:.1%} of checkpoint-restart's recovery time, {RATIO} times less, over "
        f"100,000 steps ({_PUBLISHED}, as quoted; its full text was not at hand)",
        f"published: a recovery takes less than 40 s on up to 512 A100 ({_PUBLISHED}, abstract); "
        f"taken as {each.swap_s:g} s, with half a step lost in the mean",
        f"{ASSUMED}: a step takes {each.step_s:g} s",
        f"{ASSUMED}: a restart takes {each.restart_s:g} s without the replay",
        f"{ASSUMED}: checkpoints are written in the background and stop nothing",
        f"solved for: a checkpoint every {solved(each)} steps, so {(solved(each)) / 2:g} steps are "
        "done again in the mean; with this number the published ratio comes out, so the "
        "simulation shows that it is consistent, not that it was so",
        f"{ASSUMED}: 128 nodes of four GPUs, 64 spares so that none is ever lacking, every fault "
        "permanent",
        "simulated: when faults strike, what they interrupt, faults during a recovery",
    ]
