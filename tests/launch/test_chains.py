"""Jobs that follow each other: what they share, and how the end of one is that of all."""

from __future__ import annotations

from pathlib import Path

import local_run
import msgspec
import pytest
from local_run import explain, records

from deadpool_launch import chains
from deadpool_launch.backends.base import SiteError
from deadpool_launch.chains import ChainEnd
from deadpool_launch.exits import ExitCode
from deadpool_launch.options import LaunchOptions

PATIENT = ("--agent-start-timeout", 200)
END = ChainEnd("train-1", "7", 0, "the script ended on every rank")


def options_in(folder: Path, chain: str | None = "train-1") -> LaunchOptions:
    return LaunchOptions(
        script="/t.py",
        chain=chain,
        checkpoint_dir=str(folder),
        checkpoint_every=5,
        checkpoint_name="mine",
    )


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
    (tmp_path / "mine").mkdir()
    options = options_in(tmp_path)
    cancelled: list[str] = []
    said: list[str] = []
    assert chains.ended(options) is None
    chains.end(options, END, cancelled.append, said.append)
    assert chains.ended(options) == END
    assert (cancelled, said) == (["train-1"], [])
    assert str(END) == (
        "the chain ended with job 7: the script ended on every rank (exit code 0); nothing is "
        "left to do"
    )
    # Others may go on from the same checkpoints.
    assert chains.ended(options_in(tmp_path, "train-2")) is None
    assert chains.ended(options_in(tmp_path, None)) is None


def test_end_that_cannot_be_told_is_said_and_no_more(tmp_path: Path) -> None:
    said: list[str] = []

    def refuse(name: str) -> None:
        raise SiteError("scancel did not answer")

    chains.end(options_in(tmp_path), END, refuse, said.append)
    assert said == [
        "jobs of the chain that start cannot be told that it is over (No such file or directory)",
        "the jobs of the chain that wait are still in the queue (scancel did not answer)",
    ]


def test_note_that_cannot_be_read_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "chain.json").write_text('{"job_id": 3}')
    assert chains.ended(options_in(tmp_path)) is None


def test_job_after_the_chains_end_does_nothing(tmp_path: Path) -> None:
    run_dir, second = tmp_path / "run", tmp_path / "second"
    chain = ("--checkpoint-dir", tmp_path / "c", "--checkpoint-every", 2, "--chain-name", "train-1")
    steps = ("--", "--steps", "3")
    done = local_run.run(run_dir, *PATIENT, "--nodes", 1, *chain, *steps)
    assert done.returncode == 0, explain(done, run_dir)
    (job,) = records(run_dir, "job")
    end = msgspec.json.decode(
        (tmp_path / "c" / "train-1" / "chain.json").read_bytes(), type=ChainEnd
    )
    assert (end.job_id, end.exit_code) == (job["job_id"], 0)
    again = local_run.run(second, *PATIENT, "--nodes", 1, *chain, *steps)
    assert again.returncode == 0, explain(again, second)
    assert again.stdout.strip() == f"note: {end}"
    assert not second.exists()
