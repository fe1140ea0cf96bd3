"""What a body may do and leave behind, and what it may not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from one_rank import BATCHES, Launcher, Training, run_body
from torch import nn

from deadpool_runtime import protocol, session
from deadpool_runtime.errors import Misuse
from deadpool_runtime.job import Step

# ---------------------------------------------------------------- bodies that catch too much


@pytest.mark.parametrize("what", ["collective", "guard"])
def test_a_body_that_catches_the_sign_of_a_loss_is_run_again(
    expected: list[Any], launcher: Launcher, what: str
) -> None:
    training = Training()
    numbers, completed = [], []
    for step, batch in training.job.steps(BATCHES):
        with step:
            numbers.append(step.number)
            if len(numbers) == 3:
                launcher.revoke()
            with suppress(Exception):
                if len(numbers) == 3 and what == "collective":
                    raise RuntimeError("Connection closed by peer")
                training(batch)
        completed.append(step.completed)
    assert numbers == [1, 2, 3, 3, 4, 5]
    assert completed == [True, True, False, True, True, True]
    assert training.weights() == expected
    done = [m for m in launcher.said if isinstance(m, protocol.StepDone)]
    assert [(m.epoch, m.step) for m in done] == [(1, 0), (1, 1), (1, 2), (2, 3), (2, 4), (2, 5)]


def test_a_misuse_that_the_body_catches_is_raised_at_its_end(launcher: Launcher) -> None:
    training = Training()
    other = torch.optim.SGD(training.model.parameters(), lr=0.1)

    def body(step: Step, batch: Any) -> None:
        training(batch)
        with suppress(Exception):
            other.step()

    with pytest.raises(Misuse, match=r"SGD.* not given to attach"):
        run_body(training, body)


# ---------------------------------------------------------------- gradients


class Pair:
    """Two models with an optimizer each."""

    def __init__(self, **extras: Any) -> None:
        torch.manual_seed(3)
        self.models = [nn.Linear(2, 1), nn.Linear(2, 1)]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in self.models]
        self.job = session.attach(self.models, self.optimizers, extras=extras)

    def run(self, body: Callable[[int, Any], None]) -> None:
        for step, batch in self.job.steps(BATCHES):
            with step:
                body(step.number, batch)

    def backward(self, index: int, batch: Any) -> None:
        self.models[index](batch).sum().backward()


def test_gradients_without_an_optimizer_step_are_refused(launcher: Launcher) -> None:
    training = Training()

    def body(step: Step, batch: Any) -> None:
        training.model(batch).sum().backward()

    with pytest.raises(Misuse, match="gradient accumulation belongs inside"):
        run_body(training, body)


@pytest.mark.parametrize("clear", [True, False])
def test_each_optimizer_steps_with_its_own_gradients(launcher: Launcher, clear: bool) -> None:
    pair = Pair()

    def body(number: int, batch: Any) -> None:
        first, second = pair.optimizers
        pair.backward(0, batch)
        first.step()
        first.zero_grad()
        if clear:  # the old gradient goes, and the new one may lie where it was
            second.zero_grad()
        pair.backward(1, batch)
        if number != 2:
            second.step()

    with pytest.raises(Misuse, match="step 2 left a gradient in p/1/weight"):
        pair.run(body)


def test_gradients_that_are_cleared_in_the_body_need_no_step(launcher: Launcher) -> None:
    pair = Pair()

    def body(number: int, batch: Any) -> None:
        pair.backward(0, batch)
        pair.backward(1, batch)
        if number % 2:
            pair.optimizers[0].step()
        else:
            pair.optimizers[1].step()
        for optimizer in pair.optimizers:
            optimizer.zero_grad()

    pair.run(body)
    assert launcher.kinds()[-1] == "FinalState"


def test_old_gradients_are_no_reason_to_refuse_a_body(launcher: Launcher) -> None:
    training = Training()

    def body(step: Step, batch: Any) -> None:
        if step.number != 2:
            training(batch)

    run_body(training, body)
    assert launcher.kinds()[-1] == "FinalState"


def test_a_step_with_the_gradients_of_an_earlier_body_is_refused(launcher: Launcher) -> None:
    training = Training()

    def body(step: Step, batch: Any) -> None:
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.model(batch).sum().backward()

    with pytest.raises(Misuse, match="an earlier body computed"):
        run_body(training, body)


def test_a_closure_may_find_old_gradients(launcher: Launcher) -> None:
    training = Training()

    def body(step: Step, batch: Any) -> None:
        def closure() -> Any:
            training.optimizer.zero_grad()
            loss = training.model(batch).sum()
            loss.backward()
            return loss

        training.optimizer.step(closure)

    run_body(training, body)
    assert launcher.kinds()[-1] == "FinalState"


# ---------------------------------------------------------------- loss scalers


def test_a_loss_scaler_may_skip_its_optimizer_step(launcher: Launcher) -> None:
    scaler = torch.amp.GradScaler("cpu")
    training = Training(scaler=scaler)
    weights = []

    def body(step: Step, batch: Any) -> None:
        training.optimizer.zero_grad()
        factor = float("inf") if step.number == 2 else 1.0
        scaler.scale(training.model(batch).sum() * factor).backward()
        scaler.step(training.optimizer)
        scaler.update()
        weights.append(training.weights())

    run_body(training, body)
    assert weights[1] == weights[0]
    assert weights[2] != weights[1]
    assert launcher.kinds()[-1] == "FinalState"
    assert "step" not in vars(scaler)


@pytest.mark.parametrize("enabled", [True, False])
def test_accumulation_over_bodies_is_refused_with_a_loss_scaler_too(
    launcher: Launcher, enabled: bool
) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    training = Training(scaler=scaler)

    def body(step: Step, batch: Any) -> None:
        scaler.scale(training.model(batch).sum()).backward()
        if step.number % 2 == 0:
            scaler.step(training.optimizer)
            scaler.update()
            training.optimizer.zero_grad()

    with pytest.raises(Misuse, match="step 1 left a gradient"):
        run_body(training, body)


# ---------------------------------------------------------------- what a replacement would not see


def test_a_schedule_that_goes_on_between_the_bodies_is_refused(launcher: Launcher) -> None:
    torch.manual_seed(3)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    job = session.attach(model, optimizer, scheduler)

    def loop() -> None:
        for step, batch in job.steps(BATCHES):
            with step:
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()

    with pytest.raises(Misuse, match="Between the bodies of steps 1 and 2"):
        loop()


def test_modes_set_between_the_bodies_are_those_of_the_state_before(launcher: Launcher) -> None:
    training = Training()
    modes = []
    for step, batch in training.job.steps(BATCHES):
        with step:
            modes.append((step.number, training.model[1].training))
            training(batch)
            if len(modes) == 3:
                launcher.revoke()
        # Runs once more than the body of step 3 does.
        training.model[1].train(step.number < 3)
    assert modes == [(1, True), (2, True), (3, True), (3, True), (4, False), (5, False)]


class Wrapper:
    """A scheduler of the user's own around one of torch's."""

    def __init__(self, inner: Any) -> None:
        self.inner = [inner]

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner[0].state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner[0].load_state_dict(state["inner"])


@pytest.mark.parametrize("kind", ["StepLR", "ReduceLROnPlateau"])
def test_a_scheduler_must_be_given_to_attach(launcher: Launcher, kind: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = getattr(torch.optim.lr_scheduler, kind)(optimizer, **KINDS[kind])
    with pytest.raises(Misuse, match="was not given to attach"):
        session.attach(model, optimizer)
    session.attach(model, optimizer, scheduler)


KINDS: dict[str, dict[str, Any]] = {"StepLR": {"step_size": 1}, "ReduceLROnPlateau": {}}


@pytest.mark.parametrize("how", ["sequential", "wrapper", "extra", "gone"])
def test_schedulers_are_found_in_what_was_attached(launcher: Launcher, how: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedules = torch.optim.lr_scheduler
    one: Any = schedules.StepLR(optimizer, 1)
    if how == "sequential":
        one = schedules.SequentialLR(optimizer, [one, schedules.StepLR(optimizer, 2)], [3])
    if how == "wrapper":
        one = Wrapper(one)
    if how == "gone":
        one.itself, one = one, None
    extras = {"schedule": one} if how == "extra" else {}
    session.attach(model, optimizer, None if how == "extra" else one, extras=extras)


def test_a_scheduler_made_after_attach_is_refused(launcher: Launcher) -> None:
    training = Training()
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 1)
    with pytest.raises(Misuse, match="was not given to attach"):
        run_body(training, lambda step, batch: training(batch))
    assert scheduler.last_epoch == 0


def test_arguments_in_the_wrong_places_are_named(launcher: Launcher) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(Misuse, match="a SGD was given for a model"):
        session.attach(optimizer, model)  # type: ignore[arg-type]
