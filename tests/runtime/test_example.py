"""The example is one script that runs the same under plain Python and under torchrun."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
_PLAIN = [sys.executable]
_TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run"),
    *("--standalone", "--nproc-per-node", "2"),
]
_SMALL = ["--steps", "20", "--layers", "1", "--dim", "32", "--batch", "2"]


def _losses(command: list[str]) -> list[float]:
    """The losses that rank 0 prints at steps 10 and 20."""
    done = subprocess.run(
        [*command, str(EXAMPLE), *_SMALL],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.findall(r"^step (\d+): loss ([\d.]+)$", done.stdout, re.MULTILINE)
    assert [step for step, _ in said] == ["10", "20"], done.stdout
    return [float(loss) for _, loss in said]


@pytest.mark.parametrize("command", [_PLAIN, _TORCHRUN], ids=["python", "torchrun"])
def test_it_learns(command: list[str]) -> None:
    losses = _losses(command)
    # A model that knows nothing of bytes has ln(256).
    assert losses[0] < math.log(256)
    assert losses[1] < losses[0]


def test_fault_tolerance_takes_three_marked_lines() -> None:
    source = EXAMPLE.read_text(encoding="utf-8")
    assert re.findall(r"# DEADPOOL (\d):", source) == ["1", "2", "3"]
    assert len(source.splitlines()) <= 200
