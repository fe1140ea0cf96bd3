"""Buffers and modes: what a rank has for itself, and what it shares with its peers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from state_copies import Copied, assert_equal, live, state_of, take
from torch import nn

from deadpool_runtime import constants
from deadpool_runtime.encoding import digest_of, encode
from deadpool_runtime.errors import Misuse
from deadpool_runtime.state import TrainingState


class Buffers(nn.Module):
    """One small buffer and one that is too large to travel with every step."""

    small: torch.Tensor
    large: torch.Tensor

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("small", torch.full((4,), float(rank)))
        self.register_buffer("large", torch.arange(20000.0))


def test_small_buffers_belong_to_the_rank_and_large_ones_when_they_change() -> None:
    model = Buffers()
    state = state_of(model)
    assert list(state.own_part()["buffers"]) == ["b/0/small"]
    model.large[0] = -0.0
    assert list(state.own_part()["buffers"]) == ["b/0/small", "b/0/large"]


def fill(buffer: torch.Tensor) -> None:
    buffer.numpy()[:] = 1.0


CHANGES = pytest.mark.parametrize(
    "change",
    [
        lambda model: model.large.add_(1),
        lambda model: model.large.data.add_(1),
        lambda model: fill(model.large),
        lambda model: setattr(model, "large", torch.ones(20000)),
        lambda model: setattr(model, "large", torch.ones(30000, dtype=torch.float64)),
        lambda model: setattr(model, "large", None),
        lambda model: setattr(model, "small", torch.ones(7)),
    ],
)


@CHANGES
def test_however_a_buffer_is_changed_it_comes_back(change: Any) -> None:
    model = Buffers()
    state = state_of(model)
    first = take(state)
    before, constructed = live(state), copy.deepcopy(model)
    change(model)
    second = take(state)
    after = live(state)
    first.restore(state)
    assert_equal(live(state), before)
    second.restore(state)
    assert_equal(live(state), after)
    other = state_of(constructed)
    second.restore(other)
    assert_equal(live(other), after)


def training_step(
    state: TrainingState,
    body: Callable[[], object] = lambda: None,
    behind: Callable[[], object] = lambda: None,
) -> Copied:
    """A step as a job runs it, with what the body does and what comes behind it."""
    body()
    plain = state.plain_part()
    items = state.items()
    tensors = {item.key: item.tensor.clone() for item in items}
    behind()
    return Copied(tensors, set(), encode(plain | state.own_part(), "own"))


@CHANGES
@pytest.mark.parametrize("where", ["body", "behind"])
def test_a_change_in_any_step_is_seen_in_that_step(change: Any, where: str) -> None:
    model = Buffers()
    state = state_of(model)
    constructed = copy.deepcopy(model)
    for _ in range(4):
        training_step(state)
    copied = training_step(state, **{where: lambda: change(model)})
    after = live(state)
    change(model)
    copied.restore(state)
    assert_equal(live(state), after)
    other = state_of(constructed)
    copied.restore(other)
    assert_equal(live(other), after)


def test_a_buffer_that_is_changed_back_behind_the_body_is_not_lost() -> None:
    model = Buffers()
    state = state_of(model)
    first = live(state)
    for _ in range(3):
        training_step(state)
    training_step(state, lambda: model.large.data.add_(1))
    copied = training_step(state, behind=lambda: model.large.data.sub_(1))
    assert "b/0/large" not in copied.tensors
    model.large.zero_()
    copied.restore(state)
    assert_equal(live(state), first)
    assert "b/0/large" in training_step(state).tensors


def test_each_constant_is_hashed_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Buffers()
    state = state_of(model)
    for _ in range(2):
        training_step(state)
    hashed: list[str] = []

    def noting_digest_of(value: Any, key: str) -> str:
        hashed.append(key)
        return digest_of(value, key)

    monkeypatch.setattr(constants, "digest_of", noting_digest_of)
    for _ in range(3):
        training_step(state, lambda: model.large.add_(0))  # as DDP does it
    assert hashed == ["b/0/large"] * 3


def test_a_large_buffer_is_common_to_all_ranks_while_it_is_as_it_was() -> None:
    model = Buffers()
    state = state_of(model)
    assert [item.key for item in state.items()] == ["p/0/weight", "b/0/large"]
    model.large.add_(1)
    assert [item.key for item in state.items()] == ["p/0/weight"]


def test_batch_normalisation_buffers_belong_to_the_rank() -> None:
    model = nn.BatchNorm1d(3)
    state = state_of(model)
    names = ["b/0/running_mean", "b/0/running_var", "b/0/num_batches_tracked"]
    assert list(state.own_part()["buffers"]) == names


def test_modes_come_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 2))
    state = state_of(model)
    model[1].eval()
    model[0].requires_grad_(False)
    copied = take(state)
    expected = state.tensors.modes()
    model.train()
    model[2].eval()
    model[0].requires_grad_(True)
    model[2].bias.requires_grad_(False)
    copied.restore(state)
    assert state.tensors.modes() == expected
    assert [module.training for module in model] == [True, False, True]
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]
    constructed = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 2))
    other = state_of(constructed)
    copied.restore(other)
    assert other.tensors.modes() == expected


def test_a_parameter_of_another_type_is_refused() -> None:
    model = nn.Linear(2, 2)
    state = state_of(model)
    copied = take(state)
    model.double()
    with pytest.raises(Misuse, match="differs from the one that was saved"):
        copied.restore(state)
