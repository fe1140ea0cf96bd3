"""A job of sixteen ranks that loses every fourth node in one instant."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import local_run
import pytest
from local_run import explain, final_state, records, wait, warm

STRUCK = 4
SIZE = ("--nodes", 8, "--nproc-per-node", 2, "--agent-start-timeout", 600)
STEPS = ("--steps", 8)
LOST = ("local4", "local8")
SPARES = ("local9", "local10")


@pytest.mark.matrix
@pytest.mark.timeout(1200)
def test_every_fourth_node_is_lost_at_once_and_that_is_one_incident(tmp_path: Path) -> None:
    quiet = local_run.run(tmp_path / "quiet", *SIZE, "--", *STEPS)
    assert quiet.returncode == 0, explain(quiet, tmp_path / "quiet")
    run_dir = tmp_path / "run"
    options = (*SIZE, "--spares", 2, "--", *STEPS, "--hold", f"0:{STRUCK}:backward")
    with local_run.started(run_dir, *options) as launcher:
        wait("both spares are warm", lambda: warm(run_dir) >= set(SPARES))
        wait("the step", (run_dir / f"hold-0-{STRUCK}").exists)
        agents = [local_run.agent_of(launcher.pid, node).pid for node in LOST]
        # The launcher sleeps meanwhile, so that it sees all losses in one instant.
        leader = local_run.launcher_of(run_dir)
        os.kill(leader, signal.SIGSTOP)
        for pid in agents:
            os.kill(pid, signal.SIGKILL)
        wait("all are gone", lambda: not any(map(local_run.alive, agents)))
        os.kill(leader, signal.SIGCONT)
        (run_dir / f"release-0-{STRUCK}").touch()
        said, _ = launcher.communicate(timeout=2 * local_run.LONG_S)
    assert launcher.returncode == 0, said
    (closed,) = records(run_dir, "incident", phase="closed")
    assert (closed["verdict"], closed["replayed_steps"]) == ("continued", 0), said
    moved = {record["rank"]: record for record in records(run_dir, "rank") if record["epoch"] > 1}
    assert {(rank, record["epoch"]) for rank, record in moved.items()} == {
        (rank, 2) for rank in (6, 7, 14, 15)
    }
    assert {record["node"] for record in moved.values()} == set(SPARES)
    assert final_state(run_dir) == final_state(tmp_path / "quiet"), said
