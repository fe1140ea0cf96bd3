"""The host of the launcher dies, or stands still for a while, on real Slurm: a launcher on another
node takes over, and ends the job when training is done.
"""

from __future__ import annotations

import json

import pytest
from mini_cluster import MiniCluster
from training_job import TrainingJob, submit

pytestmark = [pytest.mark.cluster]

STEPS = 30
LAUNCH = ["--agent-start-timeout=300"]
#: Generous, in seconds.
LONG_S = 400.0


def batch_host(job: TrainingJob) -> str:
    host = job.cluster.job_info(job.job_id).batch_host
    assert host
    return host


def ended_with(job: TrainingJob) -> dict[str, object]:
    """The result in the run directory, once Slurm has the allocation back."""
    job.cluster.wait_job(job.job_id, LONG_S, accept_completing=True)
    path = job.run_dir / "result.json"
    assert path.exists(), job.everything()
    found: dict[str, object] = json.loads(path.read_text())
    return found


def start(slurm: MiniCluster, *launch: str, step_s: float = 0.2, steps: int = STEPS) -> TrainingJob:
    args = [f"--steps={steps}", f"--step-s={step_s}"]
    job = submit(slurm, nodes=4, launch=[*LAUNCH, *launch], script_args=args)
    job.wait("standby launchers", lambda: "standby launchers: " in job.said(), LONG_S)
    job.wait("step 3", lambda: job.records("step", step=3), LONG_S)
    return job


def test_host_of_the_launcher_that_is_a_spare_loses_power(slurm: MiniCluster) -> None:
    job = start(slurm, "--spares=1", "--heartbeat-timeout=1")
    host = batch_host(job)
    slurm.power_off(host)
    result = ended_with(job)
    assert result["exit_code"] == 0, job.everything()
    assert f"({host} was silent for " in job.said(), job.everything()
    assert "taken over by n" in job.said()
    assert f"3 agents are back, not that of {host}" in job.said()
    assert all(len(ids) == 1 for ids in job.process_ids().values()), job.everything()
    # What the ranks said while there was no launcher is told to the next.
    steps = {(record["rank"], record["step"]) for record in job.records("step")}
    assert steps == {(rank, step) for rank in range(3) for step in range(STEPS + 1)}


@pytest.mark.matrix
def test_host_of_the_launcher_that_has_ranks_loses_power(slurm: MiniCluster) -> None:
    """Its ranks go to the spare, and every state comes out with the same bits."""
    policy = slurm.base / "active.yaml"
    policy.write_text("batch_host: active\n")
    undisturbed = submit(slurm, launch=[*LAUNCH, "--spares=1"], script_args=[f"--steps={STEPS}"])
    assert undisturbed.wait_end(LONG_S)["exit_code"] == 0, undisturbed.everything()
    job = start(slurm, "--spares=1", f"--policy={policy}", "--heartbeat-timeout=2")
    host = batch_host(job)
    on_host = [rank for rank in range(3) if job.node_of(rank) == host]
    assert len(on_host) == 1
    slurm.power_off(host)
    assert ended_with(job)["exit_code"] == 0, job.everything()
    assert [record["verdict"] for record in job.incidents()] == ["continued"], job.everything()
    processes = job.process_ids()
    assert {rank: len(ids) for rank, ids in processes.items()} == {
        rank: 2 if rank in on_host else 1 for rank in range(3)
    }
    assert job.final_state() == undisturbed.final_state(), job.everything()


@pytest.mark.matrix
def test_two_hosts_of_launchers_lose_power_one_after_the_other(slurm: MiniCluster) -> None:
    """A launcher that took over has standbys of its own."""
    job = start(slurm, "--spares=1", "--heartbeat-timeout=2", step_s=0.5, steps=60)
    first = batch_host(job)
    slurm.power_off(first)
    second = job.wait("the second launcher", lambda: job.records("launcher"), LONG_S)[0]["node"]
    # From then on the first host is no voter any more.
    job.wait("the verdict on it", lambda: f"{first} lost" in job.said(), LONG_S)
    slurm.power_off(second)
    # Two of its three voters are left; no spare is.
    result = ended_with(job)
    assert result["exit_code"] == 30, job.everything()
    assert result["launcher"] not in (first, second)


@pytest.mark.matrix
def test_host_of_the_launcher_stands_still_and_does_no_harm_when_it_goes_on(
    slurm: MiniCluster,
) -> None:
    job = start(slurm, "--spares=1", "--heartbeat-timeout=2", step_s=0.5, steps=60)
    host = batch_host(job)
    slurm.freeze(host)
    job.wait("the next launcher", lambda: "taken over by" in job.said(), LONG_S)
    slurm.thaw(host)
    job.wait("it to notice", lambda: "waits for its verdict" in job.output(), LONG_S)
    result = ended_with(job)
    assert result["exit_code"] == 0, job.everything()
    assert result["launcher"] != host
    assert len(job.records("end")) == 1
    assert all(len(ids) == 1 for ids in job.process_ids().values()), job.everything()
    # The batch script lives, so the job ends with its exit code and not by scancel.
    assert slurm.wait_job(job.job_id, LONG_S).state == "COMPLETED"


@pytest.mark.matrix
def test_host_of_the_launcher_and_another_node_die_and_the_allocation_is_given_back(
    slurm: MiniCluster,
) -> None:
    """Two of four cannot agree on a launcher; the job ends when Slurm knows the host as dead."""
    slurm.set_slurmd_timeout(10)
    job = start(slurm, "--spares=1", "--heartbeat-timeout=2", steps=100000)
    host = batch_host(job)
    slurm.power_off(host)
    slurm.power_off(job.node_of(0))
    slurm.wait_job(job.job_id, LONG_S, accept_completing=True)
    assert not job.records("launcher"), job.everything()
    assert not job.records("end")
