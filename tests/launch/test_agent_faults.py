"""What is not a node may die as well: the parked process, an agent; and what it does to the job."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import local_run
import psutil
import pytest
from local_run import records, wait

ENDLESS = ["--", "--steps", 100000, "--step-s", 0.02]


def find(pid: int, module: str, node: str) -> psutil.Process:
    """What the node's agent started to run ``module``."""
    for child in local_run.family(pid):
        # Any process may end while it is looked at.
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if _runs(child, module, node):
                return child
    raise AssertionError(f"no {module} of {node}")


def _runs(process: psutil.Process, module: str, node: str) -> bool:
    if module not in " ".join(process.cmdline()) or process.status() == psutil.STATUS_ZOMBIE:
        return False
    # Ranks are forked from the parked process and have its command line, and sessions of their own.
    agent = process.parent()
    if agent is None or node not in agent.cmdline():
        return False
    return "zygote" not in module or os.getsid(process.pid) != process.pid


def test_parked_process_is_replaced_and_ranks_do_not_notice(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with local_run.started(run_dir, "--nodes", 2, *ENDLESS) as process:
        wait("steps", lambda: records(run_dir, "step", step=2))
        parked = find(process.pid, "deadpool_runtime.zygote", "local1")
        parked.kill()
        wait("a new parked process", lambda: _replaced(process.pid, parked.pid))
        before = max(record["step"] for record in records(run_dir, "step"))
        wait("more steps", lambda: records(run_dir, "step", step=before + 5))
        assert not records(run_dir, "incident")
        # The new one can fork: a rank of the node is killed and restarted.
        os.kill(records(run_dir, "rank", rank=0)[-1]["pid"], signal.SIGKILL)
        wait("the repair", lambda: records(run_dir, "incident", phase="closed"))
        assert records(run_dir, "rank", rank=0)[-1]["node"] == "local1"
        process.send_signal(signal.SIGINT)
        assert process.wait(local_run.LONG_S) == 130


def _replaced(launcher: int, old: int) -> bool:
    try:
        return find(launcher, "deadpool_runtime.zygote", "local1").pid != old
    except AssertionError:
        return False


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_agent_alone_dies_or_freezes_and_its_node_is_replaced(
    tmp_path: Path, signum: signal.Signals
) -> None:
    run_dir = tmp_path / "run"
    with local_run.started(run_dir, "--nodes", 2, "--spares", 1, *ENDLESS) as process:
        wait("steps", lambda: records(run_dir, "step", step=2))
        old = records(run_dir, "rank", rank=1)[-1]["pid"]
        local_run.agent_of(process.pid, "local2").send_signal(signum)
        closed = wait("the swap", lambda: records(run_dir, "incident", phase="closed"))
        assert closed[0]["verdict"] == "continued"
        assert records(run_dir, "rank", rank=1)[-1]["node"] == "local3"
        wait("the old rank is gone", lambda: not local_run.alive(old))
        process.send_signal(signal.SIGINT)
        assert process.wait(local_run.LONG_S) == 130


def test_replicator_is_replaced_and_ranks_do_not_notice(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with local_run.started(run_dir, "--nodes", 2, "--spares", 1, *ENDLESS) as process:
        wait("steps", lambda: records(run_dir, "step", step=2))
        find(process.pid, "replication.replicator", "local2").kill()
        wait("a new replicator", lambda: records(run_dir, "event", name="ReplicatorUp"))
        before = max(record["step"] for record in records(run_dir, "step"))
        wait("more steps", lambda: records(run_dir, "step", step=before + 5))
        assert not records(run_dir, "incident")
        # Replicas go to the new one: the other node may be lost.
        local_run.agent_of(process.pid, "local1").kill()
        closed = wait("the swap", lambda: records(run_dir, "incident", phase="closed"))
        assert closed[0]["verdict"] == "continued"
        process.send_signal(signal.SIGINT)
        assert process.wait(local_run.LONG_S) == 130
    assert not list(Path("/dev/shm").glob(f"deadpool-{run_dir.name}.*"))


def test_launcher_that_was_stopped_for_a_while_blames_nobody(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = ("--nodes", 2, "--spares", 1, "--heartbeat-timeout", 2, *ENDLESS)
    with local_run.started(run_dir, *options) as process:
        wait("steps", lambda: records(run_dir, "step", step=2))
        launcher = records(run_dir, "job")[0]["pid"]
        os.kill(launcher, signal.SIGSTOP)
        # Twice the time-out: the silence lies with the launcher.
        time.sleep(4)
        os.kill(launcher, signal.SIGCONT)
        before = max(record["step"] for record in records(run_dir, "step"))
        wait("more steps", lambda: records(run_dir, "step", step=before + 20))
        assert not records(run_dir, "incident")
        process.send_signal(signal.SIGINT)
        assert process.wait(local_run.LONG_S) == 130
