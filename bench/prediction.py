"""What ``deadpool simulate`` says of the very faults that ``recovery.py`` brought about. Pure.

Each run is foretold from the others: how long the system stood still until its first step began is
the median of the other runs of the case, everything else is what the run was given: the time of a
step, the moment of the fault, and the steps between checkpoints. The simulator then walks from step
to step as it does for a job of a year, and says what the fault cost.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from deadpool_launch.whatif.faults import Fault
from deadpool_launch.whatif.job import Job
from deadpool_launch.whatif.walk import Rules, walk

#: How far a prediction may be off.
GOAL = 0.15
_NODES, _SPARES = 3, 1


def foretold(run: Mapping[str, Any], pause_s: float, every: int, *, copies: bool) -> float:
    """The time that the run's fault costs, if the system stands still for ``pause_s``."""
    step_s, last = run["step_s"], run["last_step"]
    job = Job(steps=4 * last + 100, step_s=step_s, nodes=_NODES, spares=_SPARES, queue_s=0.0)
    rules = Rules(
        overhead=0.0,
        copy_every=1 if copies else None,
        copy_s=0.0,
        save_every=every,
        save_s=0.0,
        transient_s=pause_s,
        permanent_s=pause_s,
        reload_s=pause_s,
    )
    # Half a nanosecond keeps the last step on the right side of the fault.
    at = last * step_s + max(run["into_step_s"], 5e-10)
    return walk(job, rules, iter([Fault(at, (1,), permanent=True)]), math.inf).recovery_s


def checked(case: Mapping[str, Any], every: int) -> dict[str, float]:
    """A case of ``recovery.json``: medians of what was foretold and measured, and how far off."""
    runs: Sequence[Mapping[str, Any]] = case["runs"]
    pauses = [run["resumed_s"] - run["step_s"] for run in runs]
    copies = case["system"].startswith("DEADPOOL")
    told = []
    for number, run in enumerate(runs):
        others = [*pauses[:number], *pauses[number + 1 :]] or pauses
        told.append(foretold(run, statistics.median(others), every, copies=copies))
    predicted = statistics.median(told)
    measured = statistics.median(run["lost_s"] for run in runs)
    return {
        "predicted_s": round(predicted, 3),
        "measured_s": round(measured, 3),
        "off": round(predicted / measured - 1, 3),
    }
