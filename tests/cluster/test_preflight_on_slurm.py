"""What the launcher finds out on real Slurm before a job, and the steps it starts there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mini_cluster import MiniCluster
from mini_cluster_nodes import wait_until
from mini_cluster_settings import HEAD

from deadpool_launch.movers import MPICH_OVER_TCP

pytestmark = pytest.mark.cluster

PATIENCE_S = 90.0
LONG_S = 900.0
IN_SCRIPT = "#SBATCH --no-kill"

#: Runs inside the job: prepares a launch and tells the outcome as one line of JSON.
PREPARE = textwrap.dedent("""\
    import asyncio, json, sys
    from deadpool_launch.errors import DeadpoolError
    from deadpool_launch.options import LaunchOptions
    from deadpool_launch.prepare import make_backend, prepare

    saves = {"checkpoint_dir": sys.argv[2], "checkpoint_every": 9} if sys.argv[2:] else {}
    options = LaunchOptions(script="/t.py", site="slurm", spares=1, run_dir=sys.argv[1], **saves)
    backend = make_backend(options)
    told = {}
    try:
        prepared = asyncio.run(prepare(backend, options))
    except DeadpoolError as error:
        told["error"] = str(error)
    else:
        told |= {"active": prepared.plan.active, "spares": prepared.plan.spares}
        told["checks"] = [[check.name, check.ok, check.text] for check in prepared.checks]
        told["launcher_host"] = prepared.allocation.launcher_host
    print("told", json.dumps(told))
    """)

#: Runs inside the job: starts an agent step that heeds no SIGTERM and stops it when told to.
AGENT = textwrap.dedent("""\
    import asyncio, pathlib, sys
    from deadpool_launch.options import LaunchOptions
    from deadpool_launch.prepare import make_backend

    where, node, grace_s = pathlib.Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    options = LaunchOptions(script="/t.py", site="slurm", run_dir=str(where))

    async def main():
        backend = make_backend(options)
        backend.discover(options)
        script = "trap '' TERM; echo up; setsid sleep 100001 & sleep 100001"
        log = where / "agent.log"
        agent = await backend.start_agent(node, ["bash", "-c", script], log)
        if len(sys.argv) == 4:
            while "up" not in (log.read_text() if log.exists() else ""):
                await asyncio.sleep(0.05)
            (where / "up").touch()
            while not (where / "stop").exists():
                await asyncio.sleep(0.05)
        await agent.stop(grace_s)
        print("told", '"%s %s"' % (await agent.wait(), agent.last_words()))
        await backend.close()

    asyncio.run(main())
    """)


@dataclass
class Ended:
    """What became of a job."""

    exit_code: int
    output: str

    @property
    def told(self) -> Any:
        """What the job's Python told as JSON."""
        lines = [line for line in self.output.splitlines() if line.startswith("told ")]
        assert lines, self.output
        return json.loads(lines[0].removeprefix("told "))


def job_script(slurm: MiniCluster, name: str, code: str) -> Path:
    """Python code that every node can read."""
    path = slurm.base / name
    path.write_text(code)
    return path


def submit(slurm: MiniCluster, command: str, *, header: str = IN_SCRIPT, **how: Any) -> int:
    """Submit a batch script of one command."""
    return slurm.submit(f"#!/bin/bash\n{header}\n{command}\n", **{"nodes": 4, **how})


def finish(slurm: MiniCluster, job: int, patience_s: float = PATIENCE_S) -> Ended:
    """Wait for the job's end."""
    record = slurm.wait_job(job, patience_s, accept_completing=True)
    return Ended(record.exit_code, (slurm.base / f"slurm-{job}.out").read_text())


def launch(slurm: MiniCluster, arguments: str = "", *, before: str = "", **how: Any) -> Ended:
    """Run ``deadpool-launch`` on a script that says that it ran."""
    script = job_script(slurm, "hello.py", "print('the script ran')\n")
    command = f"{before} deadpool-launch {arguments} {script}"
    return finish(slurm, submit(slurm, command, **how))


def prepare(slurm: MiniCluster, **how: Any) -> Any:
    """What the preflight of a job of four nodes finds."""
    return finish(slurm, submit(slurm, prepare_command(slurm), **how)).told


def prepare_command(slurm: MiniCluster, run_dir: Path | None = None) -> str:
    script = job_script(slurm, "prepare.py", PREPARE)
    return shlex.join([sys.executable, str(script), str(run_dir or slurm.base / "run")])


def sentence(ended: Ended) -> str:
    """The one line that ``deadpool-launch`` says when it refuses."""
    lines = [line for line in ended.output.splitlines() if line.startswith("deadpool-launch: ")]
    assert len(lines) == 1, ended.output
    assert "Traceback" not in ended.output
    return lines[0].removeprefix("deadpool-launch: ")


