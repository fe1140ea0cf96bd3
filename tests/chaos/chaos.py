"""Brings every fault about on a real Slurm cluster, compares bits, and writes the table.

    python tests/chaos/chaos.py [--case NAME ...] [--list] [--keep DIR]

Writes ``docs/reliability.json`` and, from it, ``docs/reliability.md``. Needs root, as the mini
cluster does. Exit code 1: something was not as a case expects it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for folder in ("chaos", "cluster", "support"):
    sys.path.insert(0, str(ROOT / "tests" / folder))

import chaos_table  # noqa: E402
import chaos_trial  # noqa: E402
from chaos_case import Case  # noqa: E402
from chaos_cases import CASES  # noqa: E402
from chaos_judge import deviations  # noqa: E402
from chaos_machine import end_in_order, own_mounts, small_disk  # noqa: E402
from chaos_outcome import Digests  # noqa: E402
from mini_cluster import MiniCluster  # noqa: E402

NODES = 5
#: No case runs longer than this.
REFERENCE_STEPS = 400
SMALL_NBYTES = 4 << 20
TIMEOUTS = "3 s without a heartbeat, 8 s of a hanging step"
JSON, PAGE = ROOT / "docs" / "reliability.json", ROOT / "docs" / "reliability.md"


def run_case(
    cluster: MiniCluster, case: Case, expected: Digests, small: Path, keep: Path
) -> dict[str, Any]:
    """Run one case; its entry in the results."""
    began_at = time.monotonic()

    def filled(text: str) -> str:
        return text.replace("@base@", str(cluster.base)).replace("@name@", case.name)

    for name, text in case.files.items():
        (cluster.base / filled(name)).write_text(filled(text))
    trial = chaos_trial.start(
        cluster,
        orders=case.orders,
        nodes=case.nodes,
        launch=[filled(option) for option in case.launch],
        script_args=[
            *(f"--layout={case.layout}", f"--steps={case.steps}", f"--step-s={case.step_s}")
        ],
        sbatch=case.sbatch,
        runs=small if case.small_disk else None,
    )
    problem = ""
    try:
        trial.wait_ranks()
        case.act(trial)
    except (chaos_trial.Hang, AssertionError, RuntimeError, OSError) as error:
        problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    outcome = trial.outcome(expected, case.end_s)
    trial.undo.close()
    cluster.reset()
    outcome = replace(outcome, left=chaos_trial.left_behind(cluster))
    wrong = ([problem] if problem else []) + deviations(case.expect, outcome)
    if wrong:
        print(f"  kept: {trial.keep(keep, case.name)}")
    return {
        "name": case.name,
        "fault": case.fault,
        "how": case.how,
        "told": trial.told,
        "outcome": outcome.as_json(),
        "took_s": round(time.monotonic() - began_at, 1),
        "deviations": wrong,
    }


def chosen(names: Sequence[str]) -> list[Case]:
    """The cases with one of these texts in their names, in this order; all without any."""
    matching = {case.name: case for name in names or [""] for case in CASES if name in case.name}
    found = list(matching.values())
    if not found:
        raise SystemExit(f"no case is named like {', '.join(names)}; --list shows them")
    return found


def run(cases: Sequence[Case], keep: Path, before: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run the cases one after another on one cluster; the table is written after each, with what
    was there ``before``.
    """
    end_in_order()
    own_mounts()
    results = []
    expected: dict[str, Digests] = {}
    with small_disk(SMALL_NBYTES) as small, MiniCluster(NODES, visible=[small]) as cluster:
        for case in cases:
            cluster.reset()
            cluster.sweep()
            if case.layout not in expected:
                expected[case.layout] = chaos_trial.undisturbed(
                    cluster, case.layout, REFERENCE_STEPS
                )
                cluster.reset()
            result = run_case(cluster, case, expected[case.layout], small, keep)
            results.append(result)
            write(merged(before, results))
            word = "; ".join(result["deviations"]) or "as expected"
            print(f"{case.name}: {word} ({result['took_s']:g} s)", flush=True)
    return results


def merged(before: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The file's content with these results in it, in the order of the cases."""
    by_name = {case["name"]: case for case in [*before.get("cases", ()), *results]}
    return {
        "command": "make chaos",
        "nodes": NODES,
        "cpus": os.cpu_count(),
        "timeouts": TIMEOUTS,
        "cases": [by_name[case.name] for case in CASES if case.name in by_name],
    }


def write(content: Mapping[str, Any]) -> None:
    """Write the results and the page that is made from them."""
    JSON.write_text(json.dumps(content, indent=1) + "\n")
    PAGE.write_text(chaos_table.page(content))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", action="append", default=[], help="a part of a case's name")
    parser.add_argument("--list", action="store_true", help="show the cases, run nothing")
    parser.add_argument("--keep", type=Path, help="where runs that went wrong are copied to")
    options = parser.parse_args()
    cases = chosen(options.case)
    if options.list:
        for case in cases:
            print(f"{case.name:28}{case.fault}: {case.how}")
        return
    keep = options.keep or Path(tempfile.gettempdir()) / "deadpool-chaos-kept"
    began_at = time.monotonic()
    before = json.loads(JSON.read_text()) if options.case and JSON.exists() else {}
    results = run(cases, keep, before)
    wrong = [case for case in results if case["deviations"]]
    took_s = time.monotonic() - began_at
    print(f"{len(results)} cases in {took_s:.0f} s, {len(wrong)} not as expected")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
