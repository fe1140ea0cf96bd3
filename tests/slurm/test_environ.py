"""What is read from Slurm's variables, and what of them reaches a nested ``srun``."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool_slurm import environ

RECORDED = Path(__file__).with_name("recorded") / "22.05.8-batch-environment.txt"
BATCH = dict(line.split("=", 1) for line in RECORDED.read_text().splitlines())


def test_batch_script_of_a_real_cluster() -> None:
    job = environ.read_job(BATCH)
    assert job is not None
    assert (job.job_id, job.nodelist, job.node) == ("1", "n[1-4]", "n1")
    assert job.cpus_per_node == (1, 1, 1, 1)
    assert job.gpus_on_node is None
    assert not job.in_srun_step
    assert not job.no_kill_variable
    assert job.restarts == 0


def test_job_that_was_requeued_says_how_often() -> None:
    job = environ.read_job({**BATCH, "SLURM_RESTART_COUNT": "2"})
    assert job is not None
    assert job.restarts == 2


def test_outside_a_job_there_is_nothing() -> None:
    assert environ.read_job({"SLURM_CONF": "/etc/slurm/slurm.conf"}) is None


@pytest.mark.parametrize(
    ("step", "inside"),
    [("0", True), ("7", True), ("4294967291", False), ("4294967290", False), ("", False)],
)
def test_only_a_users_step_counts_as_srun(step: str, inside: bool) -> None:
    job = environ.read_job({**BATCH, "SLURM_STEP_ID": step})
    assert job is not None
    assert job.in_srun_step is inside


@pytest.mark.parametrize(
    ("value", "set_"), [("set", True), ("SET", True), ("1", False), ("no", False), ("off", False)]
)
def test_no_kill_variable(value: str, set_: bool) -> None:
    job = environ.read_job({**BATCH, "SBATCH_NO_KILL": value})
    assert job is not None
    assert job.no_kill_variable is set_


def test_only_what_srun_needs_is_kept() -> None:
    extra = {
        "PATH": "/bin",
        "SLURM_CPU_BIND": "cores",
        "SLURM_MEM_PER_NODE": "10",
        "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_STEP_NODELIST": "n1",
        "SRUN_CPUS_PER_TASK": "2",
        "SBATCH_NO_KILL": "1",
        "SLURM_NETWORK": "job_vni",
        "SLURM_JOB_END_TIME": "99",
    }
    assert environ.for_srun({**BATCH, **extra}) == {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/slurm/slurm.conf",
        "SLURM_CLUSTER_NAME": "mini",
        "SLURM_JOB_ID": "1",
        "SLURM_NETWORK": "job_vni",
        "SLURM_JOB_END_TIME": "99",
    }


@given(st.dictionaries(st.text(), st.text()))
def test_variables_of_others_pass_unchanged(variables: dict[str, str]) -> None:
    foreign = {f"X{name}": value for name, value in variables.items()}
    assert environ.for_srun(foreign, "7") == {**foreign, "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("4", (4,)), ("4(x2),8", (4, 4, 8)), ("72(x3)", (72, 72, 72)), ("", ()), ("many", ())],
)
def test_cpus_of_each_node(text: str, cpus: tuple[int, ...]) -> None:
    assert environ.expand_cpus(text) == cpus
