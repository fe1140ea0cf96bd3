"""A node that was given up comes back with a fresh agent, is a spare, and takes ranks again."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import local_run
import psutil
from local_run import records, wait

STEPS = ("--", "--steps", 100000, "--step-s", 0.2)


def kill_agent(launcher: int, node: str) -> None:
    for child in local_run.family(launcher):
        with contextlib.suppress(psutil.Error):
            if "deadpool_launch.agent" in child.cmdline() and node in child.cmdline():
                child.kill()


def wait_replicated(run_dir: Path) -> None:
    """Wait until steps have replicas on the other node, which has just come up.

    From then on each step has one before the next one ends.
    """
    newest = max((record["step"] for record in records(run_dir, "step")), default=0)
    wait("steps", lambda: records(run_dir, "step", step=newest + 10))


def taken(run_dir: Path) -> list[str]:
    """Where the processes of rank 0 have been."""
    return [record["node"] for record in records(run_dir, "rank", rank=0)]


def test_node_whose_agent_was_killed_comes_back_and_takes_its_rank_again(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    checked = f"echo x >> {tmp_path}/checked-$DEADPOOL_NODE"
    admission = [{"command": checked, "timeout": "60s"}]
    path.write_text(json.dumps({"readmit.after": "1s", "admission": admission}))
    run_dir = tmp_path / "run"
    options = ("--nodes", 1, "--spares", 1, "--agent-start-timeout", 180, "--policy", path)
    with local_run.started(run_dir, *options, *STEPS) as process:
        wait("the spare", lambda: records(run_dir, "event", name="AgentWarm", node="local2"))
        wait_replicated(run_dir)
        kill_agent(process.pid, "local1")
        wait("the spare", lambda: records(run_dir, "say", text="local1 is back as a spare"))
        assert taken(run_dir) == ["local1", "local2"]
        # Once by the preflight, and once before it is a spare.
        assert (tmp_path / "checked-local1").read_text() == "x\nx\n"
        wait_replicated(run_dir)
        kill_agent(process.pid, "local2")
        newest = max(record["step"] for record in records(run_dir, "step"))
        wait("steps", lambda: records(run_dir, "step", step=newest + 5))
        assert taken(run_dir) == ["local1", "local2", "local1"]
        process.terminate()
        out, _ = process.communicate(timeout=local_run.LONG_S)
    assert process.returncode == 143, out
    steps = [record["step"] for record in records(run_dir, "step")]
    assert set(steps) == set(range(max(steps) + 1)), "no step was left out"
