"""Loss scalers and optimizers: those that are interrupted, and those that nobody attached."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from one_rank import Launcher, Training, install, run_body
from torch import nn
from torch.optim.swa_utils import AveragedModel

from deadpool_runtime import session
from deadpool_runtime.errors import Misuse
from deadpool_runtime.job import Step


class Wrapped:
    """A scaler inside of an object of the script's own."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler

    def state_dict(self) -> Any:
        return self.scaler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.scaler.load_state_dict(state)


class Descent(Training):
    """With SGD, since AdamW hardly sees how large its gradients are."""

    def __init__(self, scaler: torch.amp.GradScaler, *, wrapped: bool) -> None:
        torch.manual_seed(3)
        self.scaler = scaler
        self.model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)  # type: ignore[assignment]
        extras = {"scaler": Wrapped(scaler) if wrapped else scaler}
        self.job = session.attach(self.model, self.optimizer, extras=extras)

    def run(self, *, unscale: bool, cut_short: Callable[[], None]) -> Any:
        """In step 3 something happens between the scaler's first act and its update."""

        def body(step: Step, batch: Any) -> None:
            self.optimizer.zero_grad()
            self.scaler.scale(self.model(batch).sum()).backward()
            if unscale:
                self.scaler.unscale_(self.optimizer)
            if step.number == 3:
                cut_short()
            self.scaler.step(self.optimizer)
            self.scaler.update()

        run_body(self, body)
        return self.weights(), self.scaler.state_dict()


@pytest.mark.parametrize(("unscale", "wrapped"), [(False, False), (True, False), (False, True)])
def test_a_step_that_is_cut_short_is_unscaled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, unscale: bool, wrapped: bool
) -> None:
    def run(name: str, *, disturbed: bool) -> Any:
        (tmp_path / name).mkdir()
        launcher = install(monkeypatch, tmp_path / name)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        pending = [launcher.revoke] if disturbed else []

        def cut_short() -> None:
            if pending:
                pending.pop()()

        result = Descent(scaler, wrapped=wrapped).run(unscale=unscale, cut_short=cut_short)
        assert ("Restored" in launcher.kinds()) == disturbed
        return result

    assert run("disturbed", disturbed=True) == run("calm", disturbed=False)


def test_a_scaler_that_is_not_updated_in_the_body_is_refused(launcher: Launcher) -> None:
    scaler = torch.amp.GradScaler("cpu")
    training = Training(scaler=scaler)

    def body(step: Step, batch: Any) -> None:
        if step.number > 1:
            scaler.update()
        training.optimizer.zero_grad()
        scaler.scale(training.model(batch).sum()).backward()
        scaler.step(training.optimizer)

    with pytest.raises(Misuse, match=r"body of step 1 a GradScaler .* update\(\)"):
        run_body(training, body)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_must_be_given_to_attach(launcher: Launcher, enabled: bool) -> None:
    training = Training()
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)

    def body(step: Step, batch: Any) -> None:
        training.optimizer.zero_grad()
        scaler.scale(training.model(batch).sum()).backward()
        scaler.step(training.optimizer)
        scaler.update()

    if enabled:
        with pytest.raises(Misuse, match="A GradScaler that was not given to attach"):
            run_body(training, body)
    else:
        run_body(training, body)
    assert torch.amp.GradScaler.step.__qualname__ == "GradScaler.step"


def test_an_optimizer_of_other_parameters_must_be_given_to_attach(launcher: Launcher) -> None:
    training = Training()
    other = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

    def body(step: Step, batch: Any) -> None:
        training(batch)
        other(batch).sum().backward()
        optimizer.step()

    with pytest.raises(Misuse, match=r"\(SGD\) that was not given to attach stepped in step 2"):
        run_body(training, body)


def test_an_optimizer_may_come_and_go_in_a_body(launcher: Launcher) -> None:
    training = Training()

    def body(step: Step, batch: Any) -> None:
        noise = torch.zeros_like(batch, requires_grad=True)
        attack = torch.optim.Adam([noise], lr=0.1)
        for _ in range(2):
            training.model(batch + noise).sum().backward()
            attack.step()
        training(batch)

    run_body(training, body)
    assert launcher.kinds()[-1] == "FinalState"


@pytest.mark.parametrize("given", [True, False])
def test_averaged_weights_that_were_not_attached_are_refused(
    launcher: Launcher, given: bool
) -> None:
    update = AveragedModel.update_parameters
    averages = AveragedModel(nn.Linear(2, 1))
    training = Training(**({"ema": averages} if given else {}))

    def body(step: Step, batch: Any) -> None:
        training(batch)
        averages.update_parameters(nn.Linear(2, 1))

    if given:
        run_body(training, body)
        assert int(averages.n_averaged) == 5
    else:
        with pytest.raises(Misuse, match=r"AveragedModel .* updated in step 1, .*extras="):
            run_body(training, body)
    assert AveragedModel.update_parameters is update
