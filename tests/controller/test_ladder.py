"""From rung to rung: what an incident does when its attempts come to nothing."""

from __future__ import annotations

import pytest
from workbench import Bench, bench, of_type, told

from deadpool_launch.controller.events import Finish, IncidentClosed, KillRanks, Say
from deadpool_launch.controller.ladder import Rung
from deadpool_launch.controller.rank import Stage
from deadpool_launch.controller.states import Phase
from deadpool_launch.exits import ExitCode
from deadpool_runtime import protocol


def restored_in_vain(job: Bench) -> None:
    """A plan goes out, and its deadline passes: nobody has built the groups."""
    job.inventory()
    assert job.state.phase is Phase.RESTORING
    job.plan_overdue()


def park_all(job: Bench) -> None:
    job.parked(rank.rank for rank in job.state.ranks if rank.stage is Stage.UNWINDING)


def come_up_again(job: Bench) -> None:
    """All processes are killed; new ones take their places and are ready for a plan."""
    for rank in job.everyone:
        assert job.state.ranks[rank].stage is Stage.DYING
        job.exited(rank, signal=9)
    job.ranks_up(job.everyone)
    job.parked(job.everyone)


def stalled_twice(job: Bench) -> None:
    """Rank 3 is lost, and twice nobody can build the groups."""
    job.exited(3, signal=9)
    job.tick()
    job.parked([0, 1, 2])
    job.ranks_up([3])
    job.parked([3])
    restored_in_vain(job)
    park_all(job)
    restored_in_vain(job)


def said(job: Bench) -> list[str]:
    return [action.text for action in of_type(Say, job.trace)]


def test_plan_that_comes_to_nothing_twice_restarts_all_ranks_from_their_copies() -> None:
    job = bench()
    job.train_to(20)
    stalled_twice(job)
    killed = [rank for kill in of_type(KillRanks, job.trace) for rank in kill.ranks]
    assert sorted(killed) == list(job.everyone)
    assert said(job)[-1] == (
        "ranks 0-3 did not restore the state within 120 s; after 2 attempts all ranks restart from "
        "the copies on their nodes (rung 3, warm restart)"
    )
    come_up_again(job)
    plans = told(protocol.Plan, job.inventory())
    assert [body.step for _, body in plans] == [20] * len(plans)
    assert not any(body.pieces for _, body in plans)
    job.rebuilt(job.everyone)
    job.restored(job.everyone)
    job.steps_done(job.everyone, 21)
    (closed,) = of_type(IncidentClosed, job.trace)
    assert (closed.verdict, closed.rung, closed.replayed_steps) == ("continued", 3, 0)


def test_job_ends_only_after_the_restart_came_to_nothing_too() -> None:
    job = bench()
    job.train_to(20)
    stalled_twice(job)
    come_up_again(job)
    restored_in_vain(job)
    assert not of_type(Finish, job.trace)
    park_all(job)
    restored_in_vain(job)
    assert job.finish is not None
    assert job.finish.exit_code == ExitCode.RECOVERY_FAILED
    assert job.finish.reason == (
        "incident 1 is not over after 2 attempts on rung 3, warm restart; no durable checkpoint "
        "was asked for (--checkpoint-dir); last: ranks 0-3 did not restore the state within 120 s"
    )
    (closed,) = of_type(IncidentClosed, job.trace)
    assert closed.rung == Rung.STOP


def test_durable_checkpoint_is_read_before_the_end() -> None:
    job = bench(checkpoint_dir="/checkpoints")
    job.train_to(16)
    job.saved(job.everyone, 16)
    job.committed(16)
    job.train_to(20)
    stalled_twice(job)
    come_up_again(job)
    restored_in_vain(job)
    park_all(job)
    restored_in_vain(job)
    assert said(job)[-1].endswith(
        "after 2 attempts on rung 3, warm restart all ranks go back to the durable checkpoint of "
        "step 16 (rung 5, durable)"
    )
    come_up_again(job)
    plans = told(protocol.Plan, job.inventory())
    assert {(body.step, body.checkpoint) for _, body in plans} == {(16, "/checkpoints")}
    job.rebuilt(job.everyone)
    job.restored(job.everyone)
    job.steps_done(job.everyone, 17)
    (closed,) = of_type(IncidentClosed, job.trace)
    assert (closed.rung, closed.replayed_steps) == (5, 4)


def test_attempts_that_are_used_up_by_losses_lead_to_a_restart_too() -> None:
    job = bench(max_attempts=1)
    job.train_to(20)
    job.exited(3, signal=9)
    job.tick()
    job.exited(2, signal=9)
    assert job.finish is None
    job.tick()
    assert job.state.incident is not None
    assert job.state.incident.rung == Rung.WARM_RESTART
    stages = {rank.rank: rank.stage for rank in job.state.ranks}
    assert (stages[0], stages[1]) == (Stage.DYING, Stage.DYING)


def test_script_without_state_has_no_rung_to_climb_to() -> None:
    job = bench(max_attempts=1, max_restarts=3)
    job.begun()
    job.exited(3, signal=9)
    job.tick()
    job.agent_lost("n2")  # while the old processes are cleared away: no epoch is used
    assert job.finish is None


@pytest.mark.parametrize(
    ("strike", "rung"),
    [
        (lambda job: job.exited(3, signal=9), Rung.LOCAL_RESTART),
        (lambda job: job.agent_lost("n2"), Rung.SWAP),
        (lambda job: [job.exited(rank, signal=9) for rank in job.everyone], Rung.WARM_RESTART),
    ],
)
def test_rung_is_that_of_who_goes_on(strike: object, rung: Rung) -> None:
    job = bench()
    job.train_to(20)
    assert callable(strike)
    strike(job)
    job.tick()
    assert job.state.incident is not None
    assert job.state.incident.rung == rung


def test_rank_that_was_being_mended_has_little_time_to_park_again() -> None:
    job = bench(park_s=1800.0)
    job.train_to(20)
    job.exited(3, signal=9)
    job.tick()
    assert job.state.ranks[0].deadline == pytest.approx(job.now - 0.05 + 630.0)  # 600 + 30
    job.parked([0, 1, 2])
    job.ranks_up([3])
    job.parked([3])
    restored_in_vain(job)
    assert {rank.deadline for rank in job.state.ranks} == {job.now + 120.0}


def test_step_that_only_some_ranks_completed_is_not_counted_as_run_again() -> None:
    job = bench()
    job.train_to(20)
    job.steps_done([0, 1], 21)
    job.exited(3, signal=9)
    job.tick()
    job.repaired([3])
    job.steps_done(job.everyone, 21)
    (closed,) = of_type(IncidentClosed, job.trace)
    assert closed.replayed_steps == 0


def test_step_that_all_ranks_completed_is_counted_as_run_again() -> None:
    job = bench()
    job.train_to(20)
    for rank in job.everyone:
        job.uncopied(rank, 20)
    job.exited(3, signal=9)
    job.tick()
    job.repaired([3])
    assert job.state.ranks[0].completed == 19
    job.steps_done(job.everyone, 20)
    (closed,) = of_type(IncidentClosed, job.trace)
    assert closed.replayed_steps == 1
