"""The pictures of ``docs/evaluation.md``, drawn from ``bench/results``. Needs matplotlib.

``python bench/pictures.py``; a picture whose figures are not there is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import records

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURES = records.ROOT / "docs" / "pictures"
_COLORS = ("#08306b", "#6baed6", "#fdae6b", "#cb181d", "#c7e9c0", "#9ecae1", "#bdbdbd")


def recovery(axes: Axes, results: Mapping[str, Any]) -> None:
    """Time lost by system, for each fault, with the range of the runs."""
    faults = ("power-off", "vanish", "kill", "cut", "kill-all")
    systems = list(dict.fromkeys(each["system"] for each in results.values()))
    for place, system in enumerate(systems):
        spans = {
            each["fault"]: each["summary"]["lost_s"]
            for each in results.values()
            if each["system"] == system
        }
        rows = [number for number, fault in enumerate(faults) if fault in spans]
        middles = [spans[faults[row]]["median"] for row in rows]
        axes.barh(
            [row + 0.8 * (place / len(systems) - 0.5) for row in rows],
            middles,
            height=0.8 / len(systems),
            align="edge",
            color=_COLORS[place],
            label=system,
            xerr=[
                [m - spans[faults[row]]["low"] for row, m in zip(rows, middles, strict=True)],
                [spans[faults[row]]["high"] - m for row, m in zip(rows, middles, strict=True)],
            ],
        )
    axes.set_yticks(range(len(faults)), faults)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("training time lost, seconds (median and range)")
    axes.legend(fontsize=8)


def layouts(axes: Axes, results: Mapping[str, Any]) -> None:
    """Step time to that of plain steps, by layout: copies, and checkpoints."""
    cases = {name: each for name, each in results.items() if "memory_low" in each}
    for place, (kind, label) in enumerate(
        (("", "copies"), ("memory_", "checkpoint to memory"), ("disk_", "checkpoint to disk"))
    ):
        means = [each[f"{kind}ratio_of_means"] for each in cases.values()]
        axes.errorbar(
            means,
            [number + 0.2 * (place - 1) for number in range(len(cases))],
            xerr=[
                [m - e[f"{kind}low"] for m, e in zip(means, cases.values(), strict=True)],
                [e[f"{kind}high"] - m for m, e in zip(means, cases.values(), strict=True)],
            ],
            fmt="o",
            color=("#08306b", "#fdae6b", "#cb181d")[place],
            label=label,
        )
    axes.set_yticks(range(len(cases)), list(cases))
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("step time, in plain steps (ratio of means and 95 % interval)")
    axes.legend(fontsize=8)


def rebuild(axes: Axes, results: Mapping[str, Any]) -> None:
    """Phases of rebuilding, by case."""
    begins = [0.0] * len(results)
    for place, phase in enumerate(next(iter(results.values()))["phases_s"]):
        widths = [1e3 * each["phases_s"][phase] for each in results.values()]
        axes.barh(list(results), widths, left=begins, color=_COLORS[place], label=phase)
        begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds (the slowest rank; median)")
    axes.legend(fontsize=8)


def scale(axes: Axes, results: Mapping[str, Any]) -> None:
    """From what the launcher had to know last to the last agent that has the order."""
    cases = sorted(
        (each for each in results.values() if "told_s" in each), key=lambda each: each["agents"]
    )
    for place, order in enumerate(cases[0]["told_s"]):
        axes.plot(
            [each["agents"] for each in cases],
            [each["told_s"][order] for each in cases],
            marker="o",
            color=_COLORS[place],
            label=order,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("agents")
    axes.set_ylabel("seconds to the last agent")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


#: Picture, from which results, title.
DRAWN: Mapping[str, tuple[Callable[[Any, Mapping[str, Any]], None], str]] = {
    "recovery": (recovery, "What a fault costs"),
    "overhead": (layouts, "What protection costs, on 1, 2 and 4 nodes of this machine"),
    "rebuild": (rebuild, "Where the time of rebuilding goes"),
    "scale": (scale, "Orders of an incident"),
}


def drawable(name: str, results: Mapping[str, Any]) -> bool:
    """Whether the results have what the picture shows."""
    return bool(results) and (
        name != "overhead" or any("memory_low" in each for each in results.values())
    )


def main() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=records.RESULTS)
    parser.add_argument("--out", type=Path, default=PICTURES)
    options = parser.parse_args()
    for name, (draw, title) in DRAWN.items():
        path = options.results / f"{name}.json"
        found = records.read(path)["results"] if path.exists() else {}
        if not drawable(name, found):
            continue
        figure = Figure(figsize=(9, 5.5), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title, fontsize=12)
        draw(figure.subplots(), found)
        figure.savefig(options.out / f"evaluation-{name}.png", format="png", dpi=100)
        print(options.out / f"evaluation-{name}.png")


if __name__ == "__main__":
    main()
