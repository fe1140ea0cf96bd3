"""Single decisions of the controller. The stories are in ``scenarios/``; here are the corners
beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from workbench import Bench, bench, of_type, render, step_done, told

from deadpool_launch.controller.config import Config
from deadpool_launch.controller.events import (
    AgentWarm,
    FenceNode,
    Finish,
    IncidentMark,
    IncidentOpened,
    KillRanks,
    RankSaid,
    Say,
    StartAgent,
    StartRanks,
    Tell,
    Tick,
)
from deadpool_launch.controller.invariants import InvariantBroken, validate
from deadpool_launch.controller.states import Phase, Stage
from deadpool_launch.exits import ExitCode
from deadpool_runtime import protocol


def recovering(**changes: object) -> Bench:
    """Rank 3 died in step 21; survivors are parked, its replacement builds."""
    job = bench(**changes)
    job.train_to(20)
    job.exited(3, signal=9)
    job.tick()
    job.parked([0, 1, 2], [18, 19, 20])
    job.ranks_up([3])
    return job


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
    job.feed(AgentWarm(job.now, "n1"))
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


def test_step_reports_are_confirmed_to_their_rank_only() -> None:
    job = bench()
    job.train_to(0)
    assert job.steps_done([2], 1) == [Tell((2,), protocol.Confirmed(1))]


def test_only_the_newest_three_own_parts_count() -> None:
    job = bench()
    job.train_to(9)
    assert job.state.ranks[0].own == (7, 8, 9)


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
    job.train_to(1)
    job.steps_done(range(3), 2, "a")
    job.steps_done([3], 2, "b")
    assert job.finish is None


def test_states_that_differ_at_the_start_end_the_job() -> None:
    job = bench()
    job.begun()
    job.steps_done([0, 1, 2], 0, "a")
    job.steps_done([3], 0, "b")
    assert job.finish is not None
    assert job.finish.exit_code == ExitCode.SCRIPT_FAILED
    assert job.finish.reason.startswith("ranks hold different state after step 0;")


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
        protocol.Attached("ddp"),
        protocol.Parked(1, [20], 0.0),
        protocol.GroupsRebuilt(1, 1),
        protocol.Restored(1, 20, "d"),
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
    job.parked([3], [])
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


def test_frozen_rank_is_killed_once() -> None:
    job = bench()
    job.train_to(20)
    job.stopped(2)
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
        job.repaired([3], [step - 1, step])
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
    job.all_said(job.everyone, protocol.Attached("ddp"))
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
    job.all_said([0, 2, 3], protocol.Attached("ddp"))
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


def test_store_of_the_plan_is_the_lowest_rank_with_state() -> None:
    job = bench()
    job.train_to(20)
    job.agent_lost("n1")
    job.tick()
    job.parked([2, 3], [19, 20])
    job.ranks_up([0, 1])
    job.parked([0, 1], [])
    ((_, plan),) = told(protocol.Plan, job.trace)
    assert plan.store == protocol.Address("n2.host", 9002)
    assert plan.sources == {0: 2, 1: 3}


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
    job.said(3, protocol.Attached("ddp"))
    assert job.state.ranks[3].stage is Stage.SCRIPT


def test_donors_late_with_all_others_are_not_killed() -> None:
    job = recovering()
    job.parked([3], [])
    job.rebuilt([3])
    actions = job.tick()
    assert of_type(KillRanks, actions) == []
    assert job.state.phase is Phase.PARKING
    assert job.state.epoch == 3


def test_rank_that_did_not_rebuild_is_killed_when_others_did() -> None:
    job = recovering()
    job.parked([3], [])
    job.rebuilt([0, 1, 3])
    actions = job.tick()
    assert [a.ranks for a in of_type(KillRanks, actions)] == [(2,)]


def test_restored_state_of_another_step_is_ignored() -> None:
    job = recovering()
    job.parked([3], [])
    job.said(0, protocol.Restored(2, 19, "d"))
    assert job.state.ranks[0].restored is None


def test_too_many_attempts_while_states_differ() -> None:
    job = recovering(max_attempts=1)
    job.parked([3], [])
    job.rebuilt(job.everyone)
    job.restored([0, 1, 2], "a")
    job.restored([3], "b")
    assert job.finish is not None
    assert job.finish.exit_code == ExitCode.RECOVERY_FAILED


def test_too_many_attempts_while_restoring_hangs() -> None:
    job = recovering(max_attempts=1)
    job.parked([3], [])
    job.tick()
    assert job.finish is not None
    assert job.finish.exit_code == ExitCode.RECOVERY_FAILED


def test_too_many_attempts_when_nothing_is_whole() -> None:
    job = bench(max_attempts=1)
    job.begun()
    job.all_said(job.everyone, protocol.Attached("ddp"))
    job.steps_done([0], 0)
    job.exited(3, signal=9)
    job.tick()
    job.parked([0], [0])
    job.parked([1, 2], [])
    job.ranks_up([3])
    job.parked([3], [])
    assert job.finish is not None
    assert job.finish.exit_code == ExitCode.RECOVERY_FAILED


def test_too_many_attempts_when_a_rank_ends_in_recovery() -> None:
    job = bench(max_attempts=1)
    job.train_to(20)
    job.exited(3, signal=9)
    job.tick()
    job.said(0, protocol.ScriptEnded())
    assert job.finish is not None
    assert job.finish.exit_code == ExitCode.RECOVERY_FAILED


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
    job.parked([3], [])
    job.rebuilt(job.everyone)
    job.restored(job.everyone)
    job.steps_done(job.everyone, 21)
    assert [mark.phase for mark in of_type(IncidentMark, job.trace)] == [
        "detected",
        "revoked",
        "parked",
        "spare ready",
        "plan",
        "groups rebuilt",
        "state restored",
        "first step",
    ]


def test_nothing_is_asked_for_after_the_verdict_even_within_one_event() -> None:
    job = bench(max_attempts=1)
    job.train_to(20)
    job.agent_lost("n2")
    job.tick()
    actions = job.agent_lost("n3")
    assert isinstance(actions[-1], Finish)
    assert job.finish is not None
    assert job.finish.reason == (
        "incident 1 is not over after 1 attempt; last: n3 lost (agent connection closed, seen)"
    )


def test_word_from_a_node_that_does_not_hold_the_rank_is_ignored() -> None:
    job = bench()
    job.train_to(20)
    assert job.said(0, step_done(1, 21), node="n2") == []


def test_plan_without_needy_ranks_names_no_donors() -> None:
    job = recovering()
    job.parked([3], [])
    job.rebuilt(job.everyone)
    job.restored([0, 1, 2], "a")
    job.restored([3], "b")
    job.parked(job.everyone, [19])
    plan = of_type(IncidentMark, job.trace)[-1]
    assert (plan.phase, plan.detail) == (
        "plan",
        "step 19 is the newest that is whole on every rank",
    )


def test_rank_that_holds_only_the_refused_step_gets_an_older_one_from_a_donor() -> None:
    job = recovering()
    job.parked([3], [])
    job.rebuilt(job.everyone)
    job.restored([0, 1, 2], "a")
    job.restored([3], "b")
    job.parked([0, 1, 2], [18, 19, 20])
    job.parked([3], [20])
    plan = told(protocol.Plan, job.trace)[-1][1]
    assert (plan.step, plan.sources) == (19, {3: 0})


def test_repeated_report_of_the_plans_step_is_not_the_first_new_one() -> None:
    job = recovering()
    job.parked([3], [])
    job.rebuilt(job.everyone)
    job.restored(job.everyone)
    assert job.steps_done([0], 20) == [Tell((0,), protocol.Confirmed(20))]


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
    job.parked([3], [])
    job.rebuilt(job.everyone)
    job.restored(job.everyone)
    for rank in job.everyone:
        job.said(rank, protocol.ScriptEnded())
    assert render(job.trace)[-3:] == [
        "say: continued from step 20 in 0.1 s after the first sign; 0 completed steps run again",
        "incident 1 closed at 0.05: continued, 0 replayed",
        "finish: completed (0): the script ended on every rank",
    ]


def test_broken_rule_is_reported_with_the_state() -> None:
    job = bench()
    job.train_to(3)
    rank = replace(job.state.ranks[0], stage=Stage.PARKED)
    with pytest.raises(InvariantBroken, match="rank 0: parked is possible while training"):
        validate(replace(job.state, ranks=(rank, *job.state.ranks[1:])))


def test_thousand_ranks_come_up_and_train() -> None:
    nodes = tuple(f"n{i:03}" for i in range(250))
    job = Bench(Config(active=nodes, spares=("s",), nproc_per_node=4), check=False)
    job.train_to(0)
    validate(job.state)
    for rank in (0, 500, 999):
        body = step_done(1, 1)
        event = RankSaid(job.now, job.state.node_of(rank), rank, 1, body)
        assert job.feed(event) == [Tell((rank,), protocol.Confirmed(1))]
