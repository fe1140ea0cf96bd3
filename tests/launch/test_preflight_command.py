"""``deadpool preflight`` as it is called: on this machine, outside of a job, and called wrongly."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from deadpool_launch.backends.base import Check
from deadpool_launch.errors import UnsuitableError, UsageError
from deadpool_launch.exits import ExitCode, PreflightCode
from deadpool_launch.main_cli import run
from deadpool_launch.options import LaunchOptions
from deadpool_launch.preflight import calls, self_test
from deadpool_launch.preflight.command import Found, _interruptible, preflight
from deadpool_launch.rehearsal_run import Interrupted, Interrupts, Outcome
from deadpool_launch.view import RunView
from deadpool_runtime.protocol import Address
from deadpool_slurm.client import Change, EndStep, SlurmClient, SlurmError

SECRET = b"s" * 32
LOCAL = "preflight --site local"
LONG_S = 290


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)


def program(folder: Path, name: str, text: str) -> None:
    """A stand-in for one of Slurm's commands."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(stat.S_IRWXU)


def told(arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = run(shlex.split(f"{arguments} --json"))
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["exit_code"] == code
    return code, found


def rows(found: dict[str, Any]) -> dict[str, str]:
    return {check["check"]: check["result"] for check in found["checks"]}


def test_this_machine_is_looked_at_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = told(f"{LOCAL} --nodes 2 --spares 1 --state-bytes 1M", capsys)
    assert code == ExitCode.OK, found
    assert (found["site"], found["nodes"]) == ("local", ["local1", "local2", "local3"])
    assert set(rows(found).values()) <= {"ok", "warn"}
    assert {"run directory", "libraries", "memory", "spares"} <= set(rows(found))
    assert found["verdict"] == "Hot swap can work here."
    assert list(tmp_path.iterdir()) == []
    code, found = told(f"{LOCAL} --spares 1 --state-bytes 1000T --run-dir mine/own", capsys)
    assert code == ExitCode.UNSUITABLE
    assert found["verdict"] == "Hot swap cannot work here: memory."
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("columns", [80, 120])
def test_table_fits_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run(shlex.split(f"{LOCAL} --nodes 2")) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 nodes as process trees of this machine"
    assert max(map(len, lines)) <= columns
    assert lines[-1] == "Hot swap can work here."
    assert "the loss of a node" in " ".join(lines)


def test_run_directory_that_cannot_be_used_is_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    code, found = told(f"{LOCAL} --spares 1 --run-dir file", capsys)
    assert code == ExitCode.UNSUITABLE
    assert rows(found)["run directory"] == "fail"


CONFIG = """\
cat <<end
Configuration data as of 2026-12-01T10:00:00
ClusterName             = mine
ReturnToService         = 2
SLURM_VERSION           = 23.11.4
SlurmdTimeout           = 300 sec
SwitchType              = switch/none
end"""


def test_login_node_knows_of_the_cluster_and_not_of_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bin"
    program(folder, "scontrol", CONFIG)
    program(folder, "srun", "printf 'MPI plugin types are...\\n\\tnone\\n\\tpmix\\n'")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    model = "preflight --nodes 4 --params 7B --sharding fsdp"
    code, found = told(model, capsys)
    assert code == PreflightCode.NOT_KNOWN
    assert (found["job"], found["nodes"]) == (None, [])
    by_name = {check["check"]: check for check in found["checks"]}
    assert by_name["Slurm version"]["result"] == "ok"
    assert by_name["ReturnToService"]["result"] == "warn"
    assert "srun has pmix" in by_name["MPI kind"]["text"]
    assert by_name["ports"]["result"] == "unknown"
    assert by_name["memory"]["text"].startswith("the copies of the state take ")
    assert by_name["ports"]["remedy"] == "run this inside of the allocation"
    (tmp_path / "mine.yaml").write_text("replication: {factor: 2, interval: 3}")
    _, found = told(f"{model} --policy mine.yaml", capsys)
    (memory,) = [each for each in found["checks"] if each["check"] == "memory"]
    assert "(replication.factor: 2, replication.interval: 3)" in memory["text"]
    (tmp_path / "mine.yaml").write_text("replication.factor: 4")
    assert run(shlex.split(f"{model} --policy mine.yaml")) == ExitCode.USAGE
    assert "replication.factor 4: replicas go to so many" in capsys.readouterr().err


def test_machine_without_slurm_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    code, found = told("preflight", capsys)
    assert code == PreflightCode.NOT_KNOWN
    (check,) = [check for check in found["checks"] if check["check"] == "Slurm version"]
    assert check["result"] == "unknown"
    assert "scontrol cannot be run: No such file or directory" in check["text"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--nodes 0", "--nodes 0: must be a whole number of at least 1"),
        ("--site nowhere", "nowhere"),
        ("--params many", "--params many: must be a whole number of at least 1"),
        ("--state-bytes 0", "--state-bytes 0: must be a size such as 512G or 1.5T"),
        ("--state-bytes 1G --params 1B", "--params and --state-bytes: give one of them"),
        ("--state-bytes 1G --sharding zero1", "--state-bytes: does not say which part of it is"),
        ("--site local --shard 4", "--shard: is for --sharding hsdp only"),
        ("--site local --nodes 3 --tp 2", "--tp 2 x --pp 1: 3 ranks (3 nodes x 1) are not a"),
        ("--nproc-per-node some", "--nproc-per-node some: must be auto, gpu or a number of at"),
        ("--site local --mpi pmi2", "--mpi pmi2: with --site local it is mpiexec"),
        ("--agent-start-timeout soon", "--agent-start-timeout soon: must be a duration such as"),
        ("--selftest", "--selftest is not an option of deadpool preflight; did you mean --self-"),
    ],
)
def test_wrong_command_line_is_one_sentence(
    arguments: str, sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["preflight", *shlex.split(arguments)]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert error.startswith("deadpool: ")
    assert error.count("\n") == 1
    assert sentence in error
    assert list(tmp_path.iterdir()) == []


def test_self_test_needs_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["preflight", "--self-test"]) == ExitCode.UNSUITABLE
    assert "--self-test: there are no nodes to test; run it inside" in capsys.readouterr().err


