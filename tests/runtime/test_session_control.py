"""What the launcher says and how the training thread takes it, without any rank process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deadpool_runtime import protocol
from deadpool_runtime.control import Control, Superseded, Verdict
from deadpool_runtime.errors import Interrupted, Misuse
from deadpool_runtime.guard import StepGuard
from deadpool_runtime.recovery import clear_frames

STORE = protocol.Address("127.0.0.1", 1)


class Groups:
    """Notes what the newest published epoch was while the groups were being aborted."""

    def __init__(self) -> None:
        self.control: Control | None = None
        self.seen: list[tuple[int, int, bool]] = []

    def abort(self, epoch: int | None = None) -> None:
        assert self.control is not None
        assert epoch is not None
        self.seen.append((epoch, self.control.newest, self.control.disturbed(epoch - 1)))


class Link:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def start(self, on_message: Callable[[Any], None]) -> None:
        raise AssertionError


@pytest.fixture
def groups() -> Groups:
    return Groups()


@pytest.fixture
def control(groups: Groups) -> Control:
    groups.control = Control(Link(), groups)
    groups.control.on_message(protocol.Begin(1, STORE, False, 0))
    return groups.control


def test_groups_are_aborted_before_the_epoch_is_published(control: Control, groups: Groups) -> None:
    control.on_message(protocol.Revoke(2))
    # While aborting, the epoch was still 1 to those who wait, and the guard already knew.
    assert groups.seen == [(2, 1, True)]
    assert control.newest == 2


def test_an_old_revoke_is_ignored(control: Control, groups: Groups) -> None:
    control.on_message(protocol.Revoke(3))
    control.on_message(protocol.Revoke(2))
    control.on_message(protocol.Revoke(3))
    assert [epoch for epoch, _, _ in groups.seen] == [3]


def test_a_revoke_before_begin_is_kept() -> None:
    groups = Groups()
    groups.control = Control(Link(), groups)
    groups.control.on_message(protocol.Revoke(4))
    groups.control.on_message(protocol.Begin(3, STORE, True, 0))
    assert groups.control.wait_begin().epoch == 3
    assert groups.control.newest == 4


def test_no_step_begins_behind_the_answer_to_hold(control: Control) -> None:
    """The answer and the step that begins are one after the other, whichever thread is first."""
    link = control._link
    assert isinstance(link, Link)
    assert control.begin_step(1, 1)
    control.on_message(protocol.Hold(1, 1))
    assert link.sent == [protocol.Holding(1, 1, 1)]
    assert not control.begin_step(2, 1)
    control.on_message(protocol.HoldAfter(1, 1, 2, last=True))
    before = control.stopping, control.begin_step(2, 1)
    assert before == (False, True), "step 1 is not the last one"
    assert control.stopping
    halt = control.wait_boundary(3, 1)
    assert halt is not None
    assert (halt.after, halt.number) == (2, 1)


def test_what_another_hold_was_told_is_ignored(control: Control) -> None:
    control.on_message(protocol.Hold(1, 1))
    control.on_message(protocol.GoOn(1, 1))
    assert control.begin_step(1, 1)
    control.on_message(protocol.Hold(1, 2))
    control.on_message(protocol.HoldAfter(1, 1, 7))
    control.on_message(protocol.GoOn(1, 1))
    assert not control.begin_step(2, 1)
    control.on_message(protocol.HoldAfter(1, 2, 2))
    assert control.begin_step(2, 1)
    assert not control.begin_step(3, 1)


def test_rank_at_the_boundary_leaves_it_with_the_next_epoch(control: Control) -> None:
    control.on_message(protocol.Hold(1, 1))
    control.on_message(protocol.HoldAfter(1, 1, 0))
    halt = control.wait_boundary(1, 1)
    assert halt is not None
    waiting = threading.Thread(target=control.wait_leave, args=(halt,))
    waiting.start()
    control.on_message(protocol.Hold(2, 2))
    assert control.must_wait(1), "a word of an epoch that is not declared yet changes nothing"
    control.on_message(protocol.Revoke(2))
    waiting.join(60)
    assert not waiting.is_alive()
    assert not control.begin_step(1, 1)


def test_hold_that_follows_resume_at_once_stands(control: Control) -> None:
    """The training thread may wake from its wait for Resume only after both have arrived."""
    link = control._link
    assert isinstance(link, Link)
    control.on_message(protocol.Revoke(2))
    control.on_message(protocol.Plan(2, 20, STORE, [], None))
    control.on_message(protocol.Resume(2))
    control.on_message(protocol.Hold(2, 1))
    control.wait_resume(2, 20)
    assert link.sent == [protocol.Holding(2, 1, 20)]
    assert not control.begin_step(21, 2)


def test_a_replacement_is_not_aborted_before_it_has_peers() -> None:
    groups = Groups()
    groups.control = Control(Link(), groups)
    groups.control.on_message(protocol.Begin(2, STORE, True, 0))
    groups.control.on_message(protocol.Revoke(3))
    assert groups.seen == []
    assert groups.control.newest == 3
    groups.control.connecting()
    groups.control.on_message(protocol.Revoke(4))
    assert [epoch for epoch, _, _ in groups.seen] == [4]


def test_waiting_for_a_plan_ends_when_a_newer_epoch_comes(control: Control) -> None:
    timer = threading.Timer(0.05, control.on_message, [protocol.Revoke(2)])
    timer.start()
    with pytest.raises(Superseded):
        control.wait_plan(1)
    timer.join()


def test_a_plan_of_another_epoch_is_not_taken(control: Control) -> None:
    control.on_message(protocol.Revoke(2))
    control.on_message(protocol.Plan(1, 5, STORE, [], None))
    plan = protocol.Plan(2, 4, STORE, [], None)
    timer = threading.Timer(0.05, control.on_message, [plan])
    timer.start()
    assert control.wait_plan(2) == plan
    timer.join()


def test_after_a_resume_later_steps_must_be_confirmed_anew(control: Control) -> None:
    control.confirm(1, 7)
    control.on_message(protocol.Revoke(2))
    control.on_message(protocol.Resume(2))
    control.wait_resume(2, 5)
    assert control.confirmed == 5


def test_what_was_confirmed_in_the_new_epoch_before_the_resume_counts(control: Control) -> None:
    control.confirm(1, 9)
    control.on_message(protocol.Revoke(2))
    control.confirm(2, 5)
    control.on_message(protocol.Resume(2))
    control.wait_resume(2, 4)
    assert control.confirmed == 5


def test_confirmations_of_an_older_epoch_do_not_count(control: Control) -> None:
    control.on_message(protocol.Revoke(2))
    control.on_message(protocol.Resume(2))
    control.wait_resume(2, 5)
    control.confirm(1, 6)
    assert control.confirmed == 5
    control.confirm(2, 6)
    assert control.confirmed == 6


def test_the_first_step_waits_for_the_word_or_a_loss(control: Control) -> None:
    seen: list[Any] = []
    control.on_protect = seen.append
    control.on_message(protocol.Protect(1, None))
    assert control.wait_protect(1)
    control.on_message(protocol.Revoke(2))
    assert not control.wait_protect(1)
    assert seen == [protocol.Protect(1, None)]


def test_what_could_not_be_fetched_is_said(control: Control) -> None:
    control.assembled(1, "no such copy")
    assert control.wait_assembled(1) == "no such copy"
    control.on_message(protocol.Revoke(2))
    with pytest.raises(Superseded):
        control.wait_assembled(1)


def test_verdicts(control: Control) -> None:
    assert control.wait_verdict(3, 1, timeout_s=0.01) is Verdict.SILENCE
    control.on_message(protocol.RaiseIt(3))
    assert control.wait_verdict(3, 1, timeout_s=10) is Verdict.RAISE
    control.on_message(protocol.Revoke(2))
    assert control.wait_verdict(3, 1, timeout_s=10) is Verdict.REVOKED


@pytest.fixture
def guarded(control: Control) -> Any:
    """A guard at step 5, an optimizer with a gradient, and the guard's link."""
    link = Link()
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    guard = StepGuard(control, link, optimizers=[optimizer], confirm_timeout_s=0.05)
    guard.install()
    guard.begin(5, 1)
    weight.grad = torch.ones(1)
    yield guard, optimizer, link
    guard.remove()


