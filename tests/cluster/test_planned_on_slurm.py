"""Real Slurm drains a node with ranks, and a job ends before its time limit and is requeued."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mini_cluster import KILL_WAIT_S, MiniCluster
from mini_cluster_nodes import wait_until
from training_job import SCRIPT, TrainingJob, submit

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


@pytest.mark.timeout(1500)
def test_job_ends_before_its_limit_and_goes_on_from_its_checkpoint_once_it_is_requeued(
    slurm: MiniCluster,
) -> None:
    early = policy(slurm, "slurm.poll: 5s\ntime_limit.reserve: 570s\n")
    folder, runs = slurm.base / "checkpoints", slurm.base / "deadpool-runs"
    saves = [f"--checkpoint-dir={folder}", "--checkpoint-every=100000", "--requeue-before-limit"]
    launch = [str(Path(sys.executable).parent / "deadpool-launch"), *LAUNCH, early, *saves]
    command = shlex.join([*launch, str(SCRIPT), "--", "--steps=100000", "--step-s=0.05"])
    text = f"#!/bin/bash\n#SBATCH --no-kill --output={slurm.base}/out --open-mode=append\n"
    text += f"cd {slurm.base}\nexec {command}\n"
    job_id = slurm.submit(text, nodes=4, no_kill=False, extra_args=["--requeue", "--time=30"])
    first = TrainingJob(slurm, job_id, runs / str(job_id))
    wait_until(
        lambda: first.run_dir.exists() and first.records("step", step=3),
        bool,
        what="step 3",
        timeout_s=LONG_S,
    )
    # From now on the job is in its reserve, with time for a machine that is busy.
    slurm._scontrol("update", f"JobId={job_id}", "TimeLimit=10")
    wait_until(lambda: first.records("end"), bool, what="the end", timeout_s=LONG_S)
    (end,) = first.records("end")
    assert end["exit_code"] == 75, first.everything()
    reason = "stopped before the time limit (570 s before the time limit) after step "
    assert end["reason"].startswith(reason), first.everything()
    assert end["reason"].endswith(", whose checkpoint is complete")
    (checkpoint,) = first.records("checkpoint")
    wait_until(
        lambda: slurm.job_state(job_id),
        lambda state: state == "PENDING",
        what="the queue",
        timeout_s=LONG_S,
    )
    slurm._scontrol("update", f"JobId={job_id}", "TimeLimit=60")
    # Slurm lets it begin again after some minutes.
    second = TrainingJob(slurm, job_id, runs / f"{job_id}-2")
    after = checkpoint["step"]
    wait_until(
        lambda: second.run_dir.exists() and second.records("step", step=after + 1),
        bool,
        what="its next step",
        timeout_s=2 * LONG_S,
    )
    where = folder / str(job_id)
    assert f"goes on from the durable checkpoint of step {after} in {where}" in second.said()
    assert {record["step"] for record in second.records("step") if record["step"] <= after} == {0}
    slurm.cancel(job_id)


@pytest.fixture
def slow_to_kill(slurm: MiniCluster) -> Iterator[MiniCluster]:
    """A cluster with Slurm's own time between SIGTERM and SIGKILL."""
    slurm.set_kill_wait(30)
    yield slurm
    slurm.set_kill_wait(KILL_WAIT_S)


def test_sigterm_at_the_limit_leaves_the_ranks_the_time_for_their_last_checkpoint(
    slow_to_kill: MiniCluster,
) -> None:
    """Slurm sends it to every process of the job, and no signal came before."""
    slurm = slow_to_kill
    often = policy(slurm, "slurm.poll: 5s\n")
    saves = [f"--checkpoint-dir={slurm.base / 'at-limit'}", "--checkpoint-every=100000"]
    job = submit(
        slurm,
        launch=[*LAUNCH, often, *saves],
        script_args=["--steps=100000", "--step-s=0.05"],
        sbatch=["--time=2"],
    )
    job.wait("step 3", lambda: job.records("step", step=3), LONG_S)
    wait_until(lambda: job.records("end"), bool, what="the end", timeout_s=LONG_S)
    (end,) = job.records("end")
    assert end["exit_code"] == 75, job.everything()
    reason = "stopped before the time limit (SIGTERM at the time limit) after step "
    assert end["reason"].startswith(reason), job.everything()
    assert end["reason"].endswith(", whose checkpoint is complete"), job.everything()
    assert not job.incidents()
    assert slurm.wait_job(job.job_id, LONG_S).state == "TIMEOUT"
