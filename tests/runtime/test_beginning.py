"""What a script brings to its first step: nothing yet, or what a checkpoint of its own had."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from deadpool_runtime.beginning import brings_state

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": torch.optim.AdamW,
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    # Makes its state at once.
    "adagrad": torch.optim.Adagrad,
}


def stepped(make: Make, steps: int) -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = make([parameter])
    for _ in range(steps):
        parameter.grad = torch.ones(3)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizer_that_has_made_steps_or_loaded_them_is_told_from_a_new_one(make: Make) -> None:
    new, old = stepped(make, 0), stepped(make, 2)
    assert not brings_state([new], [])
    assert brings_state([new, old], [])
    new.load_state_dict(old.state_dict())
    assert brings_state([new], [])


def test_scheduler_that_has_made_steps_counts_too() -> None:
    optimizer = stepped(lambda parameters: torch.optim.SGD(parameters, lr=0.1), 1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    assert not brings_state([optimizer], [scheduler])
    optimizer.step()
    scheduler.step()
    assert brings_state([optimizer], [scheduler])
    assert not brings_state([optimizer], [object()])
