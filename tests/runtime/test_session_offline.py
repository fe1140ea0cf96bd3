"""The same script without a launcher: nothing is added, and the numbers are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deadpool_runtime import attach
from deadpool_runtime.errors import Misuse

TRAIN = Path(__file__).with_name("scripts") / "train.py"
ROOT = Path(__file__).resolve().parents[2]


def run(command: list[str]) -> None:
    environment = dict(os.environ, PYTHONPATH=str(ROOT / "runtime"), OMP_NUM_THREADS="1")
    environment.pop("RANK", None)
    environment.pop("WORLD_SIZE", None)
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_plain_python_gives_the_numbers_of_a_watched_run(
    tmp_path: Path, undisturbed: Callable[..., Any]
) -> None:
    run([sys.executable, str(TRAIN), str(tmp_path), "--max-steps", "20"])
    result = json.loads((tmp_path / "0.json").read_text())
    watched = undisturbed("--max-steps", "20", world_size=1).results[0]
    assert (result["hash"], result["seen"]) == (watched["hash"], watched["seen"])
    assert len(result["seen"]) == 4 * 20


def test_torchrun_gives_the_numbers_of_an_unwatched_loop(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run([*command, "--nproc-per-node", "2", str(TRAIN), str(tmp_path), "--epochs", "2"])
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    # Two passes over 30 samples a rank, shuffled anew each time.
    seen = [result["seen"] for result in results]
    for epoch in (slice(0, 30), slice(30, 60)):
        assert sorted(seen[0][epoch] + seen[1][epoch]) == list(range(60))
    assert seen[0][:30] != seen[0][30:]


def job() -> Any:
    model = nn.Linear(2, 2)
    return attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_steps_are_numbered_from_one_and_epochs_default_to_one() -> None:
    seen = [(step.number, batch) for step, batch in job().steps(["a", "b"])]
    assert seen == [(1, "a"), (2, "b")]


def test_max_steps_goes_round_the_loader() -> None:
    seen = [batch for _, batch in job().steps(["a", "b"], max_steps=5)]
    assert seen == ["a", "b", "a", "b", "a"]


def test_an_exception_in_a_body_passes_through() -> None:
    def body() -> None:
        for step, _ in job().steps([1]):
            with step:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()


def test_steps_may_be_called_once() -> None:
    one = job()
    list(one.steps([1]))
    with pytest.raises(Misuse, match="epochs="):
        one.steps([1])


def test_both_limits_are_refused() -> None:
    with pytest.raises(Misuse, match="not both"):
        job().steps([1], max_steps=1, epochs=1)


def test_stop_makes_a_step_the_last() -> None:
    numbers = []
    for step, _ in job().steps([1], max_steps=9):
        with step:
            numbers.append(step.number)
            if step.number == 3:
                step.stop()
    assert numbers == [1, 2, 3]


def test_importing_the_package_does_not_import_torch() -> None:
    code = (
        "import sys, deadpool_runtime, deadpool_runtime.protocol; assert 'torch' not in sys.modules"
    )
    run([sys.executable, "-c", code])
