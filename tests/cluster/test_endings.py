"""How a job on real Slurm ends when it is not to go on: the script fails, scancel, Ctrl-C."""

from __future__ import annotations

import os
import signal
import time

import pytest
from mini_cluster import MiniCluster
from mini_cluster_nodes import wait_until
from training_job import TrainingJob, submit

pytestmark = pytest.mark.cluster

ENDLESS = ["--steps=100000", "--step-s=0.02"]


def spare_used(job: TrainingJob) -> bool:
    spares = job.records("job")[0]["spares"]
    return any(node in spares for ids in job.process_ids().values() for node, _pid in ids)


def test_script_that_raises_at_import_is_not_a_node_fault(slurm: MiniCluster) -> None:
    script = slurm.base / "broken.py"
    script.write_text(
        "import os\n\n\ndef boom():\n    raise KeyError('no such thing')\n\n\nboom()\n"
    )
    job = submit(slurm, launch=["--spares=1"], script=script)
    end = job.wait_end()
    assert end["exit_code"] == 20, job.everything()
    assert not spare_used(job)
    assert not job.records("incident")
    output = job.output()
    assert "KeyError: 'no such thing'" in output
    assert f'File "{script}", line 8, in <module>' in output
    assert "runpy" not in output
    assert "bootstrap" not in output


def test_script_that_raises_on_one_rank_in_a_step_fails(slurm: MiniCluster) -> None:
    job = submit(slurm, launch=["--spares=1"], script_args=["--steps=8", "--raise-at=1:4"])
    end = job.wait_end()
    assert end["exit_code"] == 20, job.everything()
    assert not spare_used(job)
    assert "rank 1 does not like step 4" in job.output()


def test_scancel_ends_everything_soon(slurm: MiniCluster) -> None:
    job = submit(slurm, launch=["--spares=1"], script_args=ENDLESS)
    job.wait_step(3)
    cancelled = time.monotonic()
    slurm.cancel(job.job_id)
    slurm.wait_job(job.job_id, 120)
    wait_until(
        lambda: [
            process
            for node in slurm.node_names
            for process in slurm.node_pids(node)
            if process.job_id == job.job_id
        ],
        lambda left: not left,
        what="no process of the job is left",
        timeout_s=60,
    )
    assert time.monotonic() - cancelled < 25
    assert job.records("end")[0]["exit_code"] == 143
    assert not spare_used(job)


def test_interrupt_ends_everything_soon(slurm: MiniCluster) -> None:
    job = submit(slurm, launch=["--spares=1"], script_args=ENDLESS)
    job.wait_step(3)
    host = slurm.job_info(job.job_id).batch_host
    launchers = [
        process
        for process in slurm.find_processes(host, "deadpool-launch")
        if process.name != "srun"
    ]
    interrupted = time.monotonic()
    os.kill(launchers[0].pid, signal.SIGINT)
    record = slurm.wait_job(job.job_id, 120)
    assert time.monotonic() - interrupted < 25
    assert record.exit_code == 130
    assert job.records("end")[0]["exit_code"] == 130