def test_looking_ends_with_a_signal() -> None:
    ended = []

    async def look() -> Found:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        raise AssertionError("nothing is found")

    with Interrupts() as interrupts:
        interrupts.arrived.append(signal.SIGTERM)
        with pytest.raises(Interrupted):
            asyncio.run(_interruptible(look(), interrupts))
    assert ended == [True]


def test_help_fits_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["preflight", "--help"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for code in PreflightCode:
        assert f" {code.value} " in text
    assert preflight.name == "preflight"


# ---------------------------------------------------------------- calls


def exchanged(nodes: int, **host: str) -> list[dict[str, Any]]:
    async def all_of_them() -> list[dict[str, Any]]:
        async with calls.Exchange("127.0.0.1", SECRET, nodes) as exchange:
            return await asyncio.gather(
                *(
                    calls.call(host.get(f"n{n}", f"n{n}"), exchange.address, SECRET)
                    for n in range(nodes)
                )
            )

    return asyncio.run(all_of_them())


def test_nodes_call_the_launcher_and_each_other() -> None:
    assert exchanged(3) == [{"launcher": "", "unreached": [], "called": 2}] * 3


def test_node_that_nobody_can_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One says a wrong port, as if a firewall were before it."""
    started = calls._send

    def send(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
        started(writer, {**value, "port": 1} if value.get("node") == "n1" else value)

    monkeypatch.setattr(calls, "_send", send)
    first, second, third = exchanged(3)
    assert [first["unreached"], second["unreached"], third["unreached"]] == [["n1"], [], ["n1"]]


def test_launcher_that_cannot_be_called_or_is_another_is_told() -> None:
    nobody = asyncio.run(calls.call("n1", Address("127.0.0.1", 1), SECRET))
    assert nobody["launcher"].startswith("127.0.0.1:1: ")

    async def stranger() -> dict[str, Any]:
        async with calls.Exchange("127.0.0.1", SECRET, 1) as exchange:
            return await calls.call("n1", exchange.address, b"t" * 32)

    assert asyncio.run(stranger())["launcher"]


# ---------------------------------------------------------------- the self-test


def journal(*records: dict[str, Any]) -> RunView:
    view = RunView()
    view.apply_all(records)
    return view


def rank(at: float, node: str, epoch: int) -> dict[str, Any]:
    return {"kind": "rank", "at": at, "rank": 1, "node": node, "pid": 5, "epoch": epoch}


def incident(at: float, phase: str, **more: Any) -> dict[str, Any]:
    return {"kind": "incident", "at": at, "number": 1, "phase": phase, **more}


RECOVERED = (
    rank(1.0, "n2", 1),
    incident(10.3, "opened", detail="n2 lost"),
    rank(10.9, "n3", 2),
    incident(11.5, "closed", verdict="continued", replayed_steps=0, rung=2),
)
END = {"kind": "end", "at": 20.0, "verdict": "stopped", "exit_code": 30, "reason": "no spare"}


@pytest.mark.parametrize(
    ("code", "records", "struck_at", "ok", "text"),
    [
        (0, RECOVERED, 10.0, True, "n3 took its rank, and training went on 1.5 s later with 0"),
        (0, RECOVERED[:1], None, False, "ended before a node of it was struck"),
        (0, (RECOVERED[0], *RECOVERED[1::2]), 10.0, False, "they run there again"),
        (30, (*RECOVERED[:2], END), 10.0, False, "after n2 was struck with exit code 30: no spare"),
        (11, (), None, False, "before it was struck with exit code 11: the last line"),
    ],
)
def test_small_job_is_judged_by_its_journal(
    code: int,
    records: tuple[dict[str, Any], ...],
    struck_at: float | None,
    ok: bool,
    text: str,
    tmp_path: Path,
) -> None:
    outcome = Outcome(code, journal(*records), tmp_path, ("a line", "the last line"))
    check = self_test.judge(outcome, "n2", struck_at, 1, tmp_path)
    assert check.ok is ok
    assert text in check.text


class Steps:
    """Slurm's side of the job, with these steps; ``deaf``: it does not answer."""

    def __init__(self, *names: str, deaf: bool = False) -> None:
        self.names, self.deaf = names, deaf
        self.killed: list[str] = []

    def steps(self, job_id: str) -> list[str]:
        if self.deaf:
            raise SlurmError("squeue did not answer within 10 s")
        return list(self.names)

    def do(self, change: Change) -> bool:
        assert isinstance(change, EndStep)
        self.killed.append(f"{change.name} {change.signal}")
        return True


def on(steps: Steps) -> self_test.Slurm:
    return self_test.Slurm(cast(SlurmClient, steps), "7")


def small_job(steps: Steps, tmp_path: Path) -> Check:
    options = LaunchOptions(script="", site="slurm")
    with Interrupts() as interrupts:
        return self_test.run(options, 2, tmp_path / "run", on(steps), interrupts)


def test_agents_of_another_job_are_left_alone(tmp_path: Path) -> None:
    steps = Steps("batch", "deadpool-n2-1")
    with pytest.raises(UnsuitableError, match=r"runs in this allocation \(deadpool-n2-1\)"):
        small_job(steps, tmp_path)
    deaf = small_job(Steps(deaf=True), tmp_path)
    assert (deaf.ok, "squeue did not answer" in deaf.text) == (False, True)
    assert steps.killed == []


def test_node_is_struck_once_when_its_rank_stands_still(tmp_path: Path) -> None:
    steps = Steps("deadpool-preflight", "deadpool-n2-1", "deadpool-n22-1", "mine", deaf=True)
    strike = self_test.Strike(1, tmp_path, on(steps).kill_agent, 60.0)
    view = journal(RECOVERED[0])
    strike.show(view)
    (tmp_path / "held").touch()
    strike.show(view)
    assert (strike.struck_at, steps.killed) == (None, [])
    steps.deaf = False
    for _ in range(2):
        strike.show(view)
    assert isinstance(strike.struck_at, float)
    assert (strike.node, steps.killed) == ("n2", ["deadpool-n2-1 KILL"])
    with pytest.raises(self_test.TookTooLong):
        self_test.Strike(1, tmp_path, None, -1.0).show(view)


@pytest.mark.parametrize(("usable", "active"), [(2, 1), (3, 2), (100, 2)])
def test_small_job_leaves_a_node_to_spare(usable: int, active: int) -> None:
    assert self_test.active_nodes(usable, site="slurm") == active


def test_one_node_is_too_few() -> None:
    with pytest.raises(UsageError, match="--self-test: takes two nodes or more"):
        self_test.active_nodes(1, site="slurm")
    assert self_test.active_nodes(1, site="local") == 2


@pytest.mark.matrix
def test_self_test_on_this_machine_swaps_a_node(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deadpool_launch.main_cli", *shlex.split(LOCAL)]
    command += ["--spares", "1", "--self-test", "--state-bytes", "1M", "--json"]
    done = subprocess.run(
        [*command, "--agent-start-timeout", "240"],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    checks = json.loads(done.stdout)["checks"]
    assert checks[-1]["check"] == "self-test"
    assert checks[-1]["text"].startswith("local2 was lost to a small job; local3 took its rank")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.matrix
def test_mpi_world_on_this_machine_comes_up_or_says_why_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("mpi4py")
    code, found = told(f"{LOCAL} --nodes 2 --spares 1 --mpi mpiexec", capsys)
    assert (code, rows(found)["MPI world"]) == (ExitCode.OK, "ok"), found
    text = found["checks"][[c["check"] for c in found["checks"]].index("MPI world")]["text"]
    assert text.startswith("3 nodes were one world after ")
