"""One rank in this process, and a link that answers as a launcher would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from deadpool_runtime import context, protocol, session
from deadpool_runtime.control import Control
from deadpool_runtime.errors import Misuse, UnsupportedState
from deadpool_runtime.groups.errors import UnsupportedLayout
from deadpool_runtime.job import Job, Step

STORE = protocol.Address("127.0.0.1", 1)


class NoGroups:
    """A registry of a process without any group."""

    groups: tuple[()] = ()

    def abort(self, epoch: int | None = None) -> int:
        return 0

    def open_store(self, host: str, port: int, timeout: Any) -> Any:
        return dist.HashStore()

    def rebuild(self, epoch: int, store: Any) -> None:
        return None


class Launcher:
    """The link's other end: confirms, plans for the newest slot (or ``step``), ends."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.control = Control(self, NoGroups())
        self.step: int | None = None
        self.at_end: Callable[[], None] | None = None
        self.verdict = True

    def start(self, on_message: Callable[[Any], None]) -> None:
        raise AssertionError

    def send(self, message: Any) -> None:
        self.said.append(message)
        tell = self.control.on_message
        match message:
            case protocol.StepDone(step=step):
                tell(protocol.Confirmed(step))
            case protocol.Parked(epoch=epoch, slots=slots):
                step = slots[-1] if self.step is None else self.step
                tell(protocol.Plan(epoch, step, STORE, {}, b""))
            case protocol.Restored(epoch=epoch):
                tell(protocol.Resume(epoch))
            case protocol.StepRaised(step=step) if self.verdict:
                tell(protocol.RaiseIt(step))
            case protocol.StepsEnded():
                act, self.at_end = self.at_end, None
                if act is not None:
                    act()
                else:
                    tell(protocol.AllEnded())
            case _:
                pass

    def kinds(self) -> list[str]:
        return [type(message).__name__ for message in self.said]

    def revoke(self) -> None:
        self.control.on_message(protocol.Revoke(self.control.newest + 1))


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    return install(monkeypatch)


def install(monkeypatch: pytest.MonkeyPatch, world_size: int = 1) -> Launcher:
    """A new launcher, and a process that has not attached yet."""
    launcher = Launcher()
    launcher.control.on_message(protocol.Begin(1, STORE, False, 0))
    made = context.RankContext(
        rank=0,
        local_rank=0,
        world_size=world_size,
        born=1,
        epoch=1,
        replacement=False,
        attempt=0,
        link=launcher,
        control=launcher.control,
        registry=NoGroups(),  # type: ignore[arg-type]
        store=STORE,
        record_final_state=True,
        fault_step=None,
        run_dir="",
    )
    monkeypatch.setattr(context, "_current", made)
    monkeypatch.setattr(session, "_attached", False)
    return launcher


