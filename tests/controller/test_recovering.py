"""The way from a loss to the first new step: who is late, what is asked and planned.

The stories are in ``scenarios/``; here are the corners beside them.
"""

from __future__ import annotations

import pytest
from workbench import Bench, bench, of_type, recovering, step_done, told

from deadpool_launch.controller.events import (
    FenceNode,
    Finish,
    IncidentMark,
    InventoryTaken,
    KillRanks,
)
from deadpool_launch.controller.rank import Stage
from deadpool_launch.controller.states import Phase
from deadpool_launch.exits import ExitCode
from deadpool_runtime import protocol


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


def initial_state_is_not_whole(job: Bench) -> None:
    """One rank dies before it has completed a step, and another has no copy of that one."""
    job.train_to(0)
    job.uncopied(1, 0)
    job.exited(3, signal=9)
    job.tick()
    job.parked([0, 1, 2])
    job.ranks_up([3])
    job.parked([3])
    job.inventory()
    assert job.state.phase is Phase.CLEARING


def test_new_start_after_the_last_attempt_when_nothing_is_whole() -> None:
    job = bench(max_attempts=1)
    initial_state_is_not_whole(job)
    assert job.state.restarts == 1


def test_initial_state_that_is_not_whole_means_a_new_start() -> None:
    job = bench()
    initial_state_is_not_whole(job)
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


def test_repeated_report_of_the_plans_step_is_not_the_first_new_one() -> None:
    job = recovering()
    job.parked([3])
    job.inventory()
    job.rebuilt(job.everyone)
    job.restored(job.everyone)
    assert job.steps_done([0], 20) == []
