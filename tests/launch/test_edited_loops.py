"""The recipe for a loop that is there to be edited, in a loop of Megatron-LM's shape: see
docs/recipes.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from local_run import explain, final_state, records, run

pytestmark = pytest.mark.matrix

SCRIPT = Path(__file__).parents[1] / "scripts" / "megatron_loop.py"


def trained(run_dir: Path, *options: object) -> tuple[Any, Any]:
    """The ranks' final state, and what they told."""
    done = run(run_dir, "--nodes", 2, "--spares", 1, *options, script=SCRIPT)
    assert done.returncode == 0, explain(done, run_dir)
    told = [
        json.loads(line.removeprefix("TOLD "))
        for path in (run_dir / "logs").glob("rank-*.log")
        for line in path.read_text().splitlines()
        if line.startswith("TOLD ")
    ]
    return final_state(run_dir), sorted(told, key=lambda each: int(each["rank"]))


@pytest.mark.parametrize("fault", ["power-off:1@4", "kill:0@5"])
def test_loop_of_megatrons_shape_goes_on_with_the_same_numbers(fault: str, tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole")
    lost = trained(tmp_path / "lost", "--fault", fault)
    assert [each["verdict"] for each in records(tmp_path / "lost", "incident", phase="closed")] == [
        "continued"
    ]
    assert [each["args"]["consumed_train_samples"] for each in lost[1]] == [64, 64]
    assert lost == whole
