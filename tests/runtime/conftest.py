"""Fixtures: real ranks, forked from one parked process, or a single rank in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from one_rank import BATCHES, Launcher, Training, install

from deadpool_runtime.testing import FakeLauncher, Outcome, ParkedProcess

TRAIN = Path(__file__).with_name("scripts") / "train.py"


@dataclass
class Run:
    """A finished job: the launcher's view of it, and what each rank wrote at its end."""

    outcome: Outcome
    results: dict[int, dict[str, Any]]
    directory: Path

    def numbers(self) -> dict[int, tuple[Any, ...]]:
        """Everything that must be the same in a run with losses and one without."""
        return {
            rank: (
                sorted(self.outcome.final[rank].parts.items()),
                result["hash"],
                result["seen"],
            )
            for rank, result in self.results.items()
        }


@pytest.fixture(scope="session")
def parked() -> Iterator[ParkedProcess]:
    with ParkedProcess() as process:
        yield process


@pytest.fixture(scope="session")
def train(parked: ParkedProcess, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Run scripts/train.py on three ranks (or ``world_size``); keyword arguments go to the
    launcher."""

    def run(*args: str, world_size: int = 3, **launcher: Any) -> Run:
        directory = tmp_path_factory.mktemp("job")
        outcome = FakeLauncher(
            parked,
            str(TRAIN),
            [str(directory), *args],
            world_size=world_size,
            run_dir=directory,
            **launcher,
        ).run()
        results = {
            rank: json.loads((directory / f"{rank}.json").read_text())
            for rank in range(world_size)
            if (directory / f"{rank}.json").exists()
        }
        return Run(outcome, results, directory)

    return run


@pytest.fixture(scope="session")
def undisturbed(train: Callable[..., Run]) -> Callable[..., Run]:
    """The same without any loss; each combination of arguments is run once."""
    known: dict[tuple[Any, ...], Run] = {}

    def run(*args: str, world_size: int = 3) -> Run:
        if (args, world_size) not in known:
            finished = train(*args, world_size=world_size)
            assert finished.outcome.plans == []
            assert sorted(finished.results) == list(range(world_size))
            known[args, world_size] = finished
        return known[args, world_size]

    return run


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    return install(monkeypatch)


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The weights after a run in which nothing happens."""
    install(monkeypatch)
    training = Training()
    for step, batch in training.job.steps(BATCHES):
        with step:
            training(batch)
    return training.weights()
