"""Estimates in words and tables of 80 columns, and for programs. Pure."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from deadpool_launch.controller.wording import plural
from deadpool_launch.policy.kinds import show_duration
from deadpool_launch.whatif.estimate import GIVE_UP_AFTER, Estimate, Mean
from deadpool_launch.whatif.job import Job
from deadpool_launch.whatif.strategies import MEANING, Strategy

WIDTH = 80
_TITLE = 24
_HOUR_S = 3600.0
#: Columns of the first table: heading, its second line, the number and what it is divided by.
_RESULTS = (
    ("time", "hours", "total_s", _HOUR_S, 12),
    ("goodput", "%", "goodput", 0.01, 11),
    ("recovery", "hours", "recovery_s", _HOUR_S, 11),
    ("wasted", "node-hours", "wasted_node_s", _HOUR_S, 12),
    ("spares", "gone", "spares_gone", 1.0, 10),
)
#: Columns of the second one.
_PARTS = (
    ("step+", "overhead_s"),
    ("saving", "saving_s"),
    ("slow", "slow_s"),
    ("lost", "lost_s"),
    ("recover", "recovering_s"),
    ("queue", "queued_s"),
)


def number(value: float) -> str:
    """Three or four digits that count, without an exponent below a million."""
    size = abs(value)
    if size >= 1e6:
        return f"{value:.3g}"
    return f"{value:.{0 if size >= 1000 else 1 if size >= 100 else 2}f}"


def interval(found: Mean, unit: float = 1.0) -> str:
    """``12.30±0.41``, in units of ``unit``: two digits of the interval, two decimals at most."""
    value, half = found.value / unit, found.half / unit
    if not half:
        return number(value)
    if value >= 1e6:
        return f"{value:.3g}±{half:.1g}"
    digits = min(2, max(0, 1 - math.floor(math.log10(half))))
    return f"{value:.{digits}f}±{half:.{digits}f}"


def hours(seconds: float) -> str:
    """A long time in hours."""
    return f"{number(seconds / _HOUR_S)}h"


def share(value: float) -> str:
    """A share in percent."""
    return f"{100 * value:.4g} %"


def wrap(text: str, indent: str = "  ") -> list[str]:
    """The text in lines of the report's width."""
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [""]


def headline(job: Job, seeds: int, first: int) -> list[str]:
    """What was simulated."""
    text = (
        f"{job.steps:,} steps of {job.step_s:g} s on {plural(job.nodes, 'node')}, "
        f"{plural(job.spares, 'spare')}: {number(job.undisturbed_s / _HOUR_S)} hours undisturbed; "
        f"{plural(seeds, 'run')} from seed {first}, mean and 95 % interval"
    )
    return wrap(text)


def tables(job: Job, estimates: Sequence[Estimate], seeds: Sequence[int]) -> list[str]:
    """All that the runs come to."""
    return [
        *headline(job, len(seeds), seeds[0]),
        "",
        *results(estimates),
        "",
        *parts(estimates),
        "",
        *wrap(_LEGEND),
    ]


_LEGEND = (
    "recovery: recovering and work done again (lost). step+: protection in the steps. slow: nodes "
    "that were missing. a fault: recovery for each fault. wasted: node-hours of the allocation, "
    "spares included, that were not training that stayed. spares gone: used, or failed waiting."
)


def results(estimates: Sequence[Estimate]) -> list[str]:
    """The first table: what it comes to."""
    first = "".join(f"{heading:>{width}}" for heading, _, _, _, width in _RESULTS)
    second = "".join(f"{unit:>{width}}" for _, unit, _, _, width in _RESULTS)
    lines = [f"{'':<{_TITLE}}{first}", f"{'':<{_TITLE}}{second}"]
    for each in estimates:
        cells = (
            f"{interval(each.mean(name), unit):>{width}}" for _, _, name, unit, width in _RESULTS
        )
        lines.append(f"{each.strategy.title:<{_TITLE}}{''.join(cells)}")
    for each in estimates:
        if each.unfinished:
            lines += wrap(
                f"{each.strategy.title}: {plural(each.unfinished, 'run')} of {len(each.accounts)} "
                f"given up after {GIVE_UP_AFTER:g} times the undisturbed time"
            )
    return lines


def parts(estimates: Sequence[Estimate]) -> list[str]:
    """The second table: where the time went that was not training."""
    headings = "".join(f"{heading:>8}" for heading, _ in _PARTS)
    lines = [f"{'mean hours':<{_TITLE}}{headings}{'a fault':>8}"]
    for each in estimates:
        cells = "".join(f"{number(each.mean(name).value / _HOUR_S):>8}" for _, name in _PARTS)
        faults = each.mean("faults").value
        a_fault = each.mean("recovery_s").value / faults if faults else 0.0
        lines.append(f"{each.strategy.title:<{_TITLE}}{cells}{number(a_fault) + 's':>8}")
    return lines


def sources(strategies: Iterable[Strategy], saves: Mapping[str, float]) -> list[str]:
    """Every figure of every strategy with where it is from. ``saves``: seconds between durable
    checkpoints by strategy, for those that work them out."""
    lines = []
    for strategy in strategies:
        lines.append(f"{strategy.name}:")
        told: dict[str, list[str]] = {}
        for key, figure in strategy.figures.items():
            value = saves.get(strategy.name) if key == "save-every" else figure.value
            if value is None or (key in ("copy", "replicate") and not value):
                continue
            told.setdefault(figure.source, []).append(f"{key} {shown(key, value)}")
        for source, figures in told.items():
            lines += wrap(f"  {', '.join(figures)}: {source}", "      ")
    return lines


def shown(key: str, value: float) -> str:
    """A figure with its unit."""
    unit, _ = MEANING[key]
    match unit:
        case "share":
            return share(value)
        case "steps" | "nodes":
            return plural(round(value), unit.removesuffix("s"))
        case _:
            return show_duration(float(f"{value:.4g}"))


def as_json(estimates: Sequence[Estimate]) -> list[dict[str, Any]]:
    """The same for programs, with every number of the accounts."""
    found = []
    for each in estimates:
        names = each.accounts[0].as_dict()
        means = {name: each.mean(name) for name in names}
        found.append(
            {
                "strategy": each.strategy.name,
                "title": each.strategy.title,
                "save_every_s": each.save_every_s,
                "unfinished": each.unfinished,
                "figures": {
                    key: {"value": figure.value, "source": figure.source}
                    for key, figure in each.strategy.figures.items()
                },
                "means": {name: as_interval(mean) for name, mean in means.items()},
            }
        )
    return found


def as_interval(found: Mean) -> dict[str, float]:
    """A mean for programs."""
    return {"mean": found.value, "low": found.low, "high": found.high}


def job_json(job: Job) -> dict[str, Any]:
    """The job for programs."""
    return {**asdict(job), "undisturbed_s": job.undisturbed_s}
