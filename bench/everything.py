"""``make bench``: every measurement of ``docs/evaluation.md``, one by one, then pictures and page.

Needs root, matplotlib, and a machine with nothing else to do. ``--out`` keeps a second set of
results elsewhere, for ``compare.py``; pictures and page are then left as they are. ``--quick`` runs
every part as small as it can be, to see that it works: its figures say nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import records

_BENCH = Path(__file__).parent
PAGE = records.ROOT / "docs" / "evaluation.md"


@dataclass(frozen=True)
class Part:
    """One program and what it is told."""

    name: str
    words: tuple[str, ...]
    #: About how long it takes on two quiet cores.
    minutes: float
    quick: tuple[str, ...]

    def command(self, folder: Path, *, quick: bool) -> list[str]:
        """As it is started; its results go into the folder."""
        program, *given = self.words
        words = [*given, *self.quick] if quick else given
        out = folder / f"{Path(program).stem}.json"
        return [sys.executable, str(_BENCH / program), *words, "--out", str(out)]


PARTS = (
    Part("paper", ("paper.py",), 1, ("--seeds", "20")),
    Part("rebuild", ("rebuild.py",), 2, ("--rebuilds", "1", "--case", "2 ranks")),
    Part(
        "scale",
        ("scale.py",),
        6,
        ("--agents", "64", "--simulated", "256", "--steady", "1"),
    ),
    Part(
        "recovery",
        ("recovery.py", "--runs", "5"),
        32,
        ("--runs", "1", "--missed", "60", "--case", ": power-off"),
    ),
    Part(
        "layouts",
        ("overhead.py", "--set", "layouts", "--block", "3", "--rounds", "2"),
        10,
        ("--block", "1", "--rounds", "1", "--case", "2 nodes"),
    ),
    Part(
        "sizes",
        ("overhead.py", "--set", "sizes", "--block", "5", "--rounds", "2"),
        9,
        ("--block", "1", "--rounds", "1", "--case", "64 tokens"),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=records.RESULTS)
    parser.add_argument("--only", choices=[part.name for part in PARTS], action="append")
    parser.add_argument("--quick", action="store_true", help="as small as can be")
    options = parser.parse_args()
    if options.quick and options.out == records.RESULTS:
        parser.error("--quick: needs --out; its figures are not for bench/results")
    parts = [part for part in PARTS if not options.only or part.name in options.only]
    print(f"about {sum(part.minutes for part in parts):.0f} minutes in all", flush=True)
    taken: dict[str, float] = {}
    for part in parts:
        print(f"\n{part.name}: about {part.minutes:g} minutes", flush=True)
        begun = time.monotonic()
        subprocess.run(part.command(options.out, quick=options.quick), check=True)
        taken[part.name] = round(time.monotonic() - begun, 1)
        print(f"{part.name}: {taken[part.name] / 60:.1f} minutes", flush=True)
    print(f"\n{sum(taken.values()) / 60:.1f} minutes in all")
    if options.out != records.RESULTS:
        return
    subprocess.run([sys.executable, str(_BENCH / "pictures.py")], check=True)
    page = [sys.executable, str(_BENCH / "evaluation.py")]
    PAGE.write_text(subprocess.run(page, check=True, capture_output=True, text=True).stdout)
    print(PAGE)


if __name__ == "__main__":
    main()
