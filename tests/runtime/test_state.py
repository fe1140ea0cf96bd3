"""Copies of the training state: what goes in comes out, bit for bit and in place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from state_copies import assert_equal, live, state_of, take
from torch import nn

from deadpool_runtime.encoding import decode, digest_of, encode
from deadpool_runtime.errors import Misuse, UnsupportedState


class Odd(nn.Module):
    """Parameters and buffers of every kind that has gone wrong somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.randn(4, 3))
        self.transposed = nn.Parameter(torch.randn(3, 5).t())
        self.scalar = nn.Parameter(torch.randn(()))
        self.brain = nn.Parameter(torch.randn(7).bfloat16())
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.twin = self.plain
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("expanded", torch.arange(3).view(1, 3).expand(4, 3))
        self.register_buffer("nothing", None)
        self.register_buffer(
            "images", torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
        )
        self.register_buffer("phase", torch.randn(2, dtype=torch.complex64))


def make(seed: int = 0, model: nn.Module | None = None, **options: Any) -> Any:
    """A model, an optimizer that stepped once, a schedule, and their state."""
    torch.manual_seed(seed)
    model = model or Odd()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3], gamma=0.5)
    return model, optimizer, scheduler, state_of(model, optimizer, [scheduler], **options)


def train(model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    optimizer.zero_grad()
    sum(p.float().pow(2).sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    scheduler.step()


def test_restoring_brings_everything_back_into_the_same_storage() -> None:
    model, optimizer, scheduler, state = make()
    train(model, optimizer, scheduler)
    first = take(state)
    before, parts = live(state), state.part_digests()
    hyper = copy.deepcopy(optimizer.param_groups[0]["lr"]), scheduler.last_epoch
    addresses = {key: t.data_ptr() for key, t in state.tensors.everything().items()}
    for _ in range(2):
        train(model, optimizer, scheduler)
        model.count.add_(1)
    assert state.part_digests() != parts
    first.restore(state)
    assert_equal(live(state), before)
    assert state.part_digests() == parts
    assert (optimizer.param_groups[0]["lr"], scheduler.last_epoch) == hyper
    assert addresses == {key: t.data_ptr() for key, t in state.tensors.everything().items()}
    assert model.twin is model.plain


def test_training_from_a_restored_state_goes_as_it_went() -> None:
    model, optimizer, scheduler, state = make()
    first = take(state)
    for _ in range(4):
        train(model, optimizer, scheduler)
    expected = live(state)
    first.restore(state)
    assert not optimizer.state
    for _ in range(4):
        train(model, optimizer, scheduler)
    assert_equal(live(state), expected)


def test_whether_a_gradient_is_none_or_zero_is_kept() -> None:
    model, optimizer, scheduler, state = make()
    train(model, optimizer, scheduler)
    model.plain.grad = None
    copied = take(state)
    model.plain.grad = torch.ones_like(model.plain)
    copied.restore(state)
    assert model.plain.grad is None
    assert torch.equal(model.scalar.grad, torch.tensor(0.0))


def test_optimizer_state_that_is_no_tensor_comes_back() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0)
    state = state_of(model, optimizer)
    optimizer.state[model.weight]["momentum_buffer"] = None
    optimizer.state[model.weight]["history"] = [torch.ones(2), 3]
    copied = take(state)
    optimizer.state[model.weight]["history"][0].add_(1)
    optimizer.state[model.weight]["momentum_buffer"] = torch.ones(1, 2)
    copied.restore(state)
    assert optimizer.state[model.weight]["momentum_buffer"] is None
    assert torch.equal(optimizer.state[model.weight]["history"][0], torch.ones(2))


def test_extras_are_saved_with_the_rank_and_modules_with_the_model() -> None:
    scaler = torch.amp.GradScaler("cpu")
    averaged = nn.Linear(2, 2)
    *_, state = make(scaler=scaler, averaged=averaged)
    copied = take(state)
    saved = averaged.weight.detach().clone()
    scaler.load_state_dict(scaler.state_dict() | {"scale": 4.0})
    nn.init.zeros_(averaged.weight)
    copied.restore(state)
    assert scaler.get_scale() == 65536.0
    assert torch.equal(averaged.weight, saved)


def test_a_new_process_gets_the_state_of_its_predecessor() -> None:
    donor_model, donor_optimizer, donor_scheduler, donor = make()
    train(donor_model, donor_optimizer, donor_scheduler)
    copied = take(donor)
    model, optimizer, scheduler, state = make(seed=5)
    copied.restore(state)
    assert_equal(live(state), live(donor))
    assert state.part_digests() == donor.part_digests()
    assert optimizer.state[model.plain]["step"].item() == 1
    train(model, optimizer, scheduler)
    train(donor_model, donor_optimizer, donor_scheduler)
    assert state.part_digests() == donor.part_digests()


def test_the_state_of_another_model_is_refused() -> None:
    *_, donor = make()
    *_, state = make(model=nn.Linear(2, 2))
    with pytest.raises(Misuse, match="differs from the one that was saved"):
        take(donor).restore(state)


def test_what_the_ranks_have_in_common_is_the_same_for_all_of_them() -> None:
    *_, state = make()
    assert {item.ranks for item in state.items()} == {(0, 1)}
    assert [item.key for item in state.items()] == [
        key for key in state.tensors.everything() if not key.startswith("b/")
    ]


class Odder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"inner": [1, self.value]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


@pytest.mark.parametrize("value", [object(), frozenset([1]), lambda: None])
def test_what_cannot_come_back_is_refused_by_name(value: Any) -> None:
    with pytest.raises(UnsupportedState, match="'odd'"):
        make(odd=Odder(value))


def test_sparse_parameters_are_refused() -> None:
    model = nn.Module()
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    with pytest.raises(UnsupportedState, match=r"b/0/1\.sparse"):
        make(model=nn.Sequential(nn.Linear(1, 1), model))


def test_equal_values_have_equal_digests_however_they_were_built() -> None:
    text = "".join(["a", "b"])
    left = {"x": [text, text], "y": (1, 2.0, None, True)}
    right = decode(encode({"y": (1, 2.0, None, True), "x": ["ab", text]}, "value"))
    assert digest_of(left, "left") == digest_of(right, "right")
    assert digest_of([1, 23], "left") != digest_of([12, 3], "right")
    assert digest_of(1, "left") != digest_of(True, "right")
    assert digest_of(float("nan"), "left") == digest_of(float("nan"), "right")
