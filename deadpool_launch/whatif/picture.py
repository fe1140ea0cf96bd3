"""Where the time goes under each strategy, as a PNG. Needs matplotlib (the extra ``plot``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deadpool_launch import plot
from deadpool_launch.whatif.estimate import Estimate
from deadpool_launch.whatif.job import Job

_HOUR_S = 3600.0
_PARTS = (
    ("useful_s", "training that stayed", "#08306b"),
    ("overhead_s", "protection in a step", "#6baed6"),
    ("saving_s", "saving", "#9ecae1"),
    ("slow_s", "fewer nodes", "#c7e9c0"),
    ("lost_s", "done again", "#fdae6b"),
    ("recovering_s", "recovering", "#cb181d"),
    ("queued_s", "waiting for nodes", "#bdbdbd"),
)


def draw(estimates: Sequence[Estimate], job: Job, path: Path) -> None:
    """Write the picture: on the left mean hours by what they went to, on the right goodput."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.8 + 0.6 * len(estimates)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"{job.steps:,} steps of {job.step_s:g} s on {job.nodes} nodes with {job.spares} spares",
        fontsize=12,
    )
    hours, goodput = figure.subplots(1, 2, width_ratios=[3, 2], sharey=True)
    titles = [each.strategy.title for each in estimates]
    begins = [0.0] * len(titles)
    for name, label, color in _PARTS:
        widths = [each.mean(name).value / _HOUR_S for each in estimates]
        if any(widths):
            hours.barh(titles, widths, left=begins, color=color, label=label)
        begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
    totals = [each.mean("total_s") for each in estimates]
    hours.errorbar(
        [each.value / _HOUR_S for each in totals],
        titles,
        xerr=[each.half / _HOUR_S for each in totals],
        fmt="none",
        ecolor="black",
        capsize=3,
    )
    hours.set_xlabel("hours to the last step, mean and 95 % interval")
    hours.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=4)
    hours.invert_yaxis()
    means = [each.mean("goodput") for each in estimates]
    goodput.errorbar(
        [100 * each.value for each in means],
        titles,
        xerr=[100 * each.half for each in means],
        fmt="o",
        color="#08306b",
        capsize=3,
    )
    goodput.set_xlabel("goodput, %")
    goodput.grid(alpha=0.3)
    plot.save(figure, path)
