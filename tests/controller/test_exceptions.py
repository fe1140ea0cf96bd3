"""Exceptions in a step and failures of the script: when a loss explains them, and when they are the
script's own.

The stories are in ``scenarios/``; here are the corners beside them.
"""

from __future__ import annotations

from workbench import bench, of_type, recovering, told

from deadpool_launch.controller.events import KillRanks, Say
from deadpool_launch.controller.states import Phase
from deadpool_launch.exits import ExitCode
from deadpool_runtime import protocol


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
