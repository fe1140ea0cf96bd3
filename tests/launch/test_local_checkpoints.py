"""Whole jobs on the local site with durable checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

import local_run
import pytest
from local_run import explain, final_state, records

from deadpool_runtime.durable import index

#: Slow enough for a checkpoint to be on disk some steps later.
STEPS = ("--", "--steps", "12", "--step-s", "0.15")
#: While the spare is not started, no other node holds a replica.
NODES = ("--nodes", 1, "--nproc-per-node", 2)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    done = local_run.run(run_dir, *NODES, *STEPS)
    assert done.returncode == 0, explain(done, run_dir)
    return final_state(run_dir)


def the_folder(checkpoints: Path) -> Path:
    """The only job's."""
    (folder,) = checkpoints.iterdir()
    return folder


def test_job_that_lost_every_copy_goes_on_from_disk(
    tmp_path: Path, undisturbed: dict[int, dict[str, str]]
) -> None:
    run_dir, checkpoints = tmp_path / "run", tmp_path / "checkpoints"
    done = local_run.run(
        run_dir,
        *(*NODES, "--spares", 1, "--spare-start", "on-failure"),
        *("--checkpoint-dir", checkpoints, "--checkpoint-every", 4),
        *("--fault", "power-off:0@11", *STEPS),
    )
    assert done.returncode == 0, explain(done, run_dir)
    (mark,) = records(run_dir, "incident", phase="durable checkpoint")
    (closed,) = records(run_dir, "incident", phase="closed")
    found = re.fullmatch(r"step (\d+); (\d+) completed steps? lost", mark["detail"])
    assert found is not None, mark
    step, lost = int(found[1]), int(found[2])
    assert step in (4, 8)
    # Step 10 counts if the launcher had heard of it from every rank.
    assert lost in (9 - step, 10 - step)
    assert closed["replayed_steps"] == lost
    assert closed["detail"].startswith(f"restarted from the durable checkpoint of step {step} in")
    assert final_state(run_dir) == undisturbed, explain(done, run_dir)
    committed = [record["step"] for record in records(run_dir, "checkpoint")]
    assert step in committed
    # That of the last step is waited for.
    assert committed[-1] == 12
    assert index.list_complete(the_folder(checkpoints)) == committed[:-3:-1]
    assert f"checkpoint of step {committed[0]} is on disk, " in done.stdout


def test_job_that_cannot_go_on_says_where_its_newest_checkpoint_is(tmp_path: Path) -> None:
    run_dir, checkpoints = tmp_path / "run", tmp_path / "checkpoints"
    done = local_run.run(
        run_dir,
        *("--nodes", 1, "--checkpoint-dir", checkpoints, "--checkpoint-every", 2),
        *("--fault", "power-off:0@9", *STEPS),
    )
    assert done.returncode == 30, explain(done, run_dir)
    folder = the_folder(checkpoints)
    step = index.list_complete(folder)[0]
    assert f"the newest durable checkpoint is that of step {step}: {folder}" in done.stdout


def test_folder_that_cannot_be_written_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = local_run.run(
        tmp_path / "run",
        *("--nodes", 1, "--checkpoint-dir", tmp_path / "file", "--checkpoint-every", 2),
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"deadpool-launch: --checkpoint-dir {tmp_path}/file: cannot be used (Not a directory); "
        "name a directory that you can write\n"
    )
    assert not (tmp_path / "run" / "journal.jsonl").exists()