class Training:
    """A small model under protection; calling it runs one body."""

    def __init__(self, **extras: Any) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.job: Job = session.attach(self.model, self.optimizer, extras=extras)

    def __call__(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(batch).sum().backward()
        self.optimizer.step()

    def weights(self) -> list[Any]:
        return [parameter.tolist() for parameter in self.model.parameters()]


BATCHES = [torch.randn(3, 2, generator=torch.Generator().manual_seed(i)) for i in range(5)]


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The weights after a run in which nothing happens."""
    install(monkeypatch)
    training = Training()
    for step, batch in training.job.steps(BATCHES):
        with step:
            training(batch)
    return training.weights()


def test_what_a_rank_says_in_a_quiet_run(launcher: Launcher) -> None:
    run_body(training := Training(), lambda step, batch: training(batch))
    assert launcher.kinds() == ["Attached", *["StepDone"] * 6, "StepsEnded", "FinalState"]
    done = [m for m in launcher.said if isinstance(m, protocol.StepDone)]
    assert [m.step for m in done] == [0, 1, 2, 3, 4, 5]
    assert [bool(m.digest) for m in done] == [True, True, False, False, False, False]
    parts = {"parameters", "buffers", "optimizer", "scheduler", "extras", "rng", "data", "user"}
    assert set(launcher.said[-1].parts) == parts


def test_a_step_revoked_in_its_body_is_run_again(expected: list[Any], launcher: Launcher) -> None:
    training = Training()
    numbers, completed = [], []
    job = training.job
    job.state["count"] = 0
    for step, batch in job.steps(BATCHES):
        with step:
            numbers.append(step.number)
            job.state["count"] += 1
            if len(numbers) == 3:
                launcher.revoke()
            training(batch)
        completed.append(step.completed)
        job.state["after"] = step.number
    assert numbers == [1, 2, 3, 3, 4, 5]
    assert completed == [True, True, False, True, True, True]
    assert job.state == {"count": 5, "after": 5}
    assert training.weights() == expected


@pytest.mark.parametrize("back_to", [2, 3, 4])
def test_a_step_that_ended_well_can_be_undone(
    expected: list[Any], launcher: Launcher, back_to: int
) -> None:
    training = Training()
    launcher.step = back_to
    numbers = []
    for step, batch in training.job.steps(BATCHES):
        with step:
            numbers.append(step.number)
            training(batch)
            if len(numbers) == 4:
                launcher.revoke()
    assert numbers == [1, 2, 3, 4, *range(back_to + 1, 6)]
    assert training.weights() == expected


def test_a_loss_while_waiting_at_the_end(expected: list[Any], launcher: Launcher) -> None:
    training = Training()
    launcher.at_end = launcher.revoke
    launcher.step = 3
    numbers = []
    for step, batch in training.job.steps(BATCHES):
        with step:
            numbers.append(step.number)
            training(batch)
    assert numbers == [1, 2, 3, 4, 5, 4, 5]
    assert training.weights() == expected


def test_an_exception_is_explained_by_a_revoke_that_comes_after_it(launcher: Launcher) -> None:
    launcher.verdict = False
    training = Training()
    send, raised = launcher.send, []

    def send_and_revoke(message: Any) -> None:
        send(message)
        if isinstance(message, protocol.StepRaised):
            launcher.revoke()

    launcher.send = send_and_revoke  # type: ignore[method-assign]
    for step, batch in training.job.steps(BATCHES):
        with step:
            if step.number == 2 and not raised:
                raised.append(step.number)
                raise ConnectionError("peer")
            training(batch)
    assert raised == [2]


def run_body(training: Training, body: Callable[[Step, Any], None]) -> None:
    for step, batch in training.job.steps(BATCHES):
        with step:
            body(step, batch)


def raising(error: BaseException) -> Callable[[Step, Any], None]:
    def body(step: Step, batch: Any) -> None:
        raise error

    return body


def test_the_scripts_own_exception_comes_out(launcher: Launcher) -> None:
    with pytest.raises(ZeroDivisionError):
        run_body(Training(), raising(ZeroDivisionError()))
    assert launcher.kinds()[-1] == "StepRaised"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_leaving_on_purpose_asks_nobody(launcher: Launcher, error: BaseException) -> None:
    with pytest.raises(type(error)):
        run_body(Training(), raising(error))
    assert "StepRaised" not in launcher.kinds()


def test_silence_ends_the_wait_for_a_verdict(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "VERDICT_TIMEOUT_S", 0.05)
    launcher.verdict = False
    with pytest.raises(ZeroDivisionError):
        run_body(Training(), raising(ZeroDivisionError()))


def test_a_body_outside_of_with_is_refused(launcher: Launcher) -> None:
    with pytest.raises(Misuse, match="outside of `with step:`"):
        for _ in Training().job.steps(BATCHES):
            pass


def test_a_step_is_entered_once(launcher: Launcher) -> None:
    def body(step: Step, batch: Any) -> None:
        with step:
            pass

    with pytest.raises(Misuse, match="twice"):
        run_body(Training(), body)


def test_gradients_without_an_optimizer_step_are_refused(launcher: Launcher) -> None:
    training = Training()

    def body(step: Step, batch: Any) -> None:
        training.model(batch).sum().backward()

    with pytest.raises(Misuse, match="gradient accumulation"):
        run_body(training, body)


def test_a_loss_scaler_may_skip_its_optimizer_step(launcher: Launcher) -> None:
    training = Training(scaler=torch.amp.GradScaler("cpu"))

    def body(step: Step, batch: Any) -> None:
        training.model(batch).sum().backward()

    run_body(training, body)
    assert launcher.kinds()[-1] == "FinalState"


def test_old_gradients_are_no_reason_to_refuse_a_body(launcher: Launcher) -> None:
    training = Training()

    def body(step: Step, batch: Any) -> None:
        if step.number != 2:
            training(batch)

    run_body(training, body)


def test_state_that_cannot_come_back_is_refused_by_name(launcher: Launcher) -> None:
    training = Training()

    def body(step: Step, batch: Any) -> None:
        training.job.state["best"] = np.float64(1.0)
        training(batch)

    with pytest.raises(UnsupportedState, match=r"job\.state holds at 'best' a numpy.float64"):
        run_body(training, body)


def test_attach_is_called_once(launcher: Launcher) -> None:
    Training()
    with pytest.raises(Misuse, match="second time"):
        Training()


def test_several_ranks_need_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, world_size=2)
    with pytest.raises(UnsupportedLayout, match="wrap the model"):
        Training()
