"""Ratio of two kinds of steps that follow each other in blocks."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

#: Bootstrap draws behind an interval.
DRAWS = 10_000


def ratios(step_s: Sequence[float], kinds: Sequence[bool], settling: int) -> dict[str, float]:
    """Steps of the kind ``True`` to the others: of means with its 95 % interval, and of medians.

    ``step_s`` and ``kinds``: time and kind of each step. ``settling``: so many are left out at the
    start. The interval comes from resampling whole blocks of steps of the same kind.
    """
    blocks: list[tuple[bool, list[float]]] = []
    for seconds, kind in list(zip(step_s, kinds, strict=False))[settling:]:
        if not blocks or blocks[-1][0] != kind:
            blocks.append((kind, []))
        blocks[-1][1].append(seconds)
    by_kind = {
        wanted: [times for kind, times in blocks if kind is wanted] for wanted in (True, False)
    }

    def of_means(drawn: dict[bool, list[list[float]]]) -> float:
        means = {
            kind: statistics.fmean(time for times in drawn[kind] for time in times)
            for kind in drawn
        }
        return means[True] / means[False]

    source = random.Random(0)
    draws = sorted(
        of_means({kind: source.choices(each, k=len(each)) for kind, each in by_kind.items()})
        for _ in range(DRAWS)
    )
    medians = {
        kind: statistics.median(time for times in each for time in times)
        for kind, each in by_kind.items()
    }
    return {
        "ratio_of_means": of_means(by_kind),
        "low": draws[int(0.025 * DRAWS)],
        "high": draws[int(0.975 * DRAWS)],
        "ratio_of_medians": medians[True] / medians[False],
        "median_step_s": medians[False],
    }
