"""Drained nodes and time limits: when ranks are held back, moved, and their nodes let go.

The stories are in ``scenarios/``; here are the corners beside them.
"""

from __future__ import annotations

from workbench import Bench, bench, of_type, told

from deadpool_launch.controller.events import Answered, ReleaseNode, Say, StartAgent
from deadpool_runtime import protocol


def test_drain_of_the_only_spare_of_a_job_on_one_node_says_that_its_state_has_no_replica() -> None:
    job = bench(active=("n1",))
    job.train_to(20)
    said = [action.text for action in of_type(Say, job.drain("n3"))]
    assert said[-1] == (
        "no other node is up that could hold replicas of ranks 0-1: until one is, the loss of n1 "
        "loses their state"
    )


def test_nobody_is_held_back_for_a_drain_while_an_exception_waits_for_its_explanation() -> None:
    job = bench()
    job.train_to(20)
    job.said(1, protocol.StepRaised(1, 21, "ValueError: x"))
    assert not told(protocol.Hold, job.drain("n2"))
    job.steps_done(job.everyone, 21)
    assert job.state.halt is not None


def test_drain_that_is_asked_for_before_there_is_work_begins_when_there_is() -> None:
    job = bench()
    job.begun()
    job.drain("n2")
    job.attached(job.everyone)
    assert not told(protocol.Hold, job.steps_done(job.everyone, 0))
    assert told(protocol.Hold, job.steps_done(job.everyone, 1))


def test_end_before_the_limit_that_is_asked_for_before_there_is_work_begins_when_there_is() -> None:
    job = bench()
    job.train_to(0)
    job.limit_near(100.0)
    assert job.state.halt is None
    assert told(protocol.Hold, job.steps_done(job.everyone, 1))


def test_drain_that_is_asked_for_while_a_slow_step_is_looked_at_begins_after_that() -> None:
    job = bench()
    job.train_to(20)
    job.standings("n1", [job.standing(0, 21, 400.0)])
    job.tick()
    assert job.state.look is not None
    assert not told(protocol.Hold, job.drain("n2"))
    job.standings("n1", [], asked=1)
    assert told(protocol.Hold, job.standings("n2", [], asked=1))


def test_a_spare_is_promised_to_one_node() -> None:
    job = bench()
    job.train_to(20)
    job.drain("n1", request=1)
    job.drain("n2", request=2)
    assert [answer.done for answer in of_type(Answered, job.trace)] == [True, False]
    assert [wish.node for wish in job.state.wishes] == ["n1"]


def test_spare_that_is_lost_before_the_ranks_leave_is_replaced_by_one_that_has_to_come_up() -> None:
    job = bench(spares=("n3", "n4"), spare_start="on-failure")
    job.train_to(20)
    job.drain("n2")
    job.connected("n3")
    job.warm("n3")
    job.holding(job.everyone, 20)
    job.at_boundary(job.everyone, 20)
    job.agent_lost("n3")
    assert of_type(StartAgent, job.parked(job.everyone)) == [StartAgent("n4")]
    assert job.state.seats == ("n1", "n4")


def test_drained_node_stays_until_every_rank_has_a_replica() -> None:
    job = bench(spares=("n3", "n4"))
    job.train_to(20)
    job.drain("n2")
    job.holding(job.everyone, 20)
    job.at_boundary(job.everyone, 20)
    job.parked(job.everyone)
    job.ranks_up([2, 3])
    job.parked([2, 3])
    job.inventory()
    job.rebuilt(job.everyone)
    job.restored(job.everyone)
    for step in (21, 22, 23, 24):
        job.steps_done(job.everyone, step)
    assert job.state.incident is None
    assert not of_type(ReleaseNode, job.trace)
    job.protected(job.everyone, 24)
    job.steps_done([0], 25)
    assert [release.node for release in of_type(ReleaseNode, job.trace)] == ["n2"]


def moving() -> Bench:
    """The ranks of n2, which is drained, are parked with all others in new processes on n3."""
    job = bench()
    job.train_to(20)
    job.drain("n2")
    job.holding(job.everyone, 20)
    job.at_boundary(job.everyone, 20)
    job.parked(job.everyone)
    job.ranks_up([2, 3])
    job.parked([2, 3])
    return job


def test_node_without_ranks_that_cannot_be_reached_is_not_asked_for_what_others_have() -> None:
    job = moving()
    plans = dict(told(protocol.Plan, job.inventory()))
    assert [piece.source.host for piece in plans[2,].pieces] == ["n2.host"]
    job.restore_failed(2, "n2 cannot be reached")
    job.parked(job.everyone)
    plans = dict(told(protocol.Plan, job.inventory()))
    assert {plan.step for plan in plans.values()} == {20}
    assert {piece.source.host for piece in plans[2,].pieces} == {"n1.host"}


def test_node_that_could_not_be_reached_is_asked_again_for_what_nobody_else_has() -> None:
    job = moving()
    for rank in (2, 3):
        del job.arenas["n1"][rank, True, 20 % 3]
    job.inventory()
    job.restore_failed(2, "n2 cannot be reached")
    job.parked(job.everyone)
    plans = dict(told(protocol.Plan, job.inventory()))
    assert plans[2,].step == 20
    assert [piece.source.host for piece in plans[2,].pieces] == ["n2.host"]
