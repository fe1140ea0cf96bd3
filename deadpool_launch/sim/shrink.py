"""Fewer faults that break the same promise: what a person wants to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deadpool_launch.sim.cluster import Outcome, simulate
from deadpool_launch.sim.scenario import Scenario


def shrink(scenario: Scenario, run: Callable[[Scenario], Outcome] = simulate) -> tuple[int, ...]:
    """Which of the faults are enough to break a promise: none of them can be left out.

    One is left out at a time, and for good if some promise is broken all the same.
    """
    kept = list(range(len(scenario.faults)))
    at = 0
    while at < len(kept):
        fewer = kept[:at] + kept[at + 1 :]
        if run(only(scenario, fewer)).broken:
            kept = fewer
        else:
            at += 1
    # Leaving out a later one may have made an earlier one needless.
    for place in list(kept):
        fewer = [other for other in kept if other != place]
        if run(only(scenario, fewer)).broken:
            kept = fewer
    return tuple(kept)


def only(scenario: Scenario, places: Sequence[int]) -> Scenario:
    """The scenario with the faults at these places of its list."""
    return scenario.with_faults([scenario.faults[place] for place in places])
