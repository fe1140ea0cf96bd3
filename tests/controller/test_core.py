"""Single decisions of the controller. The stories are in ``scenarios/``; here are the corners
beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from workbench import Bench, bench, of_type, recovering, render, step_done, told

from deadpool_launch.controller.config import Config
from deadpool_launch.controller.events import (
    Answered,
    FenceNode,
    Finish,
    IncidentMark,
    IncidentOpened,
    InventoryTaken,
    KillRanks,
    RankSaid,
    ReleaseNode,
    Say,
    StartAgent,
    StartRanks,
    Tick,
)
from deadpool_launch.controller.invariants import InvariantBroken, validate
from deadpool_launch.controller.rank import Stage
from deadpool_launch.controller.states import Phase
from deadpool_launch.exits import ExitCode
from deadpool_runtime import protocol

# ---------------------------------------------------------------- start


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


# ---------------------------------------------------------------- training


def test_nobody_trains_before_every_rank_has_attached() -> None:
    job = bench()
    job.begun()
    assert job.attached([0, 1, 3]) == []
    told_now = told(protocol.Protect, job.attached([2]))
    assert [ranks for ranks, _ in told_now] == [(0,), (1,), (2,), (3,)]
    assert [body.holder.node for _, body in told_now] == ["n2", "n2", "n1", "n1"]
    assert [body.holder.segments for _, body in told_now] == [[(0,)], [(1,)], [(2,)], [(3,)]]


def test_rank_that_ended_without_a_step_is_not_waited_for() -> None:
    job = bench()
    job.begun()
    job.attached([0, 1, 2])
    actions = job.said(3, protocol.ScriptEnded())
    assert [ranks for ranks, _ in told(protocol.Protect, actions)] == [(0,), (1,), (2,)]


def test_steps_without_a_confirmed_replica_are_counted_once_and_told_ever_less_often() -> None:
    job = bench()
    job.train_to(20)
    for number in range(1, 6):
        for rank in (1, 2):
            job.said(rank, step_done(1, 20 + number, number))
    assert job.state.unprotected == 5
    assert [said.text for said in of_type(Say, job.trace)] == [
        "rank 1 went through step 21 without a confirmed replica of the step before",
        "rank 1 went through step 22 without a confirmed replica of the step before "
        "(2 such steps so far)",
        "rank 1 went through step 24 without a confirmed replica of the step before "
        "(4 such steps so far)",
    ]
    job.stop(15)
    assert of_type(Say, job.trace)[-1] == Say(
        "5 steps began without a confirmed replica of the step before"
    )


def test_new_process_counts_its_unprotected_steps_from_zero() -> None:
    job = bench()
    job.train_to(20)
    job.said(3, step_done(1, 21, 7))
    job.exited(3, signal=9)
    job.tick()
    job.repaired([3])
    assert job.state.ranks[3].unprotected == 0
    job.said(3, step_done(2, 21, 0))
    job.said(3, step_done(2, 22, 1))
    assert job.state.unprotected == 2


def test_step_report_leaves_other_ranks_alone() -> None:
    job = bench()
    job.train_to(3)
    before = job.state
    job.steps_done([1], 4)
    assert [a is b for a, b in zip(before.ranks, job.state.ranks, strict=True)] == [
        True,
        False,
        True,
        True,
    ]
    assert before.ranks[1].completed == 3


def test_digest_of_a_later_step_is_not_compared() -> None:
    job = bench()
    job.train_to(2)
    job.snapshotted(range(3), 2, "a")
    job.snapshotted([3], 2, "b")
    assert job.finish is None


def test_states_that_differ_at_the_start_end_the_job() -> None:
    job = bench()
    job.train_to(0)
    assert job.snapshotted([0, 1, 2], 0, "a") == []
    job.snapshotted([3], 0, "b")
    assert job.finish is not None
    assert job.finish.exit_code == ExitCode.SCRIPT_FAILED
    assert job.finish.reason.startswith(
        "the state after step 0 differs between ranks 0-2 and rank 3 in the tensors that "
        "ranks 0-3 have in common;"
    )


def test_only_the_ranks_of_a_segment_are_compared() -> None:
    job = bench()
    job.train_to(0)
    for rank, digest in enumerate("abab"):
        pair = (rank % 2, rank % 2 + 2)
        segments = [protocol.SegmentDigest(pair, digest), protocol.SegmentDigest((rank,), "own")]
        assert job.said(rank, protocol.Snapshotted(1, 0, segments)) == []
    for rank, digest in enumerate("abcb"):
        pair = (rank % 2, rank % 2 + 2)
        job.said(rank, protocol.Snapshotted(1, 1, [protocol.SegmentDigest(pair, digest)]))
    assert job.finish is not None
    assert "between rank 0 and rank 2 in the tensors that ranks 0,2 have" in job.finish.reason


def test_ranks_that_disagree_about_what_they_have_in_common_end_the_job() -> None:
    job = bench(active=("n1",))
    job.train_to(0)
    both = [protocol.SegmentDigest((0, 1), "a")]
    alone = [protocol.SegmentDigest((1,), "a")]
    assert job.said(0, protocol.Snapshotted(1, 0, both)) == []
    job.said(1, protocol.Snapshotted(1, 0, alone))
    assert job.finish is not None
    assert "between rank 0 and rank 1 in the tensors that ranks 0-1 have" in job.finish.reason


def test_messages_for_the_driver_are_no_decisions() -> None:
    job = bench()
    job.train_to(0)
    said: list[protocol.FromRank] = [
        protocol.Note("hello"),
        protocol.FaultPoint(3),
        protocol.FinalState(3, {}),
    ]
    assert [job.said(0, body) for body in said] == [[], [], []]


@pytest.mark.parametrize(
    "body",
    [
        protocol.RankUp(1, 1),
        protocol.Attached("ddp", [], 0),
        protocol.Parked(1, 0.0),
        protocol.GroupsRebuilt(1, 1),
        protocol.Restored(1, 20, []),
        protocol.RestoreFailed(1, 20, "x"),
        protocol.Protected(0, 20),
        protocol.Snapshotted(0, 0, []),
        step_done(0, 21),
        protocol.StepRaised(0, 21, "old"),
        protocol.StepsEnded(0, 21),
    ],
)
def test_words_that_do_not_fit_the_moment_are_ignored(body: protocol.FromRank) -> None:
    job = bench()
    job.train_to(20)
    before = job.state
    assert job.said(0, body) == []
    assert job.state == before


def test_tick_before_any_deadline_changes_nothing() -> None:
    job = bench()
    job.train_to(20)
    before = job.state
    assert job.tick_now() == []
    assert job.state is before


def test_step_after_a_raise_withdraws_it() -> None:
    job = bench()
    job.train_to(20)
    job.said(0, protocol.StepRaised(1, 21, "caught by the script"))
    job.steps_done([0], 21)
    assert job.state.next_deadline() is None


def test_second_raise_of_a_rank_does_not_extend_its_wait() -> None:
    job = bench()
    job.train_to(20)
    job.said(0, protocol.StepRaised(1, 21, "x"))
    job.tick()
    job.now = 2.0
    job.said(0, protocol.StepRaised(1, 21, "x"))
    assert job.state.next_deadline() == 4.0


def test_raises_in_different_steps_are_answered_one_by_one() -> None:
    job = bench(active=("n1",), spares=())
    job.train_to(20)
    job.steps_done([0], 21)
    job.said(0, protocol.StepRaised(1, 22, "x"))
    actions = job.said(1, protocol.StepRaised(1, 21, "y"))
    assert told(protocol.RaiseIt, actions) == []
    assert told(protocol.RaiseIt, job.tick()) == []
    assert told(protocol.RaiseIt, job.tick()) == [
        ((0,), protocol.RaiseIt(22)),
        ((1,), protocol.RaiseIt(21)),
    ]


WAITING = "waiting at most 4 s for a loss that explains it"


def test_wait_is_told_once_and_with_the_first_sign() -> None:
    job = bench()
    job.train_to(20)
    assert of_type(Say, job.said(2, protocol.StepRaised(1, 21, "first"))) == []
    job.now = 0.5
    assert of_type(Say, job.said(0, protocol.ScriptFailed("echo", "tb", 1))) == []
    assert of_type(Say, job.tick()) == [Say(f"rank 2 raised in step 21 (first); {WAITING}")]
    assert job.now == 1.0
    assert of_type(Say, job.said(1, protocol.StepRaised(1, 21, "echo"))) == []
    assert of_type(Say, job.tick()) == []


def test_no_wait_is_told_when_there_is_none() -> None:
    alone = bench(active=("n1",), nproc_per_node=1, spares=())
    alone.begun()
    alone.said(0, protocol.ScriptFailed("ValueError", "tb", 1))
    assert alone.finish is not None
    together = bench()
    together.begun()
    for rank in together.everyone:
        together.now += 0.2
        together.said(rank, protocol.ScriptFailed("ValueError", "tb", 1))
    assert together.finish is not None
    explained = bench()
    explained.train_to(20)
    explained.said(0, protocol.StepRaised(1, 21, "connection closed"))
    explained.agent_lost("n2")
    explained.now = 5.0
    explained.tick()
    for job in (alone, together, explained):
        assert not any(WAITING in said.text for said in of_type(Say, job.trace))


def test_errors_are_shortened_in_sentences() -> None:
    job = bench()
    job.train_to(20)
    error = "RuntimeError: [/w/pair.cc:553] Connection closed by peer [::ffff:10.0.0.1]:60. Check."
    job.said(0, protocol.ScriptFailed(error, "tb", 1))
    job.agent_lost("n2")
    assert of_type(Say, job.tick())[-1] == Say(
        "rank 0 on n1 failed (RuntimeError: Connection closed by peer 10.0.0.1:60, seen) "
        "and cannot be unwound; restarted on n1, epoch 2"
    )


def test_restart_of_a_script_without_the_runtime_names_the_death_that_caused_it() -> None:
    job = bench()
    job.begun()
    job.exited(3, signal=9)
    job.said(0, protocol.ScriptFailed("connection closed", "tb", 1))
    assert [said.text for said in of_type(Say, job.tick())] == [
        "rank 3 on n2 died (signal 9, seen)",
        "the script does not use deadpool_runtime, or had not come to its first step: "
        "all ranks start anew (restart 1 of 3) and load its own checkpoints",
    ]


def test_root_cause_is_the_first_that_raised_even_if_its_failure_comes_last() -> None:
    job = bench()
    job.train_to(20)
    job.now = 1.0
    job.said(2, protocol.StepRaised(1, 21, "first"))
    job.now = 1.5
    job.said(0, protocol.StepRaised(1, 21, "echo"))
    for _ in range(3):
        job.tick()
    assert [rank.raise_told for rank in job.state.ranks] == [True, False, True, False]
    assert job.said(0, protocol.ScriptFailed("echo", "tb0", 1)) == []
    job.said(2, protocol.ScriptFailed("first", "tb2", 1))
    assert job.finish is not None
    assert (job.finish.reason, job.finish.detail) == ("rank 2: first", "tb2")


def test_failure_needs_no_wait_when_no_other_rank_runs() -> None:
    job = bench()
    job.begun()
    for rank in (0, 1, 2):
        job.said(rank, protocol.ScriptEnded())
    job.said(3, protocol.ScriptFailed("ValueError", "tb", 1))
    assert job.finish is not None
    assert job.finish.exit_code == ExitCode.SCRIPT_FAILED


def test_end_of_the_last_other_rank_ends_the_wait() -> None:
    job = bench()
    job.begun()
    job.said(3, protocol.ScriptFailed("ValueError", "tb", 1))
    for rank in (0, 1, 2):
        job.said(rank, protocol.ScriptEnded())
    assert job.finish is not None
    assert job.finish.exit_code == ExitCode.SCRIPT_FAILED


def test_failed_rank_on_a_lost_node_is_explained_by_it() -> None:
    job = bench()
    job.train_to(20)
    job.said(3, protocol.ScriptFailed("connection closed", "tb", 1))
    job.agent_lost("n2")
    job.tick()
    assert job.state.phase is Phase.PARKING
    assert job.state.seats == ("n1", "n3")


def test_failed_rank_that_has_not_exited_is_killed_when_a_loss_explains_it() -> None:
    job = bench()
    job.train_to(20)
    job.said(0, protocol.ScriptFailed("connection closed", "tb", 1))
    actions = job.agent_lost("n2")
    assert of_type(KillRanks, actions) == [
        KillRanks("n1", (0,), "its script failed during a fault")
    ]


def test_script_failure_after_resume_is_the_scripts_own() -> None:
    job = recovering()
    job.parked([3])
    job.inventory()
    job.rebuilt(job.everyone)
    job.restored(job.everyone)
    job.said(1, protocol.ScriptFailed("ValueError", "tb", 1))
    job.tick()
    job.tick()
    assert job.finish is not None
    assert job.finish.exit_code == ExitCode.SCRIPT_FAILED


# ---------------------------------------------------------------- losses


def test_second_report_of_one_loss_is_ignored() -> None:
    job = bench()
    job.train_to(20)
    job.agent_lost("n2")
    assert job.agent_lost("n2") == []
    assert job.exited(3, signal=9) == []


def test_script_that_ends_itself_has_its_log_named() -> None:
    """As ``argparse`` does, for a wrong argument: there is no traceback to show."""
    job = bench()
    job.train_to(20)
    job.said(2, protocol.ScriptFailed("SystemExit: 2", "", 2))
    while job.finish is None:
        job.tick()
    assert job.finish.exit_code == ExitCode.SCRIPT_FAILED
    assert job.finish.detail == (
        "what rank 2 printed is in logs/rank-00002.epoch-1.log of the run directory"
    )


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


# ---------------------------------------------------------------- deadlines


def test_replacement_that_ends_before_its_first_step_is_replaced() -> None:
    job = recovering()
    actions = job.said(3, protocol.ScriptEnded())
    assert of_type(KillRanks, actions)
    assert job.state.epoch == 3


def test_replacement_that_exits_with_zero_is_replaced_without_a_kill() -> None:
    job = recovering()
    actions = job.exited(3, exit_code=0)
    assert not of_type(KillRanks, actions)
    assert job.state.epoch == 3


def test_attached_of_a_replacement_is_no_reason_to_call_it_training() -> None:
    job = recovering()
    job.said(3, job.attaching(3))
    assert job.state.ranks[3].stage is Stage.SCRIPT


def test_donors_late_with_all_others_are_not_killed() -> None:
    job = recovering()
    job.parked([3])
    job.inventory()
    job.rebuilt([3])
    actions = job.plan_overdue()
    assert of_type(KillRanks, actions) == []
    assert job.state.phase is Phase.PARKING
    assert job.state.epoch == 3


def test_rank_that_did_not_rebuild_is_killed_when_others_did() -> None:
    job = recovering()
    job.parked([3])
    job.inventory()
    job.rebuilt([0, 1, 3])
    actions = job.plan_overdue()
    assert [a.ranks for a in of_type(KillRanks, actions)] == [(2,)]


def test_restored_state_of_another_step_is_ignored() -> None:
    job = recovering()
    job.parked([3])
    job.inventory()
    job.said(0, protocol.Restored(2, 19, []))
    assert job.state.ranks[0].restored is None


def test_new_start_after_the_last_attempt_when_nothing_is_whole() -> None:
    job = bench(max_attempts=1)
    job.train_to(0)
    job.uncopied(1, 0)
    job.exited(3, signal=9)
    job.tick()
    job.parked([0, 1, 2])
    job.ranks_up([3])
    job.parked([3])
    job.inventory()
    assert job.state.phase is Phase.CLEARING
    assert job.state.restarts == 1


def test_initial_state_that_is_not_whole_means_a_new_start() -> None:
    job = bench()
    job.train_to(0)
    job.uncopied(1, 0)
    job.exited(3, signal=9)
    job.tick()
    job.parked([0, 1, 2])
    job.ranks_up([3])
    job.parked([3])
    job.inventory()
    assert job.state.phase is Phase.CLEARING
    assert not job.state.protecting
    assert job.state.history == ((3, -1),)


@pytest.mark.parametrize("name", ["Misuse", "CorruptState", "UnsupportedState"])
def test_runtime_that_refuses_to_recover_is_believed_at_once(name: str) -> None:
    job = recovering()
    error = f"deadpool_runtime.errors.{name}: the step has no end. It never had."
    job.said(3, protocol.ScriptFailed(error, "tb", 1))
    assert job.finish is not None
    assert job.finish.exit_code == ExitCode.RECOVERY_FAILED
    assert job.finish.reason == (
        f"rank 3 cannot be recovered: deadpool_runtime.errors.{name}: the step has no end"
    )
    assert job.finish.detail == "tb"


def test_error_of_a_script_that_is_called_like_ours_is_not_ours() -> None:
    job = recovering()
    job.said(3, protocol.ScriptFailed("mine.Misuse: x", "tb", 1))
    assert job.finish is None


def test_rank_that_ends_in_the_last_attempt_cannot_be_unwound() -> None:
    job = bench(max_attempts=1)
    job.train_to(20)
    job.exited(3, signal=9)
    job.tick()
    job.said(0, protocol.ScriptEnded())
    assert job.finish is not None
    assert job.finish.exit_code == ExitCode.STATE_LOST


def test_two_deadlines_of_one_node_lose_it_once() -> None:
    job = bench()
    job.train_to(20)
    job.stopped(2)
    job.stopped(3)
    job.tick()
    actions = job.tick()
    assert [a.node for a in of_type(FenceNode, actions)] == ["n2"]


def test_each_phase_is_marked_once_per_epoch() -> None:
    job = recovering()
    job.parked([3])
    job.inventory()
    job.rebuilt(job.everyone)
    job.restored(job.everyone)
    job.steps_done(job.everyone, 21)
    assert [mark.phase for mark in of_type(IncidentMark, job.trace)] == [
        "detected",
        "revoked",
        "parked",
        "spare ready",
        "inventory",
        "plan",
        "groups rebuilt",
        "state restored",
        "first step",
    ]


def test_nothing_is_asked_for_after_the_verdict_even_within_one_event() -> None:
    job = bench()
    job.train_to(20)
    job.agent_lost("n2")
    job.tick()
    job.agent_lost("n3")
    actions = job.tick()
    assert isinstance(actions[-1], Finish)
    assert job.finish is not None
    assert job.finish.exit_code == ExitCode.NO_SPARE


def test_word_from_a_node_that_does_not_hold_the_rank_is_ignored() -> None:
    job = bench()
    job.train_to(20)
    assert job.said(0, step_done(1, 21), node="n2") == []


def test_plan_without_needy_ranks_names_no_donors() -> None:
    job = recovering()
    job.parked([3])
    job.inventory()
    job.rebuilt(job.everyone)
    job.restored([0, 1, 2], "a")
    job.restored([3], "b")
    job.parked(job.everyone)
    job.inventory()
    plan = of_type(IncidentMark, job.trace)[-1]
    assert (plan.phase, plan.detail) == (
        "plan",
        "step 19 is the newest that is whole on every rank",
    )
    assert all(not plan.pieces for _, plan in told(protocol.Plan, job.trace))


def test_answer_to_an_older_question_is_ignored() -> None:
    job = recovering()
    job.parked([3])
    stale = InventoryTaken(job.now, "n1", job.state.epoch - 1, ())
    assert job.feed(stale) == []
    job.inventory("n1", "n2")
    assert job.state.phase is Phase.INVENTORY
    assert told(protocol.Plan, job.inventory("n3"))
    assert job.feed(InventoryTaken(job.now, "n1", job.state.epoch, ())) == []


def test_loss_while_copies_are_counted_begins_anew() -> None:
    job = recovering()
    job.parked([3])
    job.inventory("n1")
    job.exited(0, signal=9)
    assert job.state.phase is Phase.GATHERING
    assert all(node.inventory_by is None for node in job.state.nodes.values())
    job.tick()
    assert told(protocol.Resume, job.repaired([0]))


def test_spare_that_comes_up_while_copies_are_counted_is_not_asked() -> None:
    job = bench(spares=("n3", "n4"))
    job.start()
    for node in ("n1", "n2", "n3"):
        job.connected(node)
        job.warm(node)
    job.ranks_up(job.everyone)
    job.attached(job.everyone)
    job.train_to(3)
    job.exited(3, signal=9)
    job.tick()
    job.parked([0, 1, 2])
    job.ranks_up([3])
    job.parked([3])
    job.connected("n4")
    assert job.warm("n4") == []
    assert told(protocol.Plan, job.inventory())


def test_replicator_restarted_during_restore_is_told_after_it() -> None:
    job = recovering()
    job.parked([3])
    job.inventory()
    assert told(protocol.Protect, job.replicator_up("n1")) == []
    job.rebuilt(job.everyone)
    actions = job.restored(job.everyone)
    assert [ranks for ranks, _ in told(protocol.Protect, actions)] == [(2,), (3,)]


def test_replicator_of_a_lost_node_is_nobodys_business() -> None:
    job = bench()
    job.train_to(3)
    job.agent_lost("n3")
    assert job.replicator_up("n3") == []


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


def test_repeated_report_of_the_plans_step_is_not_the_first_new_one() -> None:
    job = recovering()
    job.parked([3])
    job.inventory()
    job.rebuilt(job.everyone)
    job.restored(job.everyone)
    assert job.steps_done([0], 20) == []


# ---------------------------------------------------------------- the end


def test_nothing_is_answered_after_the_end() -> None:
    job = bench()
    job.train_to(3)
    job.stop(15)
    assert job.state.next_deadline() is None
    assert job.agent_lost("n1") == job.stop(2) == job.feed(Tick(99.0)) == []


def test_unknown_signal_is_named_by_its_number() -> None:
    job = bench()
    job.start()
    job.stop(10)
    assert job.finish is not None
    assert job.finish.reason == "stopped by a signal (10)"
    assert job.finish.exit_code == ExitCode.TERMINATED


def test_job_that_ends_before_the_first_new_step_continued_all_the_same() -> None:
    job = recovering()
    job.parked([3])
    job.inventory()
    job.rebuilt(job.everyone)
    job.restored(job.everyone)
    for rank in job.everyone:
        job.said(rank, protocol.ScriptEnded())
    assert render(job.trace)[-3:] == [
        "say: continued from step 20 in 0.1 s after the first sign (rung 1, local restart); "
        "0 completed steps run again",
        "incident 1 closed at 0.05: continued on rung 1, 0 replayed",
        "finish: completed (0): the script ended on every rank",
    ]


def test_broken_rule_is_reported_with_the_state() -> None:
    job = bench()
    job.train_to(3)
    rank = replace(job.state.ranks[0], stage=Stage.PARKED)
    with pytest.raises(InvariantBroken, match="rank 0: parked is possible while training"):
        validate(replace(job.state, ranks=job.state.ranks.with_changes({0: rank})))


def test_thousand_ranks_come_up_and_train() -> None:
    nodes = tuple(f"n{i:03}" for i in range(250))
    job = Bench(Config(active=nodes, spares=("s",), nproc_per_node=4), check=False)
    job.train_to(0)
    validate(job.state)
    for rank in (0, 500, 999):
        body = step_done(1, 1)
        event = RankSaid(job.now, job.state.node_of(rank), rank, 1, body)
        assert job.feed(event) == []
