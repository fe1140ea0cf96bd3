"""Losses of ranks and nodes: which count as one, and who takes which place.

The stories are in ``scenarios/``; here are the corners beside them.
"""

from __future__ import annotations

from workbench import bench, of_type, told

from deadpool_launch.controller.events import KillRanks, Say, StartRanks
from deadpool_launch.controller.rank import Stage
from deadpool_launch.controller.states import Phase
from deadpool_launch.exits import ExitCode
from deadpool_runtime import protocol


def test_second_report_of_one_loss_is_ignored() -> None:
    job = bench()
    job.train_to(20)
    job.agent_lost("n2")
    assert job.agent_lost("n2") == []
    assert job.exited(3, signal=9) == []


def test_frozen_rank_is_killed_once() -> None:
    job = bench()
    job.train_to(20)
    assert of_type(Say, job.stopped(2, 1.00821)) == [
        Say("rank 2 on n2 is frozen (stopped for 1 s, seen); killed")
    ]
    assert job.stopped(2) == []


def test_losses_on_one_node_with_one_cause_are_one_line() -> None:
    job = bench()
    job.train_to(20)
    job.exited(2, signal=9)
    job.exited(3, signal=9)
    assert of_type(Say, job.tick()) == [
        Say("ranks 2-3 on n2 died (signal 9, seen); restarted on n2, epoch 2")
    ]


def test_death_in_another_step_is_not_the_same_fault() -> None:
    job = bench()
    job.train_to(20)
    for _ in range(2):
        step = job.state.newest
        job.exited(3, signal=11)
        job.tick()
        job.repaired([3])
        job.train_to(step + 1)
    assert job.finish is None
    assert job.state.incidents == 2


def test_exit_code_zero_inside_training_counts_as_an_end() -> None:
    job = bench()
    job.train_to(20)
    assert job.exited(0, exit_code=0) == []
    assert job.state.ranks[0].stage is Stage.ENDED


def test_rank_that_ended_before_the_revoke_reached_it_cannot_be_made_whole() -> None:
    job = bench()
    job.train_to(20)
    job.exited(3, signal=9)
    job.said(0, protocol.ScriptEnded())
    job.tick()
    assert job.finish is not None
    assert job.finish.exit_code == ExitCode.STATE_LOST
    assert "the last step is over (rank 0 ended)" in job.finish.reason


def test_rank_that_ends_while_others_park_cannot_be_made_whole() -> None:
    job = bench()
    job.train_to(20)
    job.exited(3, signal=9)
    job.tick()
    job.said(0, protocol.ScriptEnded())
    assert job.finish is not None
    assert job.finish.exit_code == ExitCode.STATE_LOST


def test_script_without_the_runtime_starts_anew_even_if_some_ranks_have_ended() -> None:
    job = bench()
    job.begun()
    job.said(0, protocol.ScriptEnded())
    job.exited(0, exit_code=0)
    job.said(1, protocol.ScriptEnded())
    job.exited(3, signal=9)
    actions = job.tick()
    assert [a.ranks for a in of_type(KillRanks, actions)] == [(1,), (2,)]
    job.exited(1, exit_code=0)
    actions = job.exited(2, signal=9)
    assert [a.ranks for a in of_type(StartRanks, actions)] == [(0, 1), (2, 3)]


def test_ended_ranks_of_a_lost_node_need_no_kill() -> None:
    job = bench()
    job.begun()
    job.said(2, protocol.ScriptEnded())
    job.agent_lost("n2")
    actions = job.tick()
    assert [a.ranks for a in of_type(KillRanks, actions)] == [(0, 1)]


def test_end_without_work_during_recovery_starts_all_anew() -> None:
    job = bench()
    job.begun()
    job.attached(job.everyone)
    job.steps_done(job.everyone, 0)
    job.exited(3, signal=9)
    job.tick()
    job.said(0, protocol.ScriptEnded())
    assert job.state.phase is Phase.CLEARING


def test_all_steps_over_and_a_loss_before_anyone_ended() -> None:
    job = bench()
    job.train_to(20)
    job.all_said(job.everyone, protocol.StepsEnded(1, 20))
    job.exited(3, signal=9)
    job.tick()
    assert job.finish is not None
    assert "the last step is over (all steps)" in job.finish.reason


