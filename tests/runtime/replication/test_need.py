"""What an optimizer will hold is known before its first step, and is what it then holds."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from deadpool_runtime.durable.share import SPLIT_NBYTES
from deadpool_runtime.protocol import SegmentSize
from deadpool_runtime.replication.forecast import forecast
from deadpool_runtime.replication.need import predict_state
from deadpool_runtime.state import Item
from deadpool_runtime.tensors import TensorMap

Make = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p),
    "adamw for-loop": lambda p: torch.optim.AdamW(p, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "adamw tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "adam": lambda p: torch.optim.Adam(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "rprop": lambda p: torch.optim.Rprop(p),
}


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    shapes = [(40, 30), (7,), (), (4, 3, 5, 5), (1, 9), (6, 6)]
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def step(optimizer: Optimizer, given: list[nn.Parameter]) -> None:
    for parameter in given:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def held(optimizer: Optimizer, parameter: torch.Tensor) -> set[tuple[str, torch.dtype, Any]]:
    return {
        (name, value.dtype, tuple(value.shape))
        for name, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prediction_is_what_the_optimizer_then_holds(name: str, dtype: torch.dtype) -> None:
    given = parameters(dtype)
    optimizer = OPTIMIZERS[name](given)
    prediction = predict_state(optimizer)
    assert prediction.states is not None, prediction.reason
    step(optimizer, given)
    for index, parameter in enumerate(given):
        expected = {(s.name, s.dtype, s.shape) for s in prediction.states[0, index]}
        assert expected == held(optimizer, parameter)


def test_groups_have_their_own_options() -> None:
    one, two = parameters(), parameters()
    groups: list[dict[str, Any]] = [{"params": one, "momentum": 0.9}, {"params": two}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    prediction = predict_state(optimizer)
    assert prediction.states is not None
    assert [s.name for s in prediction.states[0, 0]] == ["momentum_buffer"]
    assert prediction.states[1, 0] == ()


def test_frozen_parameters_get_no_state_and_step_counts_lie_on_the_cpu() -> None:
    given = parameters()
    given[1].requires_grad_(False)
    prediction = predict_state(torch.optim.AdamW(given))
    assert prediction.states is not None
    assert prediction.states[0, 1] == ()
    by_name = {state.name: state for state in prediction.states[0, 0]}
    assert by_name["step"].on_cpu
    assert by_name["step"].numel == 1
    assert by_name["exp_avg"].numel == 1200


def test_a_rank_that_has_a_part_of_a_parameter_gets_state_for_that_part() -> None:
    given = parameters()
    prediction = predict_state(torch.optim.AdamW(given), local=lambda tensor: tensor.view(-1)[:1])
    assert prediction.states is not None
    assert {s.numel for each in prediction.states.values() for s in each} == {1}


def test_state_that_is_there_already_counts_as_it_is() -> None:
    given = parameters()
    optimizer = torch.optim.AdamW(given)
    step(optimizer, given)
    optimizer.state[given[0]]["extra"] = torch.zeros(3)
    prediction = predict_state(optimizer)
    assert prediction.states is not None
    assert "extra" in {state.name for state in prediction.states[0, 0]}


def test_nothing_changes_and_no_hook_runs() -> None:
    given = parameters()
    before = [parameter.detach().clone() for parameter in given]
    ran: list[str] = []
    optimizer = torch.optim.AdamW(given, lr=torch.tensor(0.1))
    optimizer.register_step_pre_hook(lambda *_: ran.append("own"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    handles = [
        register_optimizer_step_pre_hook(lambda *_: ran.append("pre")),
        register_optimizer_step_post_hook(lambda *_: ran.append("post")),
    ]
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    try:
        assert predict_state(optimizer).states is not None
    finally:
        for handle in handles:
            handle.remove()
    assert ran == []
    assert not optimizer.state
    assert all(map(torch.equal, given, before))
    assert all(parameter.grad is None for parameter in given)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert states[2] == str(np.random.get_state())
    assert scheduler.last_epoch == 0


def test_random_optimizers_leave_the_generators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    @torch.no_grad()
    def step(self: Optimizer, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["noise"] = torch.randn_like(parameter)
                self.state[parameter]["seed"] = torch.tensor(random.random())
        np.random.rand()

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    prediction = predict_state(optimizer)
    assert prediction.states is not None
    assert [s.shape for s in prediction.states[0, 0]] == [(40, 30), ()]
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert states[2] == str(np.random.get_state())


def test_nothing_of_the_scripts_own_is_tried_out() -> None:
    ran: list[str] = []

    class Own(torch.optim.SGD):
        schedule = ran.append

        def step(self, closure: Any = None) -> Any:
            ran.append("step")
            return super().step()

        def __setstate__(self, state: Any) -> None:
            ran.append("setstate")
            super().__setstate__(state)  # type: ignore[no-untyped-call]

    class Bare(Optimizer):
        def step(self, closure: Any = None) -> Any:
            ran.append("step")

    own = predict_state(Own(parameters(), lr=0.1, momentum=0.9))
    assert own.states is not None
    assert [s.name for s in own.states[0, 0]] == ["momentum_buffer"]
    assert "is taken to hold what SGD does" in own.reason
    assert "not one of torch's own" in predict_state(Bare(parameters(), {})).reason
    assert ran == []


def test_what_cannot_be_measured_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    @torch.no_grad()
    def step(self: Optimizer, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["odd"] = torch.zeros(2 * parameter.numel())

    class Wrapping(torch.optim.SGD):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.inner = torch.optim.SGD(*args, **options)

    assert "closure" in predict_state(torch.optim.LBFGS(parameters())).reason
    assert "inner" in predict_state(Wrapping(parameters(), lr=0.1)).reason
    assert "tried out" in predict_state(torch.optim.SparseAdam(parameters())).reason
    monkeypatch.setattr(torch.optim.SGD, "step", step)
    assert "odd" in predict_state(torch.optim.SGD(parameters(), lr=0.1)).reason


def test_what_a_rank_writes_of_a_checkpoint_is_foreseen_with_the_optimizers_state() -> None:
    """Two ranks have a large model in common, so each writes half of it."""
    with torch.device("meta"):
        model = nn.ModuleList(nn.Linear(SPLIT_NBYTES // 4, 1, bias=False) for _ in range(2))
    tensors = TensorMap([model], [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)], {})
    items = [Item(key, each, (0, 1), False) for key, each in tensors.everything().items()]
    for rank in (0, 1):
        found = forecast(tensors, items, lambda _: (0, 1), rank, 1000)
        assert found.sizes == [SegmentSize((0, 1), 4 * SPLIT_NBYTES)]
        assert found.save_nbytes == 2 * SPLIT_NBYTES + 1000