def test_job_without_no_kill_is_refused_with_the_line_to_add(slurm: MiniCluster) -> None:
    ended = launch(slurm, header="", no_kill=False)
    assert ended.exit_code == 10
    assert "add the line '#SBATCH --no-kill' to the batch script" in sentence(ended)
    assert "the script ran" not in ended.output


def test_no_kill_in_the_batch_script_is_found(slurm: MiniCluster) -> None:
    told = prepare(slurm, no_kill=False)
    assert told["active"] == ["n2", "n3", "n4"]
    assert told["spares"] == ["n1"]
    assert told["launcher_host"] == "198.18.0.11"
    assert ["--no-kill", True] in [check[:2] for check in told["checks"]]
    (answers,) = [text for name, _, text in told["checks"] if name == "nodes answer"]
    assert answers.startswith("n[1-4]: python ")


@pytest.mark.matrix
def test_no_kill_variable_at_submission_is_found(slurm: MiniCluster) -> None:
    told = prepare(slurm, header="", no_kill=False, env={"SBATCH_NO_KILL": "set"})
    assert ["--no-kill", True, "the job outlives its nodes (SBATCH_NO_KILL is set)"] in told[
        "checks"
    ]


def test_no_kill_on_the_command_line_is_taken_on_trust(slurm: MiniCluster) -> None:
    # Slurm 22.05 without accounting keeps no trace of it.
    assert sentence(launch(slurm, header="")).endswith("command line: --assume-no-kill)")
    ended = launch(slurm, "--assume-no-kill --spares 5", header="")
    assert (ended.exit_code, "--spares 5" in sentence(ended)) == (2, True)


def test_too_few_nodes_are_told(slurm: MiniCluster) -> None:
    ended = launch(slurm, "--nodes 4 --spares 1")
    assert ended.exit_code == 2
    assert sentence(ended) == (
        "--nodes 4 and --spares 1 need 5 nodes, but the allocation has 4: "
        "allocate more (sbatch --nodes=5) or ask for fewer"
    )


def test_launcher_under_srun_is_refused(slurm: MiniCluster) -> None:
    ended = launch(slurm, before="srun --no-kill --nodes=1 --ntasks=1")
    assert "deadpool-launch was started by srun" in sentence(ended)


