"""The launcher is killed on real Slurm: its job steps live on, and the next launcher has them."""

from __future__ import annotations

import os
import signal

import pytest
from mini_cluster import MiniCluster
from training_job import TrainingJob, submit

pytestmark = [pytest.mark.cluster, pytest.mark.matrix]

STEPS = 30
LAUNCH = ["--spares=1", "--agent-start-timeout=300"]
#: Generous, in seconds.
LONG_S = 400.0


def kill_launcher(job: TrainingJob) -> None:
    """SIGKILL to the newest launcher."""
    os.kill(job.launcher_process(), signal.SIGKILL)


def test_launcher_is_killed_and_a_node_is_lost_under_the_next(slurm: MiniCluster) -> None:
    undisturbed = submit(slurm, launch=LAUNCH, script_args=[f"--steps={STEPS}"])
    assert undisturbed.wait_end(LONG_S)["exit_code"] == 0, undisturbed.everything()
    args = [f"--steps={STEPS}", "--step-s=0.1", "--hold=1:20:backward"]
    job = submit(slurm, launch=LAUNCH, script_args=args)
    job.wait("step 3", lambda: job.records("step", step=3), LONG_S)
    kill_launcher(job)
    job.wait("the next launcher", lambda: "started again from its journal" in job.said(), LONG_S)
    assert "term 2; 4 agents are back, no rank was disturbed" in job.said()
    assert not job.records("incident")
    # Steps that the first launcher began can be ended by the second.
    job.wait_held(1, 20)
    job.strike("power-off", 1)
    end = job.wait_end(LONG_S)
    assert end["exit_code"] == 0, job.everything()
    assert [record["verdict"] for record in job.incidents()] == ["continued"]
    processes = job.process_ids()
    assert {rank: len(ids) for rank, ids in processes.items()} == {0: 1, 1: 2, 2: 1}
    assert job.final_state() == undisturbed.final_state(), job.everything()


def test_scancel_after_the_launcher_was_killed_leaves_nothing(slurm: MiniCluster) -> None:
    args = ["--steps=100000", "--step-s=0.02"]
    job = submit(slurm, launch=LAUNCH, script_args=args)
    job.wait("step 3", lambda: job.records("step", step=3), LONG_S)
    kill_launcher(job)
    job.wait("the next launcher", lambda: "started again from its journal" in job.said(), LONG_S)
    slurm.cancel(job.job_id)
    slurm.wait_job(job.job_id, LONG_S)
    assert [end["exit_code"] for end in job.records("end")] == [143], job.everything()
