"""How a job comes up: agents, spares, processes, the first step.

The stories are in ``scenarios/``; here are the corners beside them.
"""

from __future__ import annotations

from workbench import bench, of_type, render, told

from deadpool_launch.controller.events import (
    Finish,
    IncidentOpened,
    KillRanks,
    StartAgent,
    StartRanks,
)
from deadpool_launch.exits import ExitCode
from deadpool_runtime import protocol


def test_spares_on_failure_are_not_started_with_the_job() -> None:
    job = bench(spare_start="on-failure")
    assert of_type(StartAgent, job.start()) == [StartAgent("n1"), StartAgent("n2")]


def test_second_job_start_is_ignored() -> None:
    job = bench()
    job.start()
    assert job.start() == []


def test_active_node_that_fails_without_spares_ends_the_start() -> None:
    job = bench(spares=())
    job.start()
    actions = job.agent_failed("n2", "node down")
    (finish,) = of_type(Finish, actions)
    assert finish.exit_code == ExitCode.START_FAILED
    assert finish.reason == "n2 did not start (node down, seen); no spare left"


def test_agent_that_failed_is_not_warm_later() -> None:
    job = bench()
    job.start()
    job.agent_failed("n2")
    assert job.connected("n2") == job.warm("n2") == []
    assert job.agent_failed("n2") == []


def test_agent_warm_twice_changes_nothing() -> None:
    job = bench()
    job.start()
    job.connected("n1")
    job.warm("n1")
    before = job.state
    job.warm("n1")
    assert job.state is before


def test_spare_that_does_not_come_up_is_dropped() -> None:
    job = bench()
    job.start()
    actions = job.agent_failed("n3", "boot")
    assert render(actions) == [
        "fence n3: did not start (boot, seen)",
        "say: spare n3 did not start (boot, seen) while waiting",
    ]
    assert job.state.free == ()


def test_warm_spare_is_taken_before_one_that_still_starts() -> None:
    job = bench(spares=("n3", "n4"))
    job.start()
    for node in ("n1", "n4"):
        job.connected(node)
        job.warm(node)
    job.agent_failed("n2")
    assert job.state.seats == ("n1", "n4")


def test_node_lost_before_any_rank_is_up_is_no_reason_to_kill_others() -> None:
    job = bench()
    job.agents_up()
    job.ranks_up([0, 1])
    job.agent_lost("n2")
    actions = job.tick()
    assert of_type(StartRanks, actions) == [StartRanks("n3", 2, 1, (2, 3))]
    assert not of_type(KillRanks, job.trace)
    job.ranks_up([2, 3])
    ((ranks, begin),) = told(protocol.Begin, job.trace)
    assert ranks == (0, 1, 2, 3)
    assert (begin.epoch, begin.replacement, begin.attempt) == (2, False, 0)


def test_rank_that_ends_before_it_begins_is_a_loss() -> None:
    job = bench()
    job.agents_up()
    actions = job.exited(2, exit_code=0)
    (opened,) = of_type(IncidentOpened, actions)
    assert opened.reason == "rank 2 on n2 ended before its first step (seen)"
