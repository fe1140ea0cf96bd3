"""What holds for every ``SlurmClient``: Slurm's commands on the mini cluster, the same and pyslurm
on one of Slurm 25.11, and process trees on this machine.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mini_cluster_nodes import wait_until
from slurm_places import PATIENCE_S, ClusterPlace, LocalPlace, Place, wait_for

from deadpool_slurm import client as slurm
from deadpool_slurm.client import SlurmError
from deadpool_slurm.parse import Health, JobFacts

#: A folder without any of Slurm's commands.
BARE_PATH = str(Path(sys.executable).parent)
REAL = [pytest.mark.cluster, pytest.mark.matrix]


@pytest.fixture(
    params=[
        "local",
        pytest.param("commands", marks=REAL),
        pytest.param("commands-25.11", marks=REAL),
        pytest.param("pyslurm", marks=REAL),
    ]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "local":
        here: LocalPlace | ClusterPlace = LocalPlace(tmp_path)
    elif request.param == "commands":
        here = ClusterPlace(request.getfixturevalue("slurm"), {})
    elif request.param == "commands-25.11":
        here = ClusterPlace(request.getfixturevalue("newer_slurm"), {})
    else:
        python = os.environ.get("DEADPOOL_PYSLURM_PYTHON")
        if not python:
            pytest.skip("DEADPOOL_PYSLURM_PYTHON does not name a Python that has pyslurm")
        variables = {"DEADPOOL_PYSLURM_PYTHON": python, "PATH": BARE_PATH}
        here = ClusterPlace(request.getfixturevalue("newer_slurm"), variables)
    try:
        yield here
    finally:
        here.close()


def until(true: Callable[[], bool], what: str) -> None:
    wait_until(true, bool, what=what, timeout_s=PATIENCE_S)


def seen(place: Place, job_id: str) -> JobFacts | None:
    """The job, unless nothing is known of it any more."""
    try:
        return place.client.job(job_id)
    except SlurmError:
        return None


def test_a_job_is_told_with_its_nodes(place: Place) -> None:
    job_id = place.begin_job()
    job = place.client.job(job_id)
    assert (job.job_id, job.state, len(job.nodes)) == (job_id, "RUNNING", 2)
    assert job.batch_host in (None, job.nodes[0])
    assert job.can_requeue is False
    assert job.submission is None
    submission = place.client.job(job_id, submission=True).submission
    assert submission is not None
    assert submission.asks_no_kill() is place.is_slurm


def test_a_time_limit_is_told(place: Place) -> None:
    job = place.client.job(place.begin_job(options=["--time=60"]))
    if not place.is_slurm:
        assert job.end_time is None
        return
    assert job.end_time is not None
    left_s = job.end_time.timestamp() - time.time()
    assert 0 < left_s <= 3600
    assert place.client.job(place.begin_job(options=["--time=UNLIMITED"])).end_time is None


@pytest.mark.parametrize("job_id", ["4000000", "none"])
def test_an_unknown_job_is_an_error(place: Place, job_id: str) -> None:
    with pytest.raises(SlurmError):
        place.client.job(job_id)


def test_nodes_are_told_but_those_that_nobody_knows(place: Place) -> None:
    one, other = place.client.job(place.begin_job()).nodes
    found = place.client.nodes([one, other, "nowhere9"])
    assert {name: node.health for name, node in found.items()} == {
        one: Health.OK,
        other: Health.OK,
    }
    assert all(node.address and node.cpus for node in found.values())
    assert place.client.nodes(["nowhere9"]) == {}
    assert place.client.nodes([]) == {}


def test_a_lost_node_is_dead_and_none_of_the_jobs(place: Place) -> None:
    job_id = place.begin_job()
    kept, lost = place.client.job(job_id).nodes
    place.lose(lost)
    assert place.client.nodes([lost])[lost].health is Health.DEAD
    until(lambda: place.client.job(job_id).nodes == (kept,), "the job is smaller")
    assert place.client.job(job_id).state == "RUNNING"


def test_a_step_is_listed_until_it_is_ended(place: Place) -> None:
    job_id = place.begin_job()
    one, other = place.client.job(job_id).nodes
    first, _ = place.begin_step(job_id, one)
    second, _ = place.begin_step(job_id, other)
    assert {first, second} <= set(place.client.steps(job_id))
    assert place.client.do(slurm.EndStep(job_id, first, "KILL"))
    until(lambda: first not in place.client.steps(job_id), "the step is gone")
    assert second in place.client.steps(job_id)
    assert not place.client.do(slurm.EndStep(job_id, first, "KILL"))
    assert place.client.do(slurm.EndStep(job_id, second))
    until(lambda: second not in place.client.steps(job_id), "the other one is gone")


def test_a_step_is_told_to_end(place: Place) -> None:
    job_id = place.begin_job()
    name, mark = place.begin_step(job_id, place.client.job(job_id).nodes[1])
    assert place.client.do(slurm.EndStep(job_id, name, "TERM"))
    wait_for(mark.with_suffix(".told"))
    until(lambda: name not in place.client.steps(job_id), "the step is gone")


def test_a_comment_is_shown_with_the_job(place: Place) -> None:
    job_id = place.begin_job()
    assert place.client.do(slurm.Comment(job_id, "step 7 of 9, 'all' is well"))
    assert place.client.job(job_id).comment == "step 7 of 9, 'all' is well"


def test_a_job_is_ended_with_its_steps(place: Place) -> None:
    job_id = place.begin_job()
    name, _ = place.begin_step(job_id, place.client.job(job_id).nodes[0])
    assert place.client.do(slurm.EndJob(job_id))

    def over() -> bool:
        job = seen(place, job_id)
        return job is None or job.state not in ("RUNNING", "COMPLETING")

    until(over, "the job is over")
    until(lambda: name not in place.client.steps(job_id), "its steps are")


def test_nodes_are_given_back(place: Place) -> None:
    job_id = place.begin_job()
    kept, _ = place.client.job(job_id).nodes
    assert place.client.do(slurm.KeepNodes(job_id, (kept,)))
    until(lambda: place.client.job(job_id).nodes == (kept,), "the job is smaller")


def test_only_waiting_jobs_of_a_name_are_ended(place: Place) -> None:
    job_id = place.begin_job(options=["--job-name=chain"])
    if isinstance(place, ClusterPlace):
        for name in ("chain", "other"):
            place.queue(name)
    place.client.do(slurm.EndWaiting("chain"))
    until(lambda: not place.waiting("chain"), "it is out of the queue")
    assert len(place.waiting("other")) == place.is_slurm
    assert place.client.job(job_id).state == "RUNNING"


def test_a_job_is_put_back_into_the_queue_where_there_is_one(place: Place) -> None:
    job_id = place.begin_job(options=["--requeue", "--job-name=again"])
    if not place.is_slurm:
        with pytest.raises(SlurmError, match="there is no queue"):
            place.client.do(slurm.Requeue(job_id))
        return
    assert place.client.job(job_id).can_requeue is True
    assert place.client.do(slurm.Requeue(job_id))
    until(lambda: place.waiting("again") == [job_id], "it waits")


def test_the_configuration_names_the_cluster(place: Place) -> None:
    config = place.client.config()
    assert config["ClusterName"] == ("mini" if place.is_slurm else "local")
    if place.is_slurm:
        assert config["SLURM_VERSION"].startswith(("22.05", "25.11"))
        assert config["KillOnBadExit"] == "0"
        assert config["SlurmdTimeout"].startswith("300")
