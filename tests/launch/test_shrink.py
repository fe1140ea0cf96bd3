"""No spare is left: the job goes on with the replicas that are whole, and gets them back later."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import local_run
import pytest
import torch
from local_run import explain, records

from deadpool_launch.controller.driver import JobDriver
from deadpool_runtime.protocol import StepDone

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_replicas.py"


def state(run_dir: Path, step: int, rank: int) -> dict[str, torch.Tensor]:
    parts: dict[str, torch.Tensor] = torch.load(run_dir / f"state-{step}-{rank}.pt")["parts"]
    return parts


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def test_progress_is_told_by_the_first_rank_that_takes_part() -> None:
    """Rank 0 may be set aside."""
    said: list[str] = []
    driver: Any = SimpleNamespace(
        _clock=lambda: 100.0,
        _progress_at=99.0,
        _state=SimpleNamespace(present=lambda: [SimpleNamespace(rank=rank) for rank in (1, 2)]),
        _journal=SimpleNamespace(say=said.append),
    )
    for rank in (2, 1, 1):
        JobDriver._tell_progress(driver, rank, StepDone(2, 40 + rank, 0.5, 0.0, None, 0))
    assert said == ["step 41, 0.5 s a step"]


@pytest.mark.parametrize(
    ("nodes", "lost", "left", "layout"),
    [
        (3, 0, "1,2", []),
        (3, 2, "0,1", ["--zero"]),
        pytest.param(3, 0, "1,2", ["--zero"], marks=pytest.mark.matrix),
        pytest.param(2, 1, "0", ["--zero"], marks=pytest.mark.matrix),
        pytest.param(4, 1, "2,3", ["--hsdp", "2"], marks=pytest.mark.matrix),
        pytest.param(4, 2, "0,1", ["--hsdp", "2"], marks=pytest.mark.matrix),
    ],
)
def test_fewer_ranks_go_on_as_a_job_of_that_size_would(
    tmp_path: Path, nodes: int, lost: int, left: str, layout: list[str]
) -> None:
    shrunk, reference = tmp_path / "shrunk", tmp_path / "reference"
    done = local_run.run(
        shrunk,
        *("--nodes", nodes, "--on-exhausted", "shrink", "--fault", f"power-off:{lost}@4"),
        *("--", *layout),
        script=SCRIPT,
    )
    assert done.returncode == 0, explain(done, shrunk)
    (closed,) = records(shrunk, "incident", phase="closed")
    assert closed["verdict"] == "shrunk"
    assert "the numbers are not those of an undisturbed run" in done.stdout
    ranks = [int(rank) for rank in left.split(",")]
    fresh = local_run.run(
        reference,
        *("--nodes", len(ranks), "--", *layout, "--from", f"{shrunk}:3", "--as", left),
        script=SCRIPT,
    )
    assert fresh.returncode == 0, explain(fresh, reference)
    for rank in ranks:
        assert same(state(shrunk, 8, rank), state(reference, 8, rank)), (rank, done.stdout)


def test_what_is_not_asked_for_or_not_possible_ends_the_job(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = local_run.run(
        run_dir,
        *("--nodes", 2, "--on-exhausted", "shrink", "--fault", "power-off:1@3"),
        *("--", "--hsdp", "2"),
        script=SCRIPT,
    )
    assert done.returncode == 30, explain(done, run_dir)
    assert "cannot go on with fewer ranks (no other rank has what rank 0 has" in done.stdout


@pytest.mark.matrix
@pytest.mark.parametrize("layout", [[], ["--zero"]])
def test_ranks_come_back_when_their_node_does_and_all_go_on_as_one_job(
    tmp_path: Path, layout: list[str]
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(json.dumps({"on_exhausted": ["shrink"], "readmit.after": "1s"}))
    run_dir, reference = tmp_path / "run", tmp_path / "reference"
    done = local_run.run(
        run_dir,
        *("--nodes", 3, "--policy", policy, "--fault", "power-off:2@4"),
        *("--agent-start-timeout", 300, "--", *layout, "--steps", 14, "--wait-for", "10:3"),
        script=SCRIPT,
    )
    assert done.returncode == 0, explain(done, run_dir)
    verdicts = [record["verdict"] for record in records(run_dir, "incident", phase="closed")]
    assert verdicts == ["shrunk", "regrown"], done.stdout
    # What the rank that comes back begins with is what its peers have.
    shutil.copy(run_dir / "state-9-0.pt", run_dir / "state-9-2.pt")
    fresh = local_run.run(
        reference,
        *("--nodes", 3, "--", *layout, "--steps", 14, "--from", f"{run_dir}:9", "--as", "0,1,2"),
        script=SCRIPT,
    )
    assert fresh.returncode == 0, explain(fresh, reference)
    for rank in range(3):
        assert same(state(run_dir, 14, rank), state(reference, 14, rank)), (rank, done.stdout)


@pytest.mark.matrix
def test_two_nodes_that_are_lost_leave_all_of_a_state_that_is_shared_out(tmp_path: Path) -> None:
    run_dir, reference = tmp_path / "run", tmp_path / "reference"
    done = local_run.run(
        run_dir,
        *("--nodes", 4, "--on-exhausted", "shrink"),
        *("--fault", "power-off:3@4", "--fault", "power-off:1@4", "--", "--zero"),
        script=SCRIPT,
    )
    assert done.returncode == 0, explain(done, run_dir)
    fresh = local_run.run(
        reference,
        *("--nodes", 2, "--", "--zero", "--from", f"{run_dir}:3", "--as", "0,2"),
        script=SCRIPT,
    )
    assert fresh.returncode == 0, explain(fresh, reference)
    for rank in (0, 2):
        assert same(state(run_dir, 8, rank), state(reference, 8, rank)), (rank, done.stdout)


@pytest.mark.matrix
def test_a_share_of_the_state_that_is_lost_comes_from_the_durable_checkpoint(
    tmp_path: Path,
) -> None:
    """A rank and the holder of its replica are lost at once."""
    run_dir, reference = tmp_path / "run", tmp_path / "reference"
    done = local_run.run(
        run_dir,
        *("--nodes", 4, "--on-exhausted", "shrink"),
        *("--checkpoint-dir", tmp_path / "checkpoints", "--checkpoint-every", 3),
        *("--fault", "power-off:1@8", "--fault", "power-off:2@8", "--", "--zero", "--steps", 12),
        script=SCRIPT,
    )
    assert done.returncode == 0, explain(done, run_dir)
    (mark,) = records(run_dir, "incident", phase="durable checkpoint")
    step = int(mark["detail"].split(";")[0].removeprefix("step "))
    assert step in (3, 6), mark
    fresh = local_run.run(
        reference,
        *("--nodes", 2, "--", "--zero", "--steps", 12, "--from", f"{run_dir}:{step}"),
        *("--as", "0,3"),
        script=SCRIPT,
    )
    assert fresh.returncode == 0, explain(fresh, reference)
    for rank in (0, 3):
        assert same(state(run_dir, 12, rank), state(reference, 12, rank)), (rank, done.stdout)
