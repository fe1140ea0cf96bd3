"""The job's comment in Slurm."""

from __future__ import annotations

from typing import Any

import pytest

from deadpool_launch.cli import run
from deadpool_launch.controller.events import Finish
from deadpool_launch.status.comment import comment_of
from deadpool_runtime.protocol import JobStanding


def _standing() -> JobStanding:
    nodes = {"n1": "active", "n2": "lost", "n3": "active"}
    return JobStanding("training", 1, 2, 20, nodes, 2, False, None)


def test_comment_says_what_the_job_does_and_with_which_nodes() -> None:
    text = "deadpool: training; nodes: 2 active, 0 spare, 1 lost; epoch 2"
    assert comment_of(_standing()) == text


def test_last_comment_is_the_verdict() -> None:
    finish = Finish("no spare", 30, "n2 lost; no spare is left", "")
    assert comment_of(_standing(), finish) == "deadpool: no spare (exit code 30)"


def test_job_without_slurm_has_no_comment(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert run(["--site", "local", "--job-comment", str(script)]) == 2
    assert capsys.readouterr().err == (
        "deadpool-launch: --job-comment: there is no job in Slurm with --site local\n"
    )


def test_figures_at_no_address_are_refused(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert run(["--site", "local", "--metrics", "here", str(script)]) == 2
    assert "--metrics here: must be a port, such as 9400" in capsys.readouterr().err