def test_dry_run_prints_the_steps_and_starts_none(slurm: MiniCluster) -> None:
    ended = launch(slurm, "--spares 1 --dry-run")
    assert ended.exit_code == 0
    commands = [shlex.split(line) for line in ended.output.splitlines() if line.startswith("srun ")]
    assert [word for command in commands for word in command if word.startswith("--nodelist")] == [
        f"--nodelist={node}" for node in ("n2", "n3", "n4", "n1")
    ]
    for command in commands:
        assert {"--overlap", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"} <= set(command)
    assert "the script ran" not in ended.output


def test_run_directory_that_is_not_shared_is_told_with_the_nodes(slurm: MiniCluster) -> None:
    command = f"{prepare_command(slurm, Path('/dev/shm/run'))}; rm -r /dev/shm/run"
    told = finish(slurm, submit(slurm, command)).told
    assert told["error"] == (
        "the run directory /dev/shm/run on n[2-4] is not the one that the launcher's node has; "
        "choose a --run-dir on a file system that all nodes share and can write"
    )


@pytest.mark.matrix
def test_node_without_the_checkpoint_directory_is_left_out_and_named(slurm: MiniCluster) -> None:
    """On one node the path leads nowhere, as /dev/shm is each node's own."""
    where = "/dev/shm/ckpt-of-a-test"
    for node in ("n2", "n3"):
        slurm.run_on(node, ["ln", "-s", str(slurm.base), where])
    command = f"ln -s {slurm.base} {where}; {prepare_command(slurm)} {where}; rm {where}"
    told = finish(slurm, submit(slurm, command)).told
    for node in ("n2", "n3"):
        slurm.run_on(node, ["rm", where])
    assert (told["active"], told["spares"]) == (["n2", "n3", "n1"], [])
    text = f"the checkpoint directory {where} on n4 is not the one that the launcher's node has"
    assert ["checkpoint directory", False, text] in told["checks"]


@pytest.mark.parametrize(
    "fault",
    [
        "power_off",
        *(pytest.param(each, marks=pytest.mark.matrix) for each in ("freeze", "mark_down")),
    ],
)
def test_node_lost_before_the_start_costs_the_spare(slurm: MiniCluster, fault: str) -> None:
    go = slurm.base / f"go-{fault}"
    waiting = f"while [ ! -e {go} ]; do sleep 0.1; done"
    job = submit(slurm, f"{waiting}\n{prepare_command(slurm)}")
    slurm.wait_job_state(job, "RUNNING", PATIENCE_S)
    getattr(slurm, fault)("n3")
    go.touch()
    told = finish(slurm, job).told
    assert told["active"] == ["n2", "n4", "n1"]
    assert told["spares"] == []
    assert [text for _, ok, text in told["checks"] if ok is None and "n3" in text]


@pytest.mark.matrix
def test_silent_node_that_blocks_the_first_step_is_given_back(slurm: MiniCluster) -> None:
    # With this time-out the node turns silent soon, and DOWN only after the test.
    slurm.set_slurmd_timeout(90)
    go = slurm.base / "go-silent"
    waiting = f"while [ ! -e {go} ]; do sleep 0.1; done"
    job = submit(slurm, f"{waiting}\n{prepare_command(slurm)}")
    slurm.wait_job_state(job, "RUNNING", PATIENCE_S)
    slurm.power_off("n3")
    slurm.wait_node_state("n3", lambda state: "NOT_RESPONDING" in state, PATIENCE_S)
    go.touch()
    told = finish(slurm, job).told
    assert told["active"] == ["n2", "n4", "n1"]
    assert [text for *_, text in told["checks"] if text.startswith("n3 given back to Slurm")]


@pytest.mark.parametrize("grace_s", [pytest.param(0.0, marks=pytest.mark.matrix), 1.0])
def test_stopped_agent_leaves_nothing_on_its_node(slurm: MiniCluster, grace_s: float) -> None:
    where = slurm.base / f"agent-{grace_s}"
    where.mkdir()
    script = job_script(slurm, "agent.py", AGENT)
    command = shlex.join([sys.executable, str(script), str(where), "n3", str(grace_s)])
    # The job's own geometry must not reach the step.
    job = submit(slurm, command, extra_args=["--ntasks-per-node=2", "--cpus-per-task=2"])
    wait_until((where / "up").exists, bool, what="the agent is up", timeout_s=PATIENCE_S)
    assert len(slurm.find_processes("n3", "sleep 100001")) >= 2
    (where / "stop").touch()
    assert finish(slurm, job).told.startswith("137 ")
    assert slurm.find_processes("n3", "sleep 100001") == []


def test_agent_stopped_while_its_step_is_being_made_leaves_nothing(slurm: MiniCluster) -> None:
    where = slurm.base / "agent-early"
    where.mkdir()
    script = job_script(slurm, "agent.py", AGENT)
    run = shlex.join([sys.executable, str(script), str(where), "n3", "0", "early"])
    # The job outlives the launcher, so that it is not the job's end that ends the step.
    job = submit(slurm, f"{run}; touch {where}/done; while true; do sleep 1; done")
    wait_until((where / "done").exists, bool, what="the agent is stopped", timeout_s=PATIENCE_S)
    assert slurm.find_processes("n3", "sleep 100001") == []

    def listed() -> list[str]:
        argv = ["squeue", "-h", "--steps", "-j", str(job), "-o", "%j"]
        names = slurm.run_on("n1", argv).stdout.split()
        return [name for name in names if name.startswith("deadpool-")]

    # Slurm may list it for a moment after its end.
    wait_until(
        listed, lambda steps: not steps, what="the step is listed no more", timeout_s=PATIENCE_S
    )


SLURMS_OWN = ("scontrol", "squeue", "scancel", "sacct", "sinfo", "sbatch", "salloc")


def container_path(slurm: MiniCluster, srun: str) -> str:
    """A PATH as a container has it: the system's programs, of Slurm's nothing but srun."""
    folder = slurm.base / "bin"
    folder.mkdir(exist_ok=True)
    for path in [*Path("/usr/bin").iterdir(), *Path("/usr/sbin").iterdir()]:
        if path.name not in SLURMS_OWN:
            with contextlib.suppress(FileExistsError):
                (folder / path.name).symlink_to(path)
    (folder / "srun").unlink(missing_ok=True)
    (folder / "srun").symlink_to(srun)
    return f"{Path(sys.executable).parent}:{folder}"


@pytest.mark.matrix
def test_container_without_scontrol_is_refused_with_what_is_missing(slurm: MiniCluster) -> None:
    path = container_path(slurm, "/usr/bin/srun")
    ended = launch(slurm, before=f"PATH={path}")
    assert ended.exit_code == 10
    assert "scontrol and squeue and scancel are not on the PATH" in sentence(ended)
    assert "the script ran" not in ended.output


@pytest.mark.matrix
def test_container_without_scontrol_has_a_job_through_pyslurm(newer_slurm: MiniCluster) -> None:
    python = os.environ.get("DEADPOOL_PYSLURM_PYTHON")
    if not python:
        pytest.skip("DEADPOOL_PYSLURM_PYTHON does not name a Python that has pyslurm")
    path = container_path(newer_slurm, f"{os.environ['DEADPOOL_SLURM_PREFIX']}/bin/srun")
    run_dir = newer_slurm.base / "in-container"
    script = job_script(newer_slurm, "hello.py", "print('the script ran')\n")
    before = f"PATH={path} DEADPOOL_PYSLURM_PYTHON={python}"
    command = f"{before} deadpool-launch --spares 1 --run-dir {run_dir} {script}"
    ended = finish(newer_slurm, submit(newer_slurm, command, nodes=3))
    assert ended.exit_code == 0, ended.output
    checks = [json.loads(line) for line in (run_dir / "journal.jsonl").read_text().splitlines()]
    told = [record["text"] for record in checks if record.get("check") == "Slurm access"]
    assert told == [
        "Slurm is asked by pyslurm, as scontrol and squeue and scancel are not on the PATH"
    ]


# ---------------------------------------------------------------- deadpool preflight


def preflight(slurm: MiniCluster, arguments: str, *, before: str = "", **how: Any) -> Any:
    """What ``deadpool preflight`` tells inside of a job of four nodes; rows by the check's name."""
    path, runs = slurm.base / "preflight.json", slurm.base / "deadpool-runs"
    there = {runs, *runs.glob("*")} if runs.exists() else set()
    command = f"{before} deadpool preflight --json {arguments} > {path}"
    ended = finish(slurm, submit(slurm, command, **how), LONG_S)
    assert path.exists(), ended.output
    told = json.loads(path.read_text() or "{}")
    assert told.get("exit_code") == ended.exit_code, ended.output
    assert ({runs, *runs.glob("*")} if runs.exists() else set()) == there
    return told


def results(told: Any) -> dict[str, str]:
    return {check["check"]: check["result"] for check in told["checks"]}


def text_of(told: Any, name: str) -> str:
    return next(str(check["text"]) for check in told["checks"] if check["check"] == name)


def test_allocation_is_looked_at_from_inside(slurm: MiniCluster) -> None:
    told = preflight(slurm, "--spares 1 --state-bytes 1M")
    assert told["exit_code"] == 0, told
    assert told["nodes"] == ["n1", "n2", "n3", "n4"]
    well = {"--no-kill", "stepmgr", "SlurmdTimeout", "node state", "nodes answer", "run directory"}
    well |= {"libraries", "clock", "ports", "memory", "spares"}
    assert {name for name, result in results(told).items() if result == "ok"} >= well
    assert text_of(told, "ports") == "every node reaches the launcher and 3 other nodes"
    assert text_of(told, "SlurmdTimeout").startswith("Slurm marks a dead node DOWN after 300 to")
    # Debian's 22.05 has defects; its srun names what it can start.
    assert results(told)["Slurm version"] == "warn"
    assert "pmi2" in text_of(told, "MPI kind")


@pytest.mark.matrix
def test_allocation_that_would_end_with_its_first_node_is_refused(slurm: MiniCluster) -> None:
    told = preflight(slurm, "--spares 1 --self-test", header="", no_kill=False)
    assert told["exit_code"] == 10
    assert told["verdict"] == "Hot swap cannot work here: --no-kill."
    assert (results(told)["--no-kill"], results(told)["self-test"]) == ("fail", "unknown")


@pytest.mark.matrix
def test_login_node_tells_what_slurm_says_alone(slurm: MiniCluster) -> None:
    program = str(Path(sys.executable).with_name("deadpool"))
    done = slurm.run_on(HEAD, [program, "preflight", "--json"])
    assert done.returncode == 50, done.stderr
    told = json.loads(done.stdout)
    assert results(told)["SlurmdTimeout"] == "ok"
    assert results(told)["ports"] == "unknown"


@pytest.mark.matrix
def test_node_behind_a_firewall_is_named(slurm: MiniCluster) -> None:
    """Nothing that n2 sends arrives at n4; both reach the launcher on n1."""
    slurm.part("n2", ["n4"])
    told = preflight(slurm, "--spares 1 --agent-start-timeout 240")
    slurm.heal("n2")
    assert results(told)["ports"] == "fail"
    assert "n4 is not reached by n2" in json.dumps(told)


@pytest.mark.matrix
@pytest.mark.timeout(1000)
def test_self_test_and_mpi_world_in_a_job(slurm: MiniCluster) -> None:
    """And no step, process or file of them stays: the fixture looks for the last two."""
    over_tcp = " ".join(f"{name}={value}" for name, value in MPICH_OVER_TCP.items())
    told = preflight(
        slurm,
        "--spares 1 --self-test --mpi pmi2 --agent-start-timeout 240",
        before=f"env {over_tcp}",
    )
    assert told["exit_code"] == 0, told
    assert text_of(told, "MPI world").startswith("4 nodes were one world after ")
    text = text_of(told, "self-test")
    assert re.match(r"n[234] was lost to a small job; n[1234] took its rank, and training", text)
