"""What is registered with modules and optimizers in other ways than as a tensor from the start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from state_copies import Copied, live, state_of, take
from torch import nn

from deadpool_runtime.errors import Misuse, UnsupportedState


class Late(nn.Module):
    """Registers a buffer in its first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(2))
        self.mean: torch.Tensor
        self.mean.add_(x.mean(0))
        return self.inner(x + self.mean)  # type: ignore[no-any-return]


class Quantized(nn.Linear):
    """Saves a number of its own, as torch allows it."""

    scale = 1.0

    def get_extra_state(self) -> float:
        return self.scale

    def set_extra_state(self, state: float) -> None:
        self.scale = state


class Metric(nn.Module):
    """A module whose state_dict is all its own."""

    def __init__(self) -> None:
        super().__init__()
        self.history = Tape()

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {"values": list(self.history.values)}

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        self.history.values = list(args[0]["values"])


class Tape:
    def __init__(self) -> None:
        self.values: list[float] = []


def test_a_buffer_that_is_registered_later_comes_back() -> None:
    module, other = Late(), Late()
    state = state_of(module)
    before = take(state)
    module(torch.ones(1, 2))
    after = take(state)
    saved = live(state)
    module(torch.ones(1, 2))
    after.restore(state)
    new = state_of(other)
    after.restore(new)
    for each in (state, new):
        assert torch.equal(live(each)["b/0/mean"], saved["b/0/mean"])
    assert torch.equal(other.mean, torch.ones(2))
    before.restore(state)
    assert not hasattr(module, "mean")
    module(torch.ones(1, 2))
    take(state)
    assert torch.equal(live(state)["b/0/mean"], saved["b/0/mean"])


def test_what_a_module_saves_by_itself_comes_back() -> None:
    part, metric = Quantized(2, 1), Metric()
    state = state_of(nn.Sequential(part), metric=metric)
    part.scale = 3.0
    metric.history.values.append(2.0)
    copied = take(state)
    part.scale = 4.0
    metric.history.values.append(5.0)
    copied.restore(state)
    assert (part.scale, metric.history.values) == (3.0, [2.0])


def test_a_module_whose_state_dict_has_nothing_more_is_not_saved_twice() -> None:
    class Renamed(nn.Linear):
        def state_dict(self, *args: Any, **options: Any) -> Any:
            return {f"my.{key}": value for key, value in super().state_dict().items()}

        def load_state_dict(self, *args: Any, **options: Any) -> Any:
            raise AssertionError("never called")

    state = state_of(nn.Linear(2, 1), renamed=Renamed(2, 2))
    take(state).restore(state)


def grown(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": model[1].parameters()})


def deeper(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model.append(nn.Linear(1, 1))


def untied(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[1].table = torch.ones(2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (grown, r"SGD .*\[2\] parameters then, \[2, 2\] now.*before attach"),
        (deeper, r"Sequential\) got a parameter or a module after attach"),
        (untied, "b/0/0.table and b/0/1.table were one buffer"),
    ],
)
def test_another_structure_is_refused_in_the_step_that_makes_it(
    change: Callable[[nn.Sequential, torch.optim.Optimizer], None], words: str
) -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    table = torch.zeros(2)
    for part in model:
        part.register_buffer("table", table)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    state = state_of(model, optimizer)
    take(state)
    change(model, optimizer)
    with pytest.raises(Misuse, match=words):
        take(state)


@pytest.mark.parametrize("what", ["state", "group", "sparse"])
def test_optimizer_state_that_a_new_process_could_not_make_is_refused(what: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = state_of(model, optimizer)
    tensor = torch.zeros(2)
    optimizer.state[model.weight]["sum"] = tensor
    if what == "state":
        optimizer.state[model.bias]["sum"] = tensor
    elif what == "group":
        optimizer.param_groups[0]["sum"] = tensor
    else:
        optimizer.state[model.bias]["sum"] = tensor.to_sparse()
    with pytest.raises(UnsupportedState, match=r"SGD"):
        take(state)


def test_optimizer_state_may_change_its_shape_and_come_and_go() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = state_of(model, optimizer)
    held: Any = optimizer.state[model.weight]
    held.update(history=torch.ones(2), buffer=None)
    copied = take(state)
    held.update(history=torch.ones(3), buffer=torch.ones(1))
    later = take(state)
    copied.restore(state)
    assert (held["history"].tolist(), held["buffer"]) == ([1, 1], None)
    later.restore(state)
    assert (held["history"].tolist(), held["buffer"].tolist()) == ([1, 1, 1], [1])


def test_a_sparse_gradient_is_followed_by_a_sparse_zero() -> None:
    def build() -> tuple[nn.Embedding, Any, Callable[[int], None]]:
        torch.manual_seed(0)
        module = nn.Embedding(6, 2, sparse=True)
        optimizer: Any = torch.optim.SparseAdam(module.parameters(), lr=0.1)

        def train(number: int) -> None:
            module(torch.tensor([number, 1, 1])).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        return module, state_of(module, optimizer), train

    _, reference, train = build()
    for number in range(5):
        train(number)
    _, state, train = build()
    for number in range(3):
        train(number)
    copied: Copied = take(state)
    for module, here, train_here in ((_, state, train), build()):
        copied.restore(here)
        assert module.weight.grad is not None
        assert module.weight.grad.is_sparse
        for number in range(3, 5):
            train_here(number)
        assert here.part_digests() == reference.part_digests()


def test_a_state_that_cannot_be_given_back_ends_the_job_at_once() -> None:
    class Broken:
        def state_dict(self) -> dict[str, int]:
            return {"count": 1}

        def load_state_dict(self, state: Any) -> None:
            raise KeyError("counter")

    state = state_of(nn.Linear(2, 1), broken=Broken())
    with pytest.raises(UnsupportedState, match=r"extra 'broken' \(.*Broken\).*KeyError: 'counter'"):
        take(state).restore(state)


def test_a_lazy_module_must_have_run() -> None:
    with pytest.raises(UnsupportedState, match="run the lazy module once"):
        state_of(nn.Sequential(nn.LazyLinear(2)))
