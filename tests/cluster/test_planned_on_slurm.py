"""Real Slurm drains a node with ranks, and a job ends before its time limit and is requeued."""

from __future__ import annotations

import re

import pytest
from mini_cluster import MiniCluster
from mini_cluster_nodes import wait_until
from training_job import submit

pytestmark = [pytest.mark.cluster, pytest.mark.matrix]

STEPS = 16
LAUNCH = ["--spares=1", "--agent-start-timeout=300"]
#: Generous, in seconds.
LONG_S = 400.0


def policy(slurm: MiniCluster, text: str) -> str:
    path = slurm.base / "policy.yaml"
    path.write_text(text)
    return f"--policy={path}"


def comment(slurm: MiniCluster, job_id: int) -> str:
    """What ``squeue`` and ``scontrol`` show with the job."""
    shown = slurm._scontrol("show", "job", str(job_id))
    found = re.search(r"^ *Comment=(.*?) *$", shown, re.MULTILINE)
    return found[1] if found else ""


def test_node_that_slurm_drains_hands_its_ranks_over(slurm: MiniCluster) -> None:
    undisturbed = submit(slurm, launch=LAUNCH, script_args=[f"--steps={STEPS}"])
    assert undisturbed.wait_end(LONG_S)["exit_code"] == 0, undisturbed.everything()
    often = policy(slurm, "slurm.poll: 5s\n")
    args = [f"--steps={STEPS}", "--hold=1:8:forward"]
    job = submit(slurm, launch=[*LAUNCH, often, "--job-comment"], script_args=args)
    job.wait("rank 1 in step 8", (job.run_dir / "hold-1-8").exists, LONG_S)
    trains = "deadpool: training; nodes: 3 active, 1 spare; epoch 1"
    job.wait("the job's comment", lambda: comment(slurm, job.job_id) == trains, LONG_S)
    node = job.node_of(1)
    slurm.drain(node, "fan 3 is loud")
    job.wait("what Slurm says", lambda: "fan 3 is loud" in job.said(), LONG_S)
    job.release(1, 8)
    end = job.wait_end(LONG_S)
    assert end["exit_code"] == 0, job.everything()
    assert f"{node} is drained (Slurm has it as " in job.said()
    (closed,) = job.incidents()
    assert (closed["verdict"], closed["replayed_steps"]) == ("continued", 0), job.everything()
    assert {rank: len(ids) for rank, ids in job.process_ids().items()} == {0: 1, 1: 2, 2: 1}
    assert job.node_of(1) != node
    assert job.final_state() == undisturbed.final_state(), job.everything()
    assert comment(slurm, job.job_id) == "deadpool: completed (exit code 0)"


def test_job_ends_before_its_limit_and_goes_back_to_the_queue(slurm: MiniCluster) -> None:
    early = policy(slurm, "slurm.poll: 5s\ntime_limit.reserve: 570s\n")
    folder = slurm.base / "checkpoints"
    saves = [f"--checkpoint-dir={folder}", "--checkpoint-every=100000", "--requeue-before-limit"]
    job = submit(
        slurm,
        launch=[*LAUNCH, early, *saves],
        script_args=["--steps=100000", "--step-s=0.05"],
        sbatch=["--requeue", "--time=30"],
    )
    job.wait("step 3", lambda: job.records("step", step=3), LONG_S)
    # From now on the job is in its reserve, with time for a machine that is busy.
    slurm._scontrol("update", f"JobId={job.job_id}", "TimeLimit=10")
    wait_until(lambda: job.records("end"), bool, what="the end", timeout_s=LONG_S)
    (end,) = job.records("end")
    assert end["exit_code"] == 75, job.everything()
    reason = "stopped before the time limit (570 s before the time limit) after step "
    assert end["reason"].startswith(reason), job.everything()
    assert end["reason"].endswith(", whose checkpoint is complete")
    wait_until(
        lambda: slurm.job_state(job.job_id),
        lambda state: state == "PENDING",
        what="the queue",
        timeout_s=LONG_S,
    )
    slurm.cancel(job.job_id)
