"""A rank that is slower than its peers is named; what only a busy machine slows down is not."""

from __future__ import annotations

import json
from pathlib import Path

import local_run
import pytest
from local_run import explain, final_state, records

STEPS = 40
SIZE = ("--nodes", 2, "--agent-start-timeout", 180)


def job(folder: Path, *options: object, **policy: object) -> tuple[str, Path]:
    """Two ranks, the second of which takes 0.1 s more for each step; returns what was printed."""
    path = folder / "policy.yaml"
    path.write_text(json.dumps({f"straggler.{name}": value for name, value in policy.items()}))
    run_dir = folder / "run"
    slow = ("--", "--steps", STEPS, "--slow", "1:0.1")
    options = (*SIZE, "--policy", path, *options, *slow)
    done = local_run.run(run_dir, *options)
    assert done.returncode == 0, explain(done, run_dir)
    return done.stdout, run_dir


def test_slow_rank_is_named_once(tmp_path: Path) -> None:
    said, run_dir = job(tmp_path, window="0.5s", windows=2)
    assert said.count("rank 1 on local2 computes for ") == 1, said
    assert "rank 0 on" not in said
    assert not records(run_dir, "incident")


@pytest.mark.matrix
def test_slow_rank_is_swapped_if_the_policy_says_so(tmp_path: Path) -> None:
    said, run_dir = job(tmp_path, "--spares", 1, window="0.5s", windows=2, action="swap")
    assert "rank 1 on local2 computes for " in said
    assert "local3 takes rank 1, epoch 2" in said
    (closed,) = records(run_dir, "incident", phase="closed")
    assert closed["verdict"] == "continued"
    quiet = tmp_path / "quiet"
    done = local_run.run(quiet, *SIZE, "--", "--steps", STEPS)
    assert final_state(run_dir) == final_state(quiet), explain(done, quiet)
