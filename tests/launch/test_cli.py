"""The command line: what it accepts, what it says, with which exit code it ends."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from deadpool_launch import cli, main_cli
from deadpool_launch.exits import ExitCode
from deadpool_launch.options import LaunchOptions


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A readable script, seen from outside any allocation."""
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return path


def options_of(*arguments: str) -> LaunchOptions:
    """The options a command line means."""
    context = cli.command.make_context(cli.PROGRAM, list(arguments))
    return cli.to_options(context.params, {}, "20260101-000000")


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("deadpool-launch: ")
    return captured.err.removeprefix("deadpool-launch: ").rstrip("\n")


def test_options_may_stand_before_or_after_the_script(script: Path) -> None:
    before = options_of("--site", "local", "--nodes", "3", "--spares", "1", "train.py", "--", "-x")
    after = options_of("train.py", "--site", "local", "--spares", "1", "--nodes", "3", "--", "-x")
    assert before == after
    assert (before.nodes, before.spares, before.script_args) == (3, 1, ("-x",))


def test_everything_behind_the_separator_is_the_scripts(script: Path) -> None:
    wanted = options_of("train.py", "--site", "local", "--", "--spares", "9", "--", "--help")
    assert wanted.spares == 0
    assert wanted.script_args == ("--spares", "9", "--", "--help")


def test_paths_are_absolute(script: Path) -> None:
    wanted = options_of("train.py", "--site", "local")
    assert wanted.script == str(script)
    assert wanted.run_dir == str(script.parent / "deadpool-runs/local-20260101-000000")


def test_unknown_option_points_to_the_separator(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["train.py", "--lr", "3e-4"]) == 2
    assert said(capsys) == (
        "--lr is not an option of deadpool-launch; arguments for the script go after --: "
        "deadpool-launch train.py --spares 1 -- --lr 3e-4"
    )


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--spare", "--spares"),
        ("--sparse", "--spares"),
        ("--node", "--nodes"),
        ("--heartbeat", "--heartbeat-timeout"),
        ("--nproc_per_node", "--nproc-per-node"),
    ],
)
def test_typo_of_an_option_is_recognised(
    script: Path, capsys: pytest.CaptureFixture[str], given: str, meant: str
) -> None:
    assert cli.run(["train.py", given, "2"]) == 2
    assert said(capsys) == f"{given} is not an option of deadpool-launch; did you mean {meant}?"


@pytest.mark.parametrize("given", ["--steps", "--layers", "--fault_", "-x", "--seed"])
def test_options_of_a_script_are_no_typos(
    script: Path, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    assert cli.run(["train.py", given, "2"]) == 2
    assert "; arguments for the script go after --: " in said(capsys)


def test_argument_without_separator_points_to_it(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["train.py", "--site", "local", "config.yaml", "--", "--lr", "1"]) == 2
    assert said(capsys).startswith("config.yaml is one argument too many; arguments for the script")


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        ("", 2, "no script given: deadpool-launch [OPTIONS] SCRIPT [-- SCRIPT ARGS]"),
        ("none.py --site local", 2, "there is no script none.py"),
        (". --site local", 2, "there is no script ."),
        ("train.py --site local --spares -1", 2, "--spares -1: must be at least 0"),
        ("train.py --site cloud", 2, "--site cloud: is no site; there are generic, local,"),
        ("train.py --nodes many", 2, "'many' is not a valid integer"),
        ("train.py --site local --nproc-per-node gpu", 2, "--nproc-per-node gpu: the job has no"),
        ("train.py --site local --fault x", 2, "KIND:TARGET@STEP, such as power-off:1@5"),
        ("train.py", 10, "not inside a Slurm allocation: submit a script that runs this with"),
        ("train.py --site slurm", 10, "not inside a Slurm allocation"),
        ("train.py --site local --world-size 3 --dry-run", 2, "--world-size 3: 1 active node with"),
        ("train.py --site local --checkpoint-dir x", 2, "--checkpoint-every go together: name a"),
        ("train.py --site local --checkpoint-every 5", 2, "--checkpoint-every go together: name a"),
        ("train.py --site local --checkpoint-dir x --checkpoint-every 0", 2, "(at least 1)"),
        ("train.py --site local --checkpoint-dir x --checkpoint-every y", 2, "not a valid integer"),
        ("train.py --site local --mpi pmi2", 2, "--mpi pmi2: with --site local it is mpiexec"),
        ("train.py --site local --mpi openmpi", 2, "'openmpi' is not one of 'none', 'pmi2'"),
        ("train.py --site local --rules none.yaml --dry-run", 2, "none.yaml: cannot be read (No"),
    ],
)
def test_mistake_is_told_in_one_sentence(
    script: Path, capsys: pytest.CaptureFixture[str], arguments: str, code: int, sentence: str
) -> None:
    assert cli.run(shlex.split(arguments)) == code
    assert sentence in said(capsys)


def test_dry_run_prints_plan_and_commands_and_starts_nothing(script: Path) -> None:
    result = CliRunner().invoke(
        cli.command,
        ["train.py", "--site", "local", "--nodes", "2", "--spares", "1", "--dry-run", "--", "a b"],
        standalone_mode=False,
    )
    lines = result.output.splitlines()
    assert lines[1] == f"script {script} 'a b'"
    assert "local3  spare    number 1 to be used" in lines
    commands = [shlex.split(line) for line in lines if "deadpool_launch.agent" in line]
    assert [command[4] for command in commands] == ["local1", "local2", "local3"]
    assert commands[0][:3] == [sys.executable, "-m", "deadpool_launch.agent"]
    assert not (script.parent / "deadpool-runs").exists()


