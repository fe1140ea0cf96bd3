"""Real ranks, real collectives, real deaths: the numbers are those of a run without any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deadpool_runtime import protocol
from deadpool_runtime.testing import JobFailed

STEPS = ("--max-steps", "8")


def die(*places: str) -> list[str]:
    return [word for place in places for word in ("--die", place)]


class AtFaultPoint:
    """Acts on the rank that waits for its fault, once every rank has ended the step before."""

    def __init__(self, act: Callable[[Any, int], None]) -> None:
        self.act = act
        self.victim: int | None = None
        self.step = 0
        self.ended: dict[int, int] = {}

    def __call__(self, launcher: Any, rank: int, message: Any) -> None:
        if isinstance(message, protocol.FaultPoint):
            self.victim, self.step = rank, message.step
        elif isinstance(message, protocol.StepDone):
            self.ended[rank] = message.step
        if self.victim is not None and set(self.ended.values()) == {self.step - 1}:
            victim, self.victim = self.victim, None
            self.act(launcher, victim)


def assert_same(run: Any, reference: Any, deaths: int) -> None:
    assert sum(len(pids) for pids in run.outcome.pids.values()) == len(reference.results) + deaths
    assert run.numbers() == reference.numbers()
    # What a failed body had on its frames is gone before the step is run again.
    assert all(all(result["freed"]) for result in run.results.values())


@pytest.mark.parametrize(
    ("place", "step"),
    [
        ("1:4:backward", 3),
        ("0:4:backward", 3),
        ("2:1:start", 0),
        ("0:1:backward", 0),
        ("1:8:backward", 7),
        ("0:5:end", 4),
    ],
)
def test_a_killed_rank_is_replaced_and_the_numbers_stay(
    train: Callable[..., Any], undisturbed: Callable[..., Any], place: str, step: int
) -> None:
    run = train(*STEPS, *die(place))
    assert run.outcome.plans == [(2, step)]
    assert_same(run, undisturbed(*STEPS), deaths=1)


def test_survivors_that_are_a_step_ahead_roll_back(
    train: Callable[..., Any], undisturbed: Callable[..., Any]
) -> None:
    run = train(*STEPS, *die("1:5:ahead"))
    assert run.outcome.plans == [(2, 4)]
    assert_same(run, undisturbed(*STEPS), deaths=1)


def test_survivors_ahead_read_a_batch_anew_that_the_body_changed(
    train: Callable[..., Any], undisturbed: Callable[..., Any]
) -> None:
    run = train(*STEPS, "--in-place", *die("1:5:ahead", "0:7:backward"))
    assert_same(run, undisturbed(*STEPS, "--in-place"), deaths=2)


@pytest.mark.parametrize("place", ["1:5:end", "1:5:backward"])
def test_a_body_that_catches_every_exception_is_run_again(
    train: Callable[..., Any], undisturbed: Callable[..., Any], place: str
) -> None:
    run = train(*STEPS, "--swallow", *die(place))
    assert run.outcome.plans == [(2, 4)]
    assert run.numbers() == undisturbed(*STEPS, "--swallow").numbers()


def test_a_rank_with_parameters_of_its_own_is_not_restored_from_a_peer(
    train: Callable[..., Any],
) -> None:
    with pytest.raises(JobFailed, match="differ"):
        train(*STEPS, "--local-from", "3", *die("1:6:start"), world_size=2)


def test_two_kills_one_after_the_other(
    train: Callable[..., Any], undisturbed: Callable[..., Any]
) -> None:
    run = train(*STEPS, *die("2:3:backward", "0:4:backward"))
    assert run.outcome.plans == [(2, 2), (3, 3)]
    assert_same(run, undisturbed(*STEPS), deaths=2)


def test_two_ranks_killed_in_the_same_step(
    train: Callable[..., Any], undisturbed: Callable[..., Any]
) -> None:
    run = train(*STEPS, *die("2:4:start", "0:4:start"))
    assert run.outcome.plans[-1][1] == 3
    assert_same(run, undisturbed(*STEPS), deaths=2)


@pytest.mark.parametrize("kind", [protocol.Parked, protocol.GroupsRebuilt, protocol.Restored])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_survivor_or_the_replacement_dies_during_recovery(
    train: Callable[..., Any], undisturbed: Callable[..., Any], kind: type[Any], victim: int
) -> None:
    killed: list[int] = []

    def on_message(launcher: Any, rank: int, message: Any) -> None:
        if isinstance(message, kind) and rank == victim and launcher.epoch == 2 and not killed:
            killed.append(rank)
            launcher.kill(rank)

    run = train(*STEPS, *die("1:4:backward"), on_message=on_message)
    assert killed == [victim]
    assert run.outcome.plans[-1][1] == 3
    assert_same(run, undisturbed(*STEPS), deaths=2)


def test_survivors_that_wait_at_the_end_go_back(
    train: Callable[..., Any], undisturbed: Callable[..., Any]
) -> None:
    def on_message(launcher: Any, rank: int, message: Any) -> None:
        if isinstance(message, protocol.StepsEnded):
            (launcher.run_dir / f"ended-{rank}").touch()

    run = train(*STEPS, *die("2:8:late"), on_message=on_message)
    assert run.outcome.plans == [(2, 7)]
    assert_same(run, undisturbed(*STEPS), deaths=1)


def test_a_frozen_peer_is_left_behind_while_its_connections_are_still_open(
    train: Callable[..., Any], undisturbed: Callable[..., Any]
) -> None:
    on_message = AtFaultPoint(lambda launcher, rank: launcher.freeze(rank))
    run = train(*STEPS, fault_steps={1: 4}, on_message=on_message)
    assert run.outcome.plans == [(2, 3)]
    assert_same(run, undisturbed(*STEPS), deaths=1)


def test_several_epochs_with_worker_processes(
    train: Callable[..., Any], undisturbed: Callable[..., Any]
) -> None:
    arguments = ("--epochs", "2", "--workers", "1")
    run = train(*arguments, *die("1:6:backward"), deadline_s=120)
    assert run.outcome.plans == [(2, 5)]
    # The dataset adds noise inside the workers, which no position covers; what was read is exact.
    reference = undisturbed(*arguments)
    assert {r: v["seen"] for r, v in run.results.items()} == {
        r: v["seen"] for r, v in reference.results.items()
    }


def test_stop_in_a_body_ends_the_job_after_it(
    train: Callable[..., Any], undisturbed: Callable[..., Any]
) -> None:
    run = train(*STEPS, "--stop-at", "4", *die("0:4:backward"))
    assert {message.step for message in run.outcome.messages(protocol.StepsEnded)} == {4}
    assert_same(run, undisturbed(*STEPS, "--stop-at", "4"), deaths=1)


def test_a_loop_left_by_break_ends_the_job(train: Callable[..., Any]) -> None:
    run = train(*STEPS, "--break-at", "3")
    assert [m.step for m in run.outcome.messages(protocol.StepsEnded)] == [3, 3, 3]
    assert sorted(run.outcome.final) == [0, 1, 2]


def test_the_scripts_own_exception_comes_out_as_it_was_raised(train: Callable[..., Any]) -> None:
    run = train("--max-steps", "4", "--raise-at", "1:2", allow_failure=True)
    raised = run.outcome.messages(protocol.StepRaised, rank=1)
    assert [message.step for message in raised] == [2]
    assert "the script's own mistake" in run.outcome.failed[1].error
    assert "forward_backward" not in run.outcome.failed[1].traceback
    assert 'raise ZeroDivisionError("the script' in run.outcome.failed[1].traceback


def test_a_lagging_launcher_costs_protection_not_time(train: Callable[..., Any]) -> None:
    run = train("--max-steps", "4", confirm=False)
    notes = run.outcome.messages(protocol.Note, rank=0)
    assert sum("without confirmation" in note.text for note in notes) == 1
    blocked_s = [m.blocked_s for m in run.outcome.messages(protocol.StepDone, rank=0)]
    # One bounded wait, then none until confirmations come again.
    assert sum(each > 1.5 for each in blocked_s) == 1


def test_a_rehearsed_fault_waits_at_the_start_of_its_step(
    train: Callable[..., Any], undisturbed: Callable[..., Any]
) -> None:
    on_message = AtFaultPoint(lambda launcher, rank: launcher.kill(rank))
    run = train(*STEPS, fault_steps={2: 5}, on_message=on_message)
    assert [m.step for m in run.outcome.messages(protocol.FaultPoint)] == [5]
    assert run.outcome.plans == [(2, 4)]
    assert_same(run, undisturbed(*STEPS), deaths=1)


def test_gradients_without_an_optimizer_step_are_refused(
    train: Callable[..., Any],
) -> None:
    run = train("--max-steps", "3", "--accumulate-wrongly", allow_failure=True)
    failures = list(run.outcome.failed.values())
    assert "gradient accumulation belongs inside" in failures[0].error
