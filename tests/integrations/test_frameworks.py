"""Whole jobs of ``transformers.Trainer`` and ``lightning.Trainer`` on the local site: a node or a
process is lost in the middle, and nothing of the training is different for it.

They need the frameworks: ``make integrations``.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import local_run
import pytest
from local_run import explain, final_state, records

#: A process imports its framework for seconds, on a busy machine for minutes: a job takes as long.
JOB_S = 900
pytestmark = [pytest.mark.integrations, pytest.mark.timeout(3 * JOB_S)]

SCRIPTS = Path(__file__).parent / "scripts"
LAYOUT = ("--nodes", 2, "--spares", 1)


@dataclass(frozen=True)
class Ran:
    """A job that has ended. ``state``: digests by rank and part; ``told``: what each rank told."""

    state: dict[int, dict[str, str]]
    told: list[dict[str, Any]]
    incidents: list[dict[str, Any]]


@pytest.fixture(scope="module", params=["transformers", "lightning"])
def framework(request: pytest.FixtureRequest) -> str:
    """A framework that is installed."""
    name = str(request.param)
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    return name


def script_of(framework: str) -> Path:
    names = {"transformers": "trainer_job.py", "lightning": "lightning_job.py"}
    return SCRIPTS / names[framework]


def ran(framework: str, where: Path, *options: object, script: tuple[object, ...] = ()) -> Ran:
    run_dir = where / "run"
    words = (*LAYOUT, *options, "--", where / "output", *script)
    done = local_run.run(run_dir, *words, script=script_of(framework), timeout_s=JOB_S)
    assert done.returncode == 0, explain(done, run_dir)
    told = [
        json.loads(line.removeprefix("TOLD "))
        for path in (run_dir / "logs").glob("rank-*.log")
        for line in path.read_text().splitlines()
        if line.startswith("TOLD ")
    ]
    told.sort(key=lambda each: int(each["rank"]))
    assert [each["rank"] for each in told] == [0, 1], explain(done, run_dir)
    return Ran(final_state(run_dir), told, records(run_dir, "incident", phase="closed"))


@pytest.fixture(scope="module")
def undisturbed(framework: str, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return ran(framework, tmp_path_factory.mktemp("undisturbed"))


def without_clocks(state: dict[int, dict[str, str]]) -> dict[int, dict[str, str]]:
    """All but the digest of extras, among which is how long evaluations took."""
    return {
        rank: {part: digest for part, digest in parts.items() if part != "extras"}
        for rank, parts in state.items()
    }


@pytest.mark.parametrize(
    ("fault", "die"),
    [
        ("power-off:1@5", ""),
        ("power-off:0@9", ""),
        ("kill:0@1", ""),
        ("kill:1@3", ""),
        ("", "1:forward:3"),
        ("", "0:forward:7"),
        ("", "1:evaluate:8"),
        ("", "0:evaluate:8"),
    ],
)
def test_a_loss_changes_nothing(
    framework: str, undisturbed: Ran, tmp_path: Path, fault: str, die: str
) -> None:
    options = ("--fault", fault) if fault else ()
    lost = ran(framework, tmp_path, *options, script=("--die", die) if die else ())
    assert [each["verdict"] for each in lost.incidents] == ["continued"]
    assert lost.incidents[0]["replayed_steps"] <= 1
    assert without_clocks(lost.state) == without_clocks(undisturbed.state)
    assert lost.told == undisturbed.told


def test_another_kind_of_job_goes_on_too(framework: str, tmp_path: Path) -> None:
    option, fault = {
        "transformers": ("--language-model", "power-off:1@8"),
        # No validation before the second epoch: nothing of it is set up before training.
        "lightning": ("--late-validation", "power-off:1@10"),
    }[framework]
    whole = ran(framework, tmp_path / "whole", script=(option,))
    lost = ran(framework, tmp_path / "lost", "--fault", fault, script=(option,))
    assert [each["verdict"] for each in lost.incidents] == ["continued"]
    assert without_clocks(lost.state) == without_clocks(whole.state)
    assert lost.told == whole.told


def test_every_sample_is_used_once_in_an_epoch(undisturbed: Ran) -> None:
    ids = [each["ids"] for each in undisturbed.told]
    epochs = 3
    per_epoch = [len(each) // epochs for each in ids]
    for epoch in range(epochs):
        seen = {
            sample
            for each, length in zip(ids, per_epoch, strict=True)
            for sample in each[epoch * length : (epoch + 1) * length]
        }
        assert seen == set(range(43))


def test_without_a_launcher_the_framework_trains_by_itself(framework: str, tmp_path: Path) -> None:
    # An even number: the only process would get a batch of one, which no norm takes.
    command = [sys.executable, str(script_of(framework)), str(tmp_path), "--samples=44"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=JOB_S)
    assert done.returncode == 0, done.stderr
    assert "TOLD " in done.stdout


@pytest.mark.parametrize(
    ("framework", "option", "sentence"),
    [
        ("transformers", "--iterable", "IterableDataset"),
        ("lightning", "--manual", "The trainer uses manual optimization, which"),
        ("lightning", "--clock", "The trainer uses val_check_interval in time, which"),
    ],
    indirect=["framework"],
)
def test_what_cannot_be_brought_back_is_refused_with_a_sentence(
    framework: str, option: str, sentence: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    words = (*LAYOUT, "--", tmp_path / "output", option)
    done = local_run.run(run_dir, *words, script=script_of(framework), timeout_s=JOB_S)
    assert done.returncode != 0
    assert sentence in explain(done, run_dir)
