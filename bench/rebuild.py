"""How long living processes take to connect their communicators again, and where the time goes.

Real processes on this machine, each with a number of Gloo groups over all of them. They are cut off
and rebuilt in place several times, as in a recovery: the same ``GroupRegistry`` with its swap
mechanism, over a store that answers from another process. Every phase is timed on each rank; what
is kept is the slowest rank, since all wait for it.

Phases: ``abort`` breaks the old connections; ``store`` connects to the store of the new epoch;
``connect`` makes the new communicators (addresses through the store, then a connection to each
peer); ``place`` puts them under the groups, which ends the old ones and their threads; ``first`` is
one all-reduce on each group. ``made``, for comparison, is what torch took to make the same groups
in the first place.

``python bench/rebuild.py``; writes ``bench/results/rebuild.json``.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

# Everything is built as in a job that has the oldest torch: the mechanism is always the swap.
os.environ["DEADPOOL_GROUP_MECHANISM"] = "swap"

import records  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from crew import Crew  # noqa: E402

from deadpool_runtime.groups import mechanism, native  # noqa: E402
from deadpool_runtime.groups.registry import GroupRegistry  # noqa: E402

PHASES = ("abort", "store", "connect", "place", "first")
PATIENCE = timedelta(seconds=300)
#: Rebuilds that are left out at the start: pages and caches settle.
_SETTLING = 1


@dataclass(frozen=True)
class Case:
    """So many ranks with so many groups, each over all of them."""

    ranks: int
    groups: int

    @property
    def name(self) -> str:
        """As it is written down."""
        return f"{self.ranks} ranks, {self.groups} groups"


CASES = (
    *(Case(ranks, 4) for ranks in (2, 4, 8, 16)),
    *(Case(ranks, 1) for ranks in (2, 4, 8, 16)),
    *(Case(4, groups) for groups in (2, 8, 16, 32, 64)),
)


class Stopwatch:
    """Adds up the time of calls that are made through it."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its time counted for a phase."""

        def call(*arguments: Any, **options: Any) -> Any:
            begun = time.monotonic()
            try:
                return function(*arguments, **options)
            finally:
                self.spent[phase] = self.spent.get(phase, 0.0) + time.monotonic() - begun

        return call


def rank_body(
    rank: int, ranks: int, groups: int, rebuilds: int, crew: Crew
) -> tuple[float, list[dict[str, float]]]:
    """One rank: what making the groups took, and each rebuild's time by phase."""
    watch = Stopwatch()
    mechanism._CONNECTORS["gloo"] = watch.timed("connect", mechanism._CONNECTORS["gloo"])
    mechanism._place = watch.timed("place", mechanism._place)
    registry = GroupRegistry()
    registry.install(detached=False)
    meeting = crew.client()

    def meet(place: str) -> float:
        crew.meet(meeting, place, rank, ranks)
        return time.monotonic()

    begun = meet("made")
    store = dist.PrefixStore("first", registry.open_store("127.0.0.1", crew.port, PATIENCE))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=PATIENCE)
    every: list[Any] = [dist.group.WORLD]
    every += [dist.new_group(list(range(ranks))) for _ in range(groups - 1)]
    made_s = time.monotonic() - begun
    found = []
    for epoch in range(1, rebuilds + 1):
        for group in every:
            dist.all_reduce(torch.ones(1), group=group)
        watch.spent = {}
        begun = meet(f"epoch-{epoch}")
        watch.timed("abort", registry.abort)(epoch)
        new = watch.timed("store", registry.open_store)("127.0.0.1", crew.port, PATIENCE)
        registry.rebuild(epoch, new, PATIENCE)
        rebuilt = time.monotonic()
        for group in every:
            dist.all_reduce(torch.ones(1), group=group)
        ended = time.monotonic()
        found.append({**watch.spent, "first": ended - rebuilt, "all": ended - begun})
    meet("end")
    return made_s, found


def measure(case: Case, rebuilds: int) -> dict[str, Any]:
    """Run one case; times of the slowest rank."""
    crew = Crew()
    try:
        ranks = crew.run(case.ranks, rank_body, case.ranks, case.groups, rebuilds + _SETTLING, crew)
    finally:
        crew.close()
    return summary(case, [made for made, _ in ranks], [found[_SETTLING:] for _, found in ranks])


def summary(
    case: Case, made_s: Sequence[float], ranks: Sequence[Sequence[dict[str, float]]]
) -> dict[str, Any]:
    """The rank that took longest in each rebuild, and the median over rebuilds."""
    slowest = [max(same, key=lambda each: each["all"]) for same in zip(*ranks, strict=True)]
    times = sorted(each["all"] for each in slowest)
    total_s = statistics.median(times)
    return {
        "ranks": case.ranks,
        "groups": case.groups,
        "made_s": round(max(made_s), 4),
        "rebuilt_s": {
            "median": round(total_s, 4),
            "low": round(times[0], 4),
            "high": round(times[-1], 4),
        },
        "a_group_ms": round(1e3 * total_s / case.groups, 3),
        "phases_s": {
            phase: round(statistics.median(each.get(phase, 0.0) for each in slowest), 4)
            for phase in PHASES
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rebuilds", type=int, default=9, help="of each case")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--out", type=Path, default=records.RESULTS / "rebuild.json")
    options = parser.parse_args()
    native.ensure_built()
    torch.set_num_threads(1)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"{'':<24}{'made':>8}{'rebuilt':>9}" + "".join(f"{phase:>9}" for phase in PHASES))
    for case in CASES:
        if options.case not in case.name:
            continue
        result = measure(case, options.rebuilds)
        records.keep(
            options.out,
            f"python bench/rebuild.py --rebuilds {options.rebuilds}",
            {case.name: result},
        )
        print(
            f"{case.name:<24}{result['made_s']:>8.3f}{result['rebuilt_s']['median']:>9.3f}"
            + "".join(f"{result['phases_s'][phase]:>9.3f}" for phase in PHASES),
            flush=True,
        )


if __name__ == "__main__":
    main()