def test_the_guard_leaves_weights_alone_when_a_peer_was_lost(
    guarded: Any, control: Control
) -> None:
    _, optimizer, _ = guarded
    control.on_message(protocol.Revoke(2))
    with pytest.raises(Interrupted):
        optimizer.step()
    assert optimizer.param_groups[0]["params"][0].item() == 1.0


def test_the_guard_waits_for_the_step_before(guarded: Any, control: Control) -> None:
    guard, optimizer, link = guarded
    control.confirm(1, 4)
    optimizer.step()
    assert guard.confirm_wait_s == 0
    assert link.sent == []


def test_the_guard_waits_for_the_newest_step_with_replicas(guarded: Any, control: Control) -> None:
    guard, optimizer, _ = guarded
    guard._newest_replicated = lambda step: step - step % 3
    for number, confirmed, waits in ((1, -1, 0), (3, -1, 0), (4, 2, 1), (6, 3, 0), (7, 3, 1)):
        control.confirm(1, confirmed)
        guard.begin(number, 1)
        optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
        before = guard.unprotected
        optimizer.step()
        assert guard.unprotected - before == waits, number


def test_the_guard_waits_once_and_says_so_once(guarded: Any, control: Control) -> None:
    guard, optimizer, link = guarded
    control.confirm(1, 3)
    optimizer.step()
    assert guard.confirm_wait_s >= 0.05
    guard.begin(6, 1)
    optimizer.step()
    assert guard.confirm_wait_s == 0
    assert guard.unprotected == 2
    assert len(link.sent) == 1
    control.confirm(1, 4)
    guard.begin(7, 1)
    optimizer.step()
    assert guard.confirm_wait_s >= 0.05


