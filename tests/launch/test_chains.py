"""Jobs that follow each other: what they share, and how the end of one is that of all."""

from __future__ import annotations

from pathlib import Path

import local_run
import pytest
from local_run import explain, records

from deadpool_launch import chains, checkpoints
from deadpool_launch.backends.base import SiteError
from deadpool_launch.chains import ChainEnd
from deadpool_launch.exits import ExitCode
from deadpool_runtime.durable import index
from deadpool_runtime.durable.hashing import sum_of

END = ChainEnd("7", 0, "the script ended on every rank")


@pytest.mark.parametrize(
    ("code", "last"),
    [
        (ExitCode.OK, True),
        (ExitCode.SCRIPT_FAILED, True),
        (ExitCode.JOB_FAULT, True),
        (ExitCode.STOPPED_IN_TIME, False),
        (ExitCode.NO_SPARE, False),
        (ExitCode.RECOVERY_FAILED, False),
        (ExitCode.TERMINATED, False),
    ],
)
def test_what_another_job_could_mend_does_not_end_the_chain(code: ExitCode, last: bool) -> None:
    assert chains.is_last(code) is last


def test_end_is_told_to_those_that_start_and_those_that_wait(tmp_path: Path) -> None:
    folder = tmp_path / "train-1"
    folder.mkdir()
    cancelled: list[str] = []
    said: list[str] = []
    assert chains.ended(folder) is None
    chains.end(folder, END, cancelled.append, said.append)
    assert chains.ended(folder) == END
    assert (cancelled, said) == (["train-1"], [])
    assert str(END) == (
        "the chain ended with job 7: the script ended on every rank (exit code 0); nothing is "
        "left to do"
    )


def test_end_that_cannot_be_told_is_said_and_no_more(tmp_path: Path) -> None:
    said: list[str] = []

    def refuse(name: str) -> None:
        raise SiteError("scancel did not answer")

    chains.end(tmp_path / "none", END, refuse, said.append)
    assert said == [
        "jobs of the chain that start cannot be told that it is over (No such file or directory)",
        "the jobs of the chain that wait are still in the queue (scancel did not answer)",
    ]


def test_note_that_cannot_be_read_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "chain.json").write_text('{"job_id": 3}')
    assert chains.ended(tmp_path) is None


def test_jobs_of_a_chain_have_one_folder_and_find_each_others_checkpoints(tmp_path: Path) -> None:
    folder = checkpoints.job_directory(tmp_path, "8", "train-1")
    assert folder == checkpoints.job_directory(tmp_path, "9", "train-1") == tmp_path / "train-1"
    checkpoints.make_directory(tmp_path, "8", "train-1")
    for step, job_id, world_size in ((10, "7", 2), (20, "8", 2), (30, "8", 4)):
        sums = tuple(sum_of(b"") for _ in range(world_size))
        content = index.Complete(index.FORMAT, job_id, world_size, step, 1, sums)
        index.step_directory(folder, step).mkdir()
        index.write_file(index.step_directory(folder, step) / index.COMPLETE, index.seal(content))
    assert checkpoints.found(folder, None, 2) == (20, 10)
    assert checkpoints.found(folder, "7", 2) == (10,)


def test_job_after_the_chains_end_does_nothing(tmp_path: Path) -> None:
    run_dir, second = tmp_path / "run", tmp_path / "second"
    chain = ("--checkpoint-dir", tmp_path / "c", "--checkpoint-every", 2, "--chain-name", "train-1")
    steps = ("--", "--steps", "3")
    done = local_run.run(run_dir, "--nodes", 1, *chain, *steps)
    assert done.returncode == 0, explain(done, run_dir)
    (job,) = records(run_dir, "job")
    end = chains.ended(tmp_path / "c" / "train-1")
    assert end is not None
    assert (end.job_id, end.exit_code) == (job["job_id"], 0)
    again = local_run.run(second, "--nodes", 1, *chain, *steps)
    assert again.returncode == 0, explain(again, second)
    assert again.stdout.strip() == f"note: {end}"
    assert not second.exists()
