"""What findings mean: which stop a job, which leave a node out, which are only worth reading."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from deadpool_launch import driver
from deadpool_launch.backends.base import Allocation, Check
from deadpool_launch.backends.slurm import SlurmBackend
from deadpool_launch.backends.slurm_steps import blame, last_error
from deadpool_launch.errors import UnsuitableError, UsageError
from deadpool_launch.journal import Journal
from deadpool_launch.options import LaunchOptions
from deadpool_launch.preflight import gather, lookups, node_rules, slurm_rules
from deadpool_launch.preflight import probe as preflight_probe
from deadpool_launch.preflight.facts import NOT_SHARED, PREFIX, Directories, ProbeTask
from deadpool_launch.preflight.probe import token_path
from deadpool_launch.prepare import assign
from deadpool_slurm import environ, parse
from deadpool_slurm.client import SlurmClient, SlurmError
from deadpool_slurm.ways import Choice

NODES = ("n1", "n2", "n3")
FACTS: dict[str, Any] = {
    "python": "3.11.7",
    "deadpool": "0.1.0",
    "torch": "2.13.0",
    "run_dir": "",
    "shm_free_nbytes": 8 << 30,
    "clock": 1000.0,
    "received_at": 1000.0,
}


OWN = {**FACTS, "node": "n1"}
DIRECTORIES = Directories("/runs/7", "/ckpt")


def probed(**changes: dict[str, Any]) -> list[Check]:
    """The checks of three nodes, of which some differ; the launcher is on n1."""
    probes = {node: {**FACTS, "node": node, **changes.get(node, {})} for node in NODES}
    return node_rules.probe_checks(NODES, probes, OWN, {}, DIRECTORIES)


IN_JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURMD_NODENAME": "n1",
    "DEADPOOL_SLURM_ACCESS": "commands",
}


def slurm_checks(path: Path) -> list[Check]:
    """What the preflight of a job finds whose launcher has this PATH."""
    backend = SlurmBackend({**IN_JOB, "PATH": str(path)})
    options = LaunchOptions(script="/t.py", site="slurm", run_dir=str(path / "run"))
    backend.discover(options)
    return asyncio.run(backend.preflight(options))


def programs(folder: Path, *names: str) -> Path:
    """A folder with these programs; none of them does anything."""
    for name in names:
        (folder / name).write_text("#!/bin/sh\nexit 1\n")
        (folder / name).chmod(0o755)
    return folder


def test_a_container_without_slurms_commands_is_refused_with_what_is_missing(
    tmp_path: Path,
) -> None:
    (check,) = slurm_checks(programs(tmp_path, "srun", "squeue", "scancel"))
    assert (check.ok, check.text) == (False, "Slurm cannot be asked: scontrol is not on the PATH")
    assert "install deadpool-launch[pyslurm]" in check.remedy
    with pytest.raises(UnsuitableError, match="scontrol is not on the PATH") as refused:
        assign(Allocation("7", NODES, "n1", "n1"), LaunchOptions(script="/t.py"), [check])
    assert "\n" not in str(refused.value)


def test_a_container_without_srun_is_refused(tmp_path: Path) -> None:
    (first, *_) = slurm_checks(programs(tmp_path, "scontrol", "squeue", "scancel"))
    assert (first.ok, first.text) == (
        False,
        "srun is not on the PATH, and every agent is started with it",
    )


def test_how_slurm_is_asked_is_on_record() -> None:
    (check,) = slurm_rules.access_checks(
        Choice("pyslurm", "scontrol is not on the PATH"), srun=True
    )
    assert (check.ok, check.text) == (
        True,
        "Slurm is asked by pyslurm, as scontrol is not on the PATH",
    )
    # A client that was given is nobody's choice.
    assert slurm_rules.access_checks(None, srun=True) == []


def test_a_way_to_ask_slurm_that_there_is_not_is_refused() -> None:
    with pytest.raises(UsageError, match="DEADPOOL_SLURM_ACCESS=rest: must be commands or pyslurm"):
        SlurmBackend({**IN_JOB, "DEADPOOL_SLURM_ACCESS": "rest"})


def test_equal_nodes_are_one_line() -> None:
    (check,) = probed()
    assert check.ok is True
    assert check.text == (
        "n[1-3]: python 3.11.7, torch 2.13.0, run directory and checkpoint directory shared, "
        "clocks agree"
    )


@pytest.mark.parametrize("what", ["python", "deadpool", "torch"])
def test_node_with_another_environment_is_named_and_left_out(what: str) -> None:
    check, _ = probed(n2={what: "1.0"})
    assert (check.ok, check.leave_out) == (False, "n2")
    assert f"n2 has {what} 1.0, the launcher's node has {FACTS[what]}" in check.text


def test_missing_torch_everywhere_is_not_one_nodes_fault() -> None:
    facts = {**FACTS, "torch": None}
    checks = node_rules.probe_checks(NODES, {node: facts for node in NODES}, facts, {}, DIRECTORIES)
    assert {check.leave_out for check in checks} == {None}
    assert {check.ok for check in checks} == {False}


@pytest.mark.parametrize(
    ("key", "directory", "flag"),
    [
        ("run_dir", "run directory /runs/7", "--run-dir"),
        ("checkpoint_dir", "checkpoint directory /ckpt", "--checkpoint-dir"),
    ],
)
def test_node_that_does_not_see_a_shared_directory_is_left_out_and_named(
    key: str, directory: str, flag: str
) -> None:
    bad, good = probed(n3={key: NOT_SHARED})
    assert bad.text == f"the {directory} on n3 is not the one that the launcher's node has"
    assert bad.remedy == (
        f"mount it there, or choose a {flag} on a file system that all nodes share and can write"
    )
    assert (bad.ok, bad.leave_out) == (False, "n3")
    assert good.text.startswith("n[1-2]: ")


def test_directory_that_no_other_node_sees_stops_the_job() -> None:
    """Else a job of one node with spares would go on without any."""
    bad = probed(n2={"checkpoint_dir": NOT_SHARED}, n3={"checkpoint_dir": NOT_SHARED})[0]
    assert (bad.ok, bad.leave_out) == (False, None)
    assert bad.text == (
        "the checkpoint directory /ckpt on n[2-3] is not the one that the launcher's node has"
    )
    with pytest.raises(UnsuitableError, match=r"has; choose a --checkpoint-dir on a file system"):
        assign(ALLOCATION, options(nodes=1, spares=2), [bad])


def test_node_that_is_left_out_is_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [Check("run directory", False, "n3 is wrong", "mend it", leave_out="n3")]
    journal = Journal(tmp_path, print)
    driver._tell_checks(checks, journal, ignored=False)
    driver._tell_checks(checks, journal, ignored=True)
    journal.close()
    said = capsys.readouterr().out
    assert "n3 is left out: n3 is wrong; mend it\n" in said
    assert "ignored: n3 is wrong; mend it\n" in said


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"clock": 1060.0}, "the clock of n2 differs from the launcher's by +60.0 s"),
        ({"shm_free_nbytes": 64 << 20}, "n2 has only 64 MiB free in /dev/shm"),
    ],
)
def test_differences_that_stop_nothing(change: dict[str, Any], text: str) -> None:
    check, _ = probed(n2=change)
    assert (check.ok, check.text, check.leave_out) == (None, text, None)


def test_node_that_does_not_answer_is_left_out_with_the_reason() -> None:
    probes = {node: {**FACTS, "node": node} for node in ("n1", "n3")}
    bad, good = node_rules.probe_checks(
        NODES, probes, OWN, {"n2": "Connection refused"}, DIRECTORIES
    )
    assert (bad.text, bad.leave_out) == ("n2 did not answer: Connection refused", "n2")
    assert good.text.startswith("n[1,3]: ")


def test_line_of_a_node_is_found_among_others() -> None:
    line = f"0: {PREFIX}" + json.dumps({"node": "n1"}) + "\n"
    assert node_rules.read_probe(line, 5.0) == {"node": "n1", "received_at": 5.0}
    for other in ("hello\n", f"{PREFIX}[]\n", f"{PREFIX}{{\n", ""):
        assert node_rules.read_probe(other, 5.0) is None


def test_probe_runs_without_torch_and_leaves_nothing(tmp_path: Path) -> None:
    checkpoint_dir = tmp_path / "ckpt"
    checkpoint_dir.mkdir()
    for directory in (tmp_path, checkpoint_dir):
        token_path(directory, "abc").write_text("abc")
    before = sorted(tmp_path.rglob("*"))
    task = ProbeTask(run_dir=str(tmp_path), token="abc", checkpoint_dir=str(checkpoint_dir))
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *gather.probe_argv(task)[1:]],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "SLURMD_NODENAME": "n7"},
        capture_output=True,
        text=True,
        check=True,
    )
    facts = node_rules.read_probe(done.stdout, 0.0)
    assert facts is not None
    assert (facts["node"], facts["run_dir"], facts["checkpoint_dir"]) == ("n7", "", "")
    assert "| torch" not in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_directory_of_another_disk_is_told_from_the_launchers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight_probe, "_TOKEN_TIMEOUT_S", 0.0)
    token_path(tmp_path, "abc").write_text("abc")
    local = tmp_path / "local"
    local.mkdir()
    task = ProbeTask(run_dir=str(tmp_path), token="abc", checkpoint_dir=str(local))
    facts = preflight_probe.probe(task)
    assert (facts["run_dir"], facts["checkpoint_dir"]) == ("", NOT_SHARED)
    token_path(local, "abc").write_text("of another job")
    assert preflight_probe.probe(task)["checkpoint_dir"] == NOT_SHARED


@pytest.mark.parametrize("asked", [False, True])
def test_node_looks_up_its_address_where_its_ranks_would(
    asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "torch_asks", lambda host: asked and host == "127.0.0.1")
    token_path(tmp_path, "abc").write_text("abc")
    task = ProbeTask(run_dir=str(tmp_path), token="abc", launcher_host="127.0.0.1")
    names = preflight_probe.probe(task)["names"]
    assert (names["asked"], names["done"]) == (asked, True)
    assert names["address"] == ("127.0.0.1" if asked else "")
    assert (names["slowest_s"] > 0) is asked


def test_lookup_that_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    monkeypatch.setattr(lookups, "torch_asks", lambda _host: end.wait())
    found = lookups.look_up("127.0.0.1", longest_s=0.01)
    end.set()
    assert found == lookups.Lookups(asked=True, slowest_s=0.01, done=False)


def test_no_kill_is_proved_trusted_unknown_or_missing() -> None:
    assert slurm_rules.no_kill_check("seen", assumed=False).ok is True
    assert slurm_rules.no_kill_check(None, assumed=True).ok is True
    missing = slurm_rules.no_kill_check(None, assumed=False)
    assert missing.ok is False
    assert "#SBATCH --no-kill" in missing.remedy
    unknown = slurm_rules.no_kill_check(None, False, "scontrol did not answer within 10 s")
    assert unknown.ok is False
    assert "scontrol did not answer within 10 s" in unknown.text
    assert "--assume-no-kill" in unknown.remedy


def node(name: str, state: str) -> parse.NodeFacts:
    return parse.NodeFacts(name, name, state, "why", 4, parse.health_of(state))


def test_states_of_nodes() -> None:
    facts = {"n1": node("n1", "IDLE"), "n2": node("n2", "MIXED+DRAIN"), "n3": node("n3", "DOWN")}
    checks = slurm_rules.state_checks(("n1", "n2", "n3", "n4"), facts)
    assert [(check.ok, check.leave_out) for check in checks] == [
        (None, None),
        (None, "n3"),
        (None, None),
    ]
    assert checks[0].text == "n2 is MIXED+DRAIN (why)"
    assert checks[2].text == "Slurm says nothing about n4"


def test_node_that_left_the_job_is_left_out() -> None:
    job = parse.JobFacts("7", "RUNNING", ("n1", "n3"), "n1", None, False)
    (check,) = slurm_rules.job_checks(NODES, job)
    assert check.leave_out == "n2"


def options(**changes: Any) -> LaunchOptions:
    return LaunchOptions(script="/t.py", site="slurm", **changes)


ALLOCATION = Allocation("7", NODES, "n1", "n1")


def test_failure_of_the_whole_job_stops_it_with_the_remedy() -> None:
    checks = [Check("a", None, "fine"), Check("b", False, "it is broken", "mend it")]
    with pytest.raises(UnsuitableError, match=r"^it is broken; mend it$"):
        assign(ALLOCATION, options(), checks)
    assert assign(ALLOCATION, options(ignore_preflight=True), checks).world_size == 3


def test_failure_of_one_node_costs_a_spare_or_stops_with_its_reason() -> None:
    checks = [Check("b", False, "n2 is broken", "mend it", leave_out="n2")]
    assert assign(ALLOCATION, options(spares=1), checks).active == ("n3", "n1")
    with pytest.raises(UnsuitableError, match=r"n2 failed the checks \(n2 is broken; mend it\)$"):
        assign(ALLOCATION, options(), checks)
    assert assign(ALLOCATION, options(ignore_preflight=True), checks).world_size == 3


SAID = [
    "srun: cluster configuration lacks support for cpu binding",
    "srun: error: slurm_receive_msgs: [[n3]:6818] failed: Socket timed out",
    "srun: error: Task launch for StepId=3.0 failed on node n3: Socket timed out",
    "srun: error: Application launch failed: Socket timed out",
    "srun: Job step aborted",
]


def test_only_the_node_that_is_named_is_blamed() -> None:
    assert blame("n3", SAID) == "Task launch for StepId=3.0 failed on node n3: Socket timed out"
    assert blame("n", SAID) == ""
    assert blame("n33", SAID) == ""
    assert blame("n1", SAID) == ""


def test_errors_are_told_before_other_words() -> None:
    assert last_error(SAID) == "Application launch failed: Socket timed out"
    assert last_error(SAID[-1:]) == "srun: Job step aborted"
    assert last_error([]) == ""


class Deaf:
    """A ``SlurmClient`` without an answer."""

    def __getattr__(self, name: str) -> Any:
        raise SlurmError("asleep")


@pytest.mark.parametrize("variable", [True, False])
def test_job_that_slurm_does_not_show_may_still_have_its_variable(variable: bool) -> None:
    job = environ.read_job(IN_JOB | ({"SBATCH_NO_KILL": "set"} if variable else {}))
    assert job is not None
    facts = gather.job_facts(cast(SlurmClient, Deaf()), job, {}, None, mpi_too=False)
    assert (facts.job_problem, facts.submission_problem) == ("asleep", "asleep")
    options = LaunchOptions(script="/t.py", site="slurm")
    (check,) = [
        check
        for check in slurm_rules.slurm_checks(NODES, facts, options)
        if check.name == "--no-kill"
    ]
    assert check.ok is variable
    assert ("cannot be found out (asleep)" in check.text) is not variable