def test_dry_run_starts_no_agent_on_spares_that_wait_for_a_failure(script: Path) -> None:
    arguments = "train.py --site local --nodes 1 --spares 1 --spare-start on-failure --dry-run"
    output = CliRunner().invoke(cli.command, arguments.split(), standalone_mode=False).output
    assert output.count("deadpool_launch.agent") == 1
    assert "on failure, the same for local2" in output


def test_dry_run_shows_how_the_processes_with_mpi_start(script: Path) -> None:
    arguments = "train.py --site local --nodes 2 --spares 1 --mpi mpiexec --dry-run"
    output = CliRunner().invoke(cli.command, arguments.split(), standalone_mode=False).output
    command = shlex.split(output.splitlines()[-1])
    assert command[0].endswith("mpiexec")
    nodes = [command[at + 1] for at, word in enumerate(command) if word == "DEADPOOL_MOVER_NODE"]
    assert nodes == ["local1", "local2", "local3"]
    assert output.count("--carriers mpi") == 3


def test_dry_run_says_where_checkpoints_go_and_makes_nothing(script: Path) -> None:
    arguments = "train.py --site local --checkpoint-dir x --checkpoint-every 5 --dry-run"
    output = CliRunner().invoke(cli.command, arguments.split(), standalone_mode=False).output
    assert f"a durable checkpoint every 5 steps in {script.parent}/x/local-" in output
    assert not (script.parent / "x").exists()


def test_dry_run_of_a_job_without_mpi_shows_none(script: Path) -> None:
    arguments = "train.py --site local --nodes 2 --dry-run"
    output = CliRunner().invoke(cli.command, arguments.split(), standalone_mode=False).output
    assert "mpiexec" not in output
    assert "--carriers" not in output


def test_help_fits_in_80_columns_and_groups_the_options(script: Path) -> None:
    output = CliRunner().invoke(cli.command, ["--help"]).output
    assert max(len(line) for line in output.splitlines()) <= 80
    headings = ["Nodes and ranks:", "Site:", "Faults and recovery:", "Other:"]
    positions = [output.index(heading) for heading in headings]
    assert positions == sorted(positions)
    assert "--fault " not in output
    text = " ".join(output.split())
    for code in ExitCode:
        assert f" {code.value} " in text
    for option in cli.command.params:
        assert option.name in ("script", "extra", "faults") or option.opts[-1] in output


def test_command_as_a_process_has_no_traceback(script: Path) -> None:
    for module, arguments, code in (
        ("deadpool_launch", ["--version"], 0),
        ("deadpool_launch", ["--bogus"], 2),
        ("deadpool_launch.cli", ["train.py"], 10),
    ):
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code
        assert "Traceback" not in done.stderr


def test_launcher_reaches_neither_torch_nor_mpi() -> None:
    code = (
        "import sys, deadpool_launch.cli, deadpool_launch.prepare, deadpool_launch.main_cli;"
        "sys.exit(bool({'torch', 'mpi4py'} & set(sys.modules)))"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environ, check=False).returncode == 0


def test_unknown_command_lists_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_cli.run(["rehears"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("deadpool: rehears is not a command of deadpool; those are ")
    assert error.endswith(" and version\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--bogus", "--bogus is not an option of deadpool"),
        ("version --bogus", "--bogus is not an option of deadpool version"),
        (
            "rehearse",
            "no script given: deadpool rehearse [OPTIONS] SCRIPT [-- SCRIPT ARGS]",
        ),
        (
            "rehearse train.py --spare 2",
            "--spare is not an option of deadpool rehearse; did you mean --spares?",
        ),
        (
            "rehearse train.py --lr 3e-4",
            "--lr is not an option of deadpool rehearse; arguments for the script go after --: "
            "deadpool rehearse train.py --spares 1 -- --lr 3e-4",
        ),
        (
            "rehearse train.py config.yaml -- --lr 1",
            "config.yaml is one argument too many; arguments for the script go after --: "
            "deadpool rehearse train.py --spares 1 -- --lr 3e-4",
        ),
        (
            "rehearse train.py --nodes 0",
            "Invalid value for '--nodes': 0 is not in the range x>=1",
        ),
        ("rehearse none.py", "there is no script none.py"),
    ],
)
def test_mistake_with_deadpool_is_told_in_one_sentence(
    script: Path, capsys: pytest.CaptureFixture[str], arguments: str, sentence: str
) -> None:
    assert main_cli.run(shlex.split(arguments)) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"deadpool: {sentence}\n")


def test_deadpool_alone_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_cli.run([]) == 2
    assert capsys.readouterr().out.startswith("Usage: deadpool ")
    assert main_cli.run(["policy"]) == 2
    captured = capsys.readouterr()
    assert captured.out.startswith("Usage: deadpool policy ")
    assert captured.err == ""


def test_deadpool_version_names_what_a_job_depends_on() -> None:
    result = CliRunner().invoke(main_cli.command, ["version"])
    assert result.exit_code == 0
    names = [line.split("  ")[0] for line in result.output.splitlines()]
    assert names == ["deadpool", "python", "torch", "slurm", "native shim"]


def test_deadpool_lists_subcommands_without_loading_them() -> None:
    result = CliRunner().invoke(main_cli.command, ["--help"])
    assert result.exit_code == 0
    assert "rehearse" in result.output
    assert "version" in result.output