def test_ranks_with_work_do_not_start_anew_for_one_that_cannot_be_unwound() -> None:
    job = bench()
    job.begun()
    job.attached([0, 2, 3])
    for step in (0, 1):
        job.steps_done([0, 2, 3], step)
    job.exited(3, signal=9)
    actions = job.tick()
    assert [a.ranks for a in of_type(KillRanks, actions)] == [(1,)]
    assert job.state.phase is Phase.PARKING


def test_loss_while_old_processes_are_cleared_away_takes_a_spare() -> None:
    job = bench()
    job.begun()
    job.exited(3, signal=9)
    job.tick()
    assert job.state.phase is Phase.CLEARING
    actions = job.agent_lost("n2")
    assert of_type(Say, actions) == [
        Say("n2 lost (agent connection closed, seen); n3 takes ranks 2-3, epoch 2")
    ]
    job.exited(0, signal=9)
    actions = job.exited(1, signal=9)
    assert [a.node for a in of_type(StartRanks, actions)] == ["n1", "n3"]


def test_rank_lost_while_another_is_cleared_away_is_started_with_it() -> None:
    job = bench()
    job.agents_up()
    job.ranks_up([0, 1, 2])
    job.tick()
    job.tick()
    assert job.state.phase is Phase.CLEARING
    assert of_type(Say, job.exited(0, signal=9)) == [
        Say("rank 0 on n1 died (signal 9, seen); started again with all ranks")
    ]
    actions = job.exited(3, signal=9)
    assert [a.ranks for a in of_type(StartRanks, actions)] == [(0,), (3,)]


def test_node_lost_while_clearing_without_spares_ends_the_job() -> None:
    job = bench(spares=())
    job.begun()
    job.exited(3, signal=9)
    job.tick()
    job.agent_lost("n2")
    assert job.finish is not None
    assert job.finish.exit_code == ExitCode.NO_SPARE
    assert job.finish.reason == (
        "n2 lost (agent connection closed, seen), no spare was held: "
        "submit again with --spares 1; training then restarts from your own checkpoint"
    )


def test_pending_spare_lost_without_another_ends_the_job() -> None:
    job = bench(spare_start="on-failure")
    job.train_to(20)
    job.agent_lost("n2")
    job.tick()
    job.agent_failed("n3", "boot")
    assert job.finish is not None
    assert job.finish.reason == (
        "n3 did not start (boot, seen), no spare left (lost so far: n2, n3): "
        "submit again with more --spares; training then restarts from your own checkpoint"
    )


def test_pending_spare_lost_within_a_gather_window_is_placed_at_its_end() -> None:
    job = bench(spares=("n3", "n4"), spare_start="on-failure")
    job.train_to(20)
    job.agent_lost("n2")
    job.tick()
    job.exited(0, signal=9)
    assert job.state.phase is Phase.GATHERING
    job.agent_failed("n3", "boot")
    assert of_type(Say, job.tick()) == [
        Say("rank 0 on n1 died (signal 9, seen); restarted on n1, epoch 3"),
        Say("n3 did not start (boot, seen); n4 takes ranks 2-3, epoch 3"),
    ]


def test_two_nodes_lost_together_take_two_spares() -> None:
    job = bench(active=("n1", "n2", "n3"), spares=("n4", "n5"))
    job.train_to(20)
    job.agent_lost("n1")
    job.agent_lost("n3")
    job.tick()
    assert job.state.seats == ("n4", "n2", "n5")
    assert job.state.incident is not None
    assert job.state.incident.attempts == 1


def test_store_of_a_replacement_is_a_survivors() -> None:
    job = bench()
    job.train_to(20)
    job.agent_lost("n1")
    job.tick()
    job.ranks_up([0])
    ((_, begin),) = told(protocol.Begin, job.trace[-1:])
    assert begin.store == protocol.Address("n2.host", 9002)


def test_store_of_the_plan_is_the_lowest_survivors() -> None:
    job = bench()
    job.train_to(20)
    job.agent_lost("n1")
    job.tick()
    job.parked([2, 3])
    job.ranks_up([0, 1])
    job.parked([0, 1])
    job.inventory()
    plans = dict(told(protocol.Plan, job.trace))
    assert {plan.store for plan in plans.values()} == {protocol.Address("n2.host", 9002)}
    at = protocol.Address("n2.host", 7000)
    assert plans[0,].pieces == [
        protocol.Piece(at, rank=0, replica=True, segments=[(0,)], base=True),
        protocol.Piece(at, rank=2, replica=False, segments=[(0, 1, 2, 3)], base=False),
    ]
    assert plans[2,].pieces == []
