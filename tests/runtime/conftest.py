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
LAYOUT = TRAIN.with_name("layout.py")
SUPPORT = Path(__file__).parents[1] / "support"


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


@pytest.fixture(scope="session")
def parked_with_layouts() -> Iterator[ParkedProcess]:
    """One that has the layouts imported, which takes longer than all the rest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(SUPPORT))
        patch.setenv("DEADPOOL_PRELOAD", "parallel_layouts")
        process = ParkedProcess()
    with process:
        yield process


@pytest.fixture(scope="session")
def run_layout(
    parked_with_layouts: ParkedProcess, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """Run scripts/layout.py on the ranks that the layout needs; returns the launcher's view and
    what must not differ. ``kind``: the launcher's class, which gets the other keyword arguments."""

    def run(
        layout: str,
        *args: str,
        kind: type[FakeLauncher] = FakeLauncher,
        deadline_s: float = 200.0,
        **launcher: Any,
    ) -> tuple[Outcome, Any]:
        import parallel_layouts

        size, _ = parallel_layouts.LAYOUTS[layout]
        directory = tmp_path_factory.mktemp("layout")
        outcome = kind(
            parked_with_layouts,
            str(LAYOUT),
            [str(directory), layout, *args],
            world_size=size,
            run_dir=directory,
            deadline_s=deadline_s,
            **launcher,
        ).run()
        losses = {r: json.loads((directory / f"{r}.json").read_text()) for r in range(size)}
        return outcome, ({r: outcome.final[r].parts for r in range(size)}, losses)

    return run


@pytest.fixture(scope="session")
def undisturbed_layout(run_layout: Callable[..., Any]) -> Callable[..., Any]:
    """The same without any loss; each combination of arguments is run once."""
    known: dict[tuple[str, ...], Any] = {}

    def run(*args: str) -> Any:
        if args not in known:
            outcome, numbers = run_layout(*args)
            assert outcome.plans == []
            known[args] = numbers
        return known[args]

    return run


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launcher:
    return install(monkeypatch, tmp_path)


@pytest.fixture
def expected(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> list[Any]:
    """The weights after a run in which nothing happens."""
    install(monkeypatch, tmp_path_factory.mktemp("arena"))
    training = Training()
    for step, batch in training.job.steps(BATCHES):
        with step:
            training(batch)
    return training.weights()