def test_the_guard_waits_for_the_copy_and_not_for_a_replica_that_was_given_up(
    control: Control,
) -> None:
    waited: list[int] = []
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    guard = StepGuard(
        control,
        Link(),
        optimizers=[optimizer],
        wait_copied=waited.append,
        confirm_timeout_s=60,
    )
    guard.install()
    guard.begin(5, 1)
    control.give_up(4)
    weight.grad = torch.ones(1)
    optimizer.step()
    assert waited == [4]
    assert guard.unprotected == 1
    # The next step waits again, as its predecessor's replica is expected.
    timer = threading.Timer(0.05, control.confirm, [1, 5])
    timer.start()
    guard.begin(6, 1)
    optimizer.step()
    timer.join()
    guard.remove()
    assert guard.unprotected == 1


def test_a_replayed_graph_may_hold_an_optimizer_step(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed: list[Any] = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replayed.append)
    guard = StepGuard(control, Link(), confirm_timeout_s=60)
    guard.install()
    guard.begin(1, 1)
    torch.cuda.CUDAGraph.replay("graph")  # type: ignore[arg-type]
    control.on_message(protocol.Revoke(2))
    with pytest.raises(Interrupted):
        torch.cuda.CUDAGraph.replay("graph")  # type: ignore[arg-type]
    guard.remove()
    assert replayed == ["graph"]
    assert torch.cuda.CUDAGraph.replay == replayed.append


def test_an_optimizer_outside_of_a_body_is_refused(guarded: Any) -> None:
    guard, optimizer, _ = guarded
    guard.end()
    with pytest.raises(Misuse, match="outside"):
        optimizer.step()


def test_cleared_frames_let_go_of_what_they_held() -> None:
    import weakref

    held: list[weakref.ref[Any]] = []

    def body() -> None:
        tensor = torch.ones(3)
        held.append(weakref.ref(tensor))
        try:
            raise ValueError
        except ValueError as cause:
            raise RuntimeError(tensor.sum().item()) from cause

    with pytest.raises(RuntimeError) as caught:
        body()
    error = caught.value
    assert held[0]() is not None
    clear_frames(error)
    assert held[0]() is None
