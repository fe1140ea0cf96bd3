"""Jobs submitted from the login node of a cluster that a user's file describes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from mini_cluster import MiniCluster
from mini_cluster_settings import HEAD
from training_job import SCRIPT as TRAIN
from training_job import TrainingJob, submit

pytestmark = pytest.mark.cluster

LAUNCH = str(Path(sys.executable).parent / "deadpool-launch")
LONG_S = 300.0
SITE = """\
about: the mini cluster
match.clusters: [mini]
submit:
  exclusive: yes
  setup: [export SET_UP=so]
network.interfaces: ['none\\d', 'eth\\d+']
failure_domain.size: 2
env: {OF_THE_SITE: 'a b', OF_THE_USER: 'no'}
launch.srun_options: [--verbose]
"""
#: Says what a rank sees.
SCRIPT = """\
import os
for name in ("RANK", "SET_UP", "OF_THE_SITE", "OF_THE_USER", "GLOO_SOCKET_IFNAME"):
    print("sees", name, os.environ.get(name))
"""


CHAIN = [
    *("--agent-start-timeout", "300"),
    *("--checkpoint-dir", "ckpt", "--checkpoint-every", "100000"),
]


def submitted(slurm: MiniCluster, command: list[str], **variables: str) -> list[int]:
    """The numbers of the jobs that the command submits on the login node."""
    done = slurm.run_on(HEAD, [LAUNCH, *command], env=variables)
    assert done.returncode == 0, done.stderr
    return [int(number) for number in re.findall(r"\d+", done.stdout.partition(":")[0])]


def test_jobs_are_written_and_submitted_as_the_site_wants_them(slurm: MiniCluster) -> None:
    """The first job of a chain ends well, so the second is taken out of the queue."""
    sites = slurm.base / "config" / "deadpool" / "sites"
    sites.mkdir(parents=True)
    (sites / "mini.yaml").write_text(SITE)
    (slurm.base / "train.py").write_text(SCRIPT)
    command = ["--nodes", "2", "--spares", "1", "-t", "30", "train.py", *CHAIN]
    jobs = submitted(
        slurm,
        [*command, "--chain", "2", "--sbatch-arg=--comment=it's #1"],
        XDG_CONFIG_HOME=str(slurm.base / "config"),
        # What the cluster is has to be found out.
        DEADPOOL_SITE="",
        OF_THE_USER="yes",
    )
    shown = slurm._scontrol("--oneliner", "show", "job", str(jobs[0]))
    assert "NumNodes=3" in shown
    assert "Comment=it's #1" in shown
    record = slurm.wait_job(jobs[0], LONG_S, accept_completing=True)
    output = (slurm.base / f"deadpool-{jobs[0]}.out").read_text()
    assert record.exit_code == 0, output
    logs = sorted((slurm.base / "deadpool-runs" / str(jobs[0]) / "logs").glob("rank-*.log"))
    seen = [re.findall("(?m)^sees (.*)$", path.read_text()) for path in logs]
    same = ["SET_UP so", "OF_THE_SITE a b", "OF_THE_USER yes", "GLOO_SOCKET_IFNAME eth0"]
    assert seen == [["RANK 0", *same], ["RANK 1", *same]]
    assert slurm.wait_job(jobs[1], LONG_S).state == "CANCELLED"
    assert not (slurm.base / f"deadpool-{jobs[1]}.out").exists()


@pytest.mark.matrix
@pytest.mark.timeout(1200)
def test_job_of_a_chain_goes_on_where_the_one_before_stopped(slurm: MiniCluster) -> None:
    steps = ["--steps", "30"]
    launch = ["--spares=1", "--agent-start-timeout=300"]
    undisturbed = submit(slurm, nodes=3, launch=launch, script_args=steps)
    assert undisturbed.wait_end(LONG_S)["exit_code"] == 0, undisturbed.everything()
    command = ["--nodes", "2", "--spares", "1", "-t", "30", *CHAIN, "--chain", "3"]
    script = [str(TRAIN), "--record-final-state", "--", *steps, "--hold=1:8:forward"]
    jobs = submitted(slurm, [*command, *script])
    runs = [TrainingJob(slurm, job, slurm.base / "deadpool-runs" / str(job)) for job in jobs]
    runs[0].wait_held(1, 8)
    slurm._must("scancel", "--batch", "--signal=USR1", str(jobs[0]))
    runs[0].wait("the end", lambda: "SIGUSR1: the job ends at the end" in runs[0].said(), LONG_S)
    runs[0].release(1, 8)
    assert runs[0].wait_end(LONG_S)["exit_code"] == 75, runs[0].everything()
    runs[1].wait("the last step", lambda: runs[1].records("step", step=30), LONG_S)
    assert runs[1].wait_end(LONG_S)["exit_code"] == 0, runs[1].everything()
    assert min(step for record in runs[1].records("step") if (step := record["step"])) > 8
    assert runs[1].final_state() == undisturbed.final_state()
    assert slurm.wait_job(jobs[2], LONG_S).state == "CANCELLED"
