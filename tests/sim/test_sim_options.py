"""Faults as data, sizes and seeds as they are given on the command line; growth of messages."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from deadpool_launch.controller.states import Phase
from deadpool_launch.entry import run_command
from deadpool_launch.sim import cli
from deadpool_launch.sim.faults import Fault, FaultKind, Scope, faults_text, read_faults
from deadpool_launch.sim.scale import measure

FAULTS = [
    Fault(FaultKind.POWER, "n1", 2.5),
    Fault(FaultKind.PARTITION, "s0", 0.1, Phase.PARKING, 2, 1.5, Scope.LAUNCHER),
    Fault(FaultKind.DISK, at=3.0),
]


def test_faults_are_read_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_text(faults_text(FAULTS))
    assert read_faults(path) == FAULTS


def test_given_faults_strike_the_seed_s_job(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_text(faults_text([Fault(FaultKind.POWER, "n1", 3.0)]))
    options = "--seeds 3 --nodes 3 --spares 1 --nproc 2 --trace --fault"
    done = CliRunner().invoke(cli.command, [*options.split(), str(path)], standalone_mode=False)
    assert done.return_value == 0
    assert "* power n1 at 3 s" in done.output
    assert "s0 takes ranks 2-3" in done.output


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--seeds", "5:2"], "--seeds 5:2: TO must be larger than FROM"),
        (["--seeds", "all"], "not of the form FROM:TO, such as 0:1000, nor a number"),
        (["--scale", "many"], "not of the form NODESxNPROC, such as 4096x4"),
        (["--seeds", "1", "--only", "9"], "--only 9: seed 1 has"),
        (["--fault", "FILE"], "power strikes a node, one of n0, n1; 'n7' is none"),
        (["--fault", "nowhere.json"], "cannot be read: No such file or directory"),
    ],
)
def test_what_is_wrong_with_an_option_is_said(
    options: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "faults.json"
    path.write_text(faults_text([Fault(FaultKind.POWER, "n7", 2.5)]))
    given = [str(path) if word == "FILE" else word for word in options]
    sizes = ["--nodes", "2", "--spares", "0", "--nproc", "1"]
    assert run_command(cli.command, [*sizes, *given], cli.PROGRAM) == 2
    assert sentence in capsys.readouterr().err


def test_messages_of_an_incident_grow_no_faster_than_the_ranks() -> None:
    small, large = measure(8, 2), measure(32, 2)
    assert large.ranks == 4 * small.ranks
    assert large.incident_messages <= 4.5 * small.incident_messages
