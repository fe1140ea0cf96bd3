"""The measurement on a GPU is rarely run, so its code is, on the CPU with a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu_overhead.py"


def _run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *args],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )


def test_every_figure_is_there() -> None:
    done = _run("--smoke")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["low"] <= figures["ratio_of_means"] <= figures["high"]
    assert figures["steps_of_each_kind"] == 8
    # The states before the first four steps, before each protected step, and after the last one.
    assert figures["copies_sealed"] == 4 + 8 + 1
    assert figures["unprotected_steps"] == 0
    # Three float32 numbers for each parameter; AdamW counts its steps as well.
    assert figures["state_nbytes"] >= 12 * figures["parameters"]
    assert figures["arena_nbytes"] >= 3 * figures["state_nbytes"]
    for name in ("plain_one_tensor_gb_per_s", "plain_same_tensors_gb_per_s", "begin_ms"):
        assert figures[name]


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure for minutes")
def test_without_a_gpu_it_says_so() -> None:
    done = _run()
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "There is no GPU" in done.stderr
    assert done.stdout == ""
