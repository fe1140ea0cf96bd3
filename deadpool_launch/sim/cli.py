"""``python -m deadpool_launch.sim``: many seeds, one seed with its trace, or the growth table."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from deadpool_launch.entry import run_command
from deadpool_launch.errors import UsageError
from deadpool_launch.sim import scale
from deadpool_launch.sim.cluster import Outcome, simulate
from deadpool_launch.sim.faults import check_targets, faults_text, read_faults
from deadpool_launch.sim.scenario import Scenario, random_scenario
from deadpool_launch.sim.shrink import only, shrink
from deadpool_launch.sim.values import LayoutKind

PROGRAM = "python -m deadpool_launch.sim"
#: So many seeds that break a promise are told of; the others are only counted.
TOLD = 5


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 90})
@click.option("--seeds", default="0:1000", metavar="FROM:TO", help="Seeds, or a single one.")
@click.option("--nodes", type=click.IntRange(1), help="Active nodes, instead of the seed's.")
@click.option("--spares", type=click.IntRange(0), help="Spares, instead of the seed's.")
@click.option("--nproc", type=click.IntRange(1), help="Ranks on a node, instead of the seed's.")
@click.option(
    "--fault",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A list of faults as JSON, instead of the seed's.",
)
@click.option(
    "--only", "places", metavar="N,N,...", help="Of the faults those at these places; 'none'."
)
@click.option("--trace", is_flag=True, help="Show all that happens.")
@click.option(
    "--layout",
    type=click.Choice([kind.value for kind in LayoutKind]),
    default=LayoutKind.HSDP.value,
    help="What the ranks of --scale have in common.",
)
@click.option("--scale", "size", metavar="NODESxNPROC", help="Show the growth up to this size.")
def command(
    seeds: str,
    nodes: int | None,
    spares: int | None,
    nproc: int | None,
    fault: Path | None,
    places: str | None,
    trace: bool,
    size: str | None,
    layout: str,
) -> int:
    """Strike simulated jobs with faults and see whether every promise is kept."""
    if size is not None:
        _scale(*_size(size), LayoutKind(layout))
        return 0
    faults = None if fault is None else read_faults(fault)
    sizes = {"nodes": nodes, "spares": spares, "nproc_per_node": nproc}

    def scenario_of(seed: int) -> Scenario:
        scenario = random_scenario(seed, **sizes)
        if faults is not None:
            config = scenario.config
            check_targets(faults, config.nodes, config.world_size)
            scenario = scenario.with_faults(faults)
        return scenario if places is None else only(scenario, _places(places, scenario))

    same = "".join(f" --{name} {value}" for name, value in _given(nodes, spares, nproc, fault))
    return _search([scenario_of(seed) for seed in _seeds(seeds)], trace, same, places)


def _given(
    nodes: int | None, spares: int | None, nproc: int | None, fault: Path | None
) -> list[tuple[str, object]]:
    options = {"nodes": nodes, "spares": spares, "nproc": nproc, "fault": fault}
    return [(name, value) for name, value in options.items() if value is not None]


def _search(scenarios: Sequence[Scenario], trace: bool, same: str, places: str | None) -> int:
    """Run them all; returns the exit code."""
    began_at = time.perf_counter()
    counts: Counter[str] = Counter()
    events = incidents = 0
    broken: list[Outcome] = []
    for scenario in scenarios:
        outcome = simulate(scenario, trace=trace)
        counts[outcome.verdict] += 1
        events += outcome.events
        incidents += outcome.incidents
        if trace:
            _show_trace(outcome)
        if outcome.broken:
            broken.append(outcome)
    took_s = time.perf_counter() - began_at
    number = len(scenarios)
    click.echo(
        f"{number} runs in {took_s:.1f} s ({number / took_s:.0f} a second), {events} events, "
        f"{incidents} incidents"
    )
    for verdict, count in counts.most_common():
        click.echo(f"  {verdict:<18} {count}")
    for outcome in broken[:TOLD]:
        _tell_broken(outcome, same, places)
    return 1 if broken else 0


def _show_trace(outcome: Outcome) -> None:
    scenario = outcome.scenario
    config = scenario.config
    click.echo(
        f"seed {scenario.seed}: {len(config.active)} nodes, {len(config.spares)} spares "
        f"({config.spare_start}), {config.nproc_per_node} ranks a node, {scenario.layout}, "
        f"checkpoint every {scenario.checkpoint_every}, "
        f"{'with' if scenario.attaches else 'without'} the runtime"
    )
    for fault in scenario.faults:
        click.echo(f"  fault: {fault}")
    for line in outcome.trace:
        click.echo(line)


def _tell_broken(outcome: Outcome, same: str, places: str | None) -> None:
    """What was broken, how to see it again, and the faults that are enough for it."""
    scenario = outcome.scenario
    click.echo(f"seed {scenario.seed}: {outcome.broken}")
    if places is not None:
        return
    enough = shrink(scenario)
    chosen = ",".join(map(str, enough)) or "none"
    fewer = f" --only {chosen}" if len(enough) < len(scenario.faults) else ""
    click.echo(f"  replay: {PROGRAM} --seeds {scenario.seed}{same}{fewer} --trace")
    click.echo(f"  faults: {faults_text(only(scenario, enough).faults)}")


def _scale(nodes: int, nproc: int, layout: LayoutKind) -> None:
    click.echo(scale.HEADER)
    for size in sorted({*(size for size in scale.SIZES if size < nodes), nodes}):
        click.echo(scale.row(scale.measure(size, nproc, layout)))


# ---------------------------------------------------------------- what was given


def _seeds(text: str) -> range:
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if found is None:
        raise UsageError(f"--seeds {text}: not of the form FROM:TO, such as 0:1000, nor a number")
    first = int(found[1])
    last = int(found[2]) if found[2] else first + 1
    if last <= first:
        raise UsageError(f"--seeds {text}: TO must be larger than FROM")
    return range(first, last)


def _size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if found is None or int(found[1]) < 2 or int(found[2]) < 1:
        raise UsageError(
            f"--scale {text}: not of the form NODESxNPROC, such as 4096x4, with at least 2 nodes"
        )
    return int(found[1]), int(found[2])


def _places(text: str, scenario: Scenario) -> list[int]:
    words = [] if text == "none" else text.split(",")
    count = len(scenario.faults)
    if not all(word.isdecimal() and int(word) < count for word in words):
        raise UsageError(
            f"--only {text}: seed {scenario.seed} has {count} faults; give places from 0, such as "
            "0,2, or none"
        )
    return [int(word) for word in words]


def main() -> None:
    """Entry point."""
    sys.exit(run_command(command, sys.argv[1:], PROGRAM))
