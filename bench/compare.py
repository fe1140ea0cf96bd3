"""Whether two sets of results agree: ``python bench/compare.py OLD NEW``, two folders.

A figure agrees if the two ranges, those of its runs or its 95 % intervals, overlap. Figures that
were taken once, such as those of ``scale.json``, agree within a factor of 1.5. Ends with 1 if
anything disagrees, and names it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import records

#: A figure's name, and the range in which it is.
Spread = tuple[str, float, float]
_ONCE = 1.5


def spreads(name: str, record: Mapping[str, Any]) -> Iterator[Spread]:
    """The figures of a file of results that are compared."""
    results: Mapping[str, Any] = record["results"]
    for case, found in results.items():
        match name:
            case "recovery":
                for key in ("lost_s", "new_step_s"):
                    span = found["summary"][key]
                    yield f"{case}: {key}", span["low"], span["high"]
            case "first_step":
                firsts = [run["first step"] for run in found["runs"]]
                yield case, min(firsts), max(firsts)
            case "overhead":
                yield case, found["low"], found["high"]
                for kind in ("memory", "disk"):
                    if f"{kind}_low" in found:
                        yield f"{case}: {kind}", found[f"{kind}_low"], found[f"{kind}_high"]
            case "rebuild":
                span = found["rebuilt_s"]
                yield case, span["low"], span["high"]
            case "scale":
                for key in ("start_s", "loss_to_resume_s", "incident_decisions_s"):
                    if key in found:
                        yield f"{case}: {key}", found[key] / _ONCE, found[key] * _ONCE


def disagreements(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """A sentence for each figure of both files whose ranges do not meet."""
    before = {figure: (low, high) for figure, low, high in spreads(name, old)}
    found = []
    for figure, low, high in spreads(name, new):
        if figure in before and (before[figure][1] < low or high < before[figure][0]):
            was_low, was_high = before[figure]
            found.append(
                f"{name}, {figure}: {low:.3g} to {high:.3g}, and {was_low:.3g} to {was_high:.3g} "
                "before"
            )
    return found


#: Files of results whose figures say how far they spread.
FILES = ("recovery", "first_step", "overhead", "rebuild", "scale")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    options = parser.parse_args()
    wrong, count = [], 0
    for name in FILES:
        paths = [folder / f"{name}.json" for folder in (options.old, options.new)]
        if all(path.exists() for path in paths):
            old, new = map(records.read, paths)
            wrong += disagreements(name, old, new)
            count += sum(1 for _ in spreads(name, new))
    for sentence in wrong:
        print(sentence)
    print(f"{count - len(wrong)} of {count} figures agree")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
