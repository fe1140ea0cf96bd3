"""No spare is left: the job goes on with the replicas that are whole, and gets them back later."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import local_run
import pytest
import torch
from local_run import explain, records

from deadpool_launch.controller.config import Config
from deadpool_launch.controller.states import initial_state
from deadpool_launch.driving.recorder import PROGRESS_S, Recorder
from deadpool_runtime.protocol import StepDone

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_replicas.py"
#: However slow the machine is, only what is struck is lost.
PATIENT = ("--agent-start-timeout", 300, "--heartbeat-timeout", 30)


def state(run_dir: Path, step: int, rank: int) -> dict[str, torch.Tensor]:
    parts: dict[str, torch.Tensor] = torch.load(run_dir / f"state-{step}-{rank}.pt")["parts"]
    return parts


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def require_same_as_fresh(run_dir: Path, step: int, ranks: list[int], *given: str) -> None:
    """A job of these ranks alone that begins with the states after ``step`` ends with the same."""
    reference = run_dir.with_name("reference")
    roles = ",".join(map(str, ranks))
    fresh = local_run.run(
        reference,
        *("--nodes", len(ranks), *PATIENT, "--", *given),
        *("--from", f"{run_dir}:{step}", "--as", roles),
        script=SCRIPT,
    )
    assert fresh.returncode == 0, explain(fresh, reference)
    last = max(int(path.name.split("-")[1]) for path in reference.glob("state-*.pt"))
    for rank in ranks:
        assert same(state(run_dir, last, rank), state(reference, last, rank)), rank


def test_progress_is_told_by_the_first_rank_that_takes_part() -> None:
    """Rank 0 may be set aside."""
    said: list[str] = []
    journal: Any = SimpleNamespace(say=said.append)
    job = initial_state(Config(("n1", "n2", "n3"), (), 1))
    aside = replace(job.ranks[0], aside=True)
    job = replace(job, ranks=job.ranks.with_changes({0: aside}))
    clock = iter((0.0, *[PROGRESS_S] * 3))
    recorder = Recorder(journal, lambda: next(clock), job)
    for rank in (2, 1, 1):
        recorder.tell_progress(job, rank, StepDone(2, 40 + rank, 0.5, 0.0, None, 0))
    assert said == ["step 41, 0.5 s a step"]


@pytest.mark.parametrize(
    ("nodes", "lost", "left", "layout"),
    [
        pytest.param(3, [0], [1, 2], [], marks=pytest.mark.matrix),
        (3, [2], [0, 1], ["--zero"]),
        pytest.param(3, [0], [1, 2], ["--zero"], marks=pytest.mark.matrix),
        pytest.param(2, [1], [0], ["--zero"], marks=pytest.mark.matrix),
        pytest.param(4, [3, 1], [0, 2], ["--zero"], marks=pytest.mark.matrix),
        pytest.param(4, [1], [2, 3], ["--hsdp", "2"], marks=pytest.mark.matrix),
        pytest.param(4, [2], [0, 1], ["--hsdp", "2"], marks=pytest.mark.matrix),
    ],
)
def test_fewer_ranks_go_on_as_a_job_of_that_size_would(
    tmp_path: Path, nodes: int, lost: list[int], left: list[int], layout: list[str]
) -> None:
    shrunk = tmp_path / "shrunk"
    faults = [f"--fault=power-off:{node}@4" for node in lost]
    done = local_run.run(
        shrunk,
        *("--nodes", nodes, "--on-exhausted", "shrink", *PATIENT, *faults, "--", *layout),
        script=SCRIPT,
    )
    assert done.returncode == 0, explain(done, shrunk)
    (closed,) = records(shrunk, "incident", phase="closed")
    assert closed["verdict"] == "shrunk"
    assert "the numbers are not those of an undisturbed run" in done.stdout
    require_same_as_fresh(shrunk, 3, left, *layout)


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
    run_dir = tmp_path / "run"
    done = local_run.run(
        run_dir,
        *("--nodes", 3, "--policy", policy, "--fault", "power-off:2@4"),
        *(*PATIENT, "--", *layout, "--steps", 14, "--wait-for", "10:3"),
        script=SCRIPT,
    )
    assert done.returncode == 0, explain(done, run_dir)
    verdicts = [record["verdict"] for record in records(run_dir, "incident", phase="closed")]
    assert verdicts == ["shrunk", "regrown"], done.stdout
    # What the rank that comes back begins with is what its peers have.
    shutil.copy(run_dir / "state-9-0.pt", run_dir / "state-9-2.pt")
    require_same_as_fresh(run_dir, 9, [0, 1, 2], *layout, "--steps", "14")


@pytest.mark.matrix
def test_a_share_of_the_state_that_is_lost_comes_from_the_durable_checkpoint(
    tmp_path: Path,
) -> None:
    """A rank and the holder of its replica are lost at once."""
    run_dir = tmp_path / "run"
    done = local_run.run(
        run_dir,
        *("--nodes", 4, "--on-exhausted", "shrink", *PATIENT),
        *("--checkpoint-dir", tmp_path / "checkpoints", "--checkpoint-every", 3),
        *("--fault", "power-off:1@8", "--fault", "power-off:2@8", "--", "--zero", "--steps", 12),
        script=SCRIPT,
    )
    assert done.returncode == 0, explain(done, run_dir)
    (mark,) = records(run_dir, "incident", phase="durable checkpoint")
    step = int(mark["detail"].split(";")[0].removeprefix("step "))
    assert step in (3, 6), mark
    require_same_as_fresh(run_dir, step, [0, 3], "--zero", "--steps", "12")
