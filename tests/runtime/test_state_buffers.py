"""Buffers and modes: what a rank has for itself, and what it shares with its peers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from deadpool_runtime.encoding import decode, encode
from deadpool_runtime.errors import Misuse
from deadpool_runtime.state import TrainingState
from deadpool_runtime.transfer import receive_slot, send_slot


def make(model: nn.Module) -> TrainingState:
    return TrainingState([model], [torch.optim.SGD(model.parameters(), lr=0.1)], [], {})


def take(state: TrainingState, step: int) -> None:
    state.copy(step)
    state.seal(step, encode(state.own_part(), "own"))


def live(state: TrainingState) -> dict[str, torch.Tensor]:
    return {key: tensor.detach().clone() for key, tensor in state.tensors.everything().items()}


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert list(left) == list(right)
    for key, value in left.items():
        assert value.dtype == right[key].dtype
        assert torch.equal(value, right[key]), key


class Pipe:
    """Both ends of a transfer, one after the other; can flip a bit on the way."""

    def __init__(self) -> None:
        self.data = bytearray()

    def send(self, data: memoryview) -> None:
        self.data += data

    def receive_into(self, room: memoryview) -> None:
        room[:] = self.data[: len(room)]
        del self.data[: len(room)]

    def send_sized(self, data: bytes) -> None:
        self.data += len(data).to_bytes(8, "big") + data

    def receive_sized(self) -> bytes:
        nbytes = int.from_bytes(self.data[:8], "big")
        data = bytes(self.data[8 : 8 + nbytes])
        del self.data[: 8 + nbytes]
        return data


def hand_over(donor: TrainingState, to: TrainingState, *, step: int, own: bytes) -> None:
    """Restore in ``to`` what ``donor`` holds of ``step``."""
    pipe: Any = Pipe()
    send_slot(pipe, donor.slot_of(step), set())
    receive_slot(pipe, to.slot_for(step))
    to.seal(step, own)
    to.restore(step, decode(own))


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
    state = make(model)
    assert list(state.own_part()["buffers"]) == ["b/0/small"]
    model.large[0] = -0.0
    assert list(state.own_part()["buffers"]) == ["b/0/small", "b/0/large"]


def fill(buffer: torch.Tensor) -> None:
    buffer.numpy()[:] = 1.0


@pytest.mark.parametrize(
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
def test_however_a_buffer_is_changed_it_comes_back(change: Any) -> None:
    model = Buffers()
    state = make(model)
    take(state, 0)
    before, constructed = live(state), copy.deepcopy(model)
    change(model)
    take(state, 1)
    after = live(state)
    state.restore(0, decode(state.slot_of(0).own))
    assert_equal(live(state), before)
    state.restore(1, decode(state.slot_of(1).own))
    assert_equal(live(state), after)
    # A new process, with the slot of a peer that changed nothing.
    other = make(constructed)
    hand_over(state, other, step=0, own=state.slot_of(1).own)
    assert_equal(live(other), after)


def test_a_rank_gets_its_own_small_buffer_and_not_its_peers() -> None:
    donor = make(Buffers(rank=0))
    lost_model = Buffers(rank=1)
    lost = make(lost_model)
    take(donor, 0)
    take(lost, 0)
    assert donor.replicated_digest() == lost.replicated_digest()
    model = Buffers(rank=7)
    state = make(model)
    hand_over(donor, state, step=0, own=lost.slot_of(0).own)
    assert torch.equal(model.small, lost_model.small)
    assert state.replicated_digest() == donor.replicated_digest()


def test_large_buffers_that_differ_between_ranks_are_noticed() -> None:
    one = make(Buffers())
    model = Buffers()
    model.large[5] = 0
    other = make(model)
    assert one.replicated_digest() != other.replicated_digest()


def test_a_large_buffer_that_only_a_peer_changed_is_not_taken_from_it() -> None:
    donor_model = Buffers()
    donor = make(donor_model)
    lost = make(Buffers())
    take(donor, 0)
    donor_model.large.add_(1)
    take(donor, 1)
    take(lost, 1)
    model = Buffers()
    state = make(model)
    hand_over(donor, state, step=1, own=lost.slot_of(1).own)
    assert torch.equal(model.large, Buffers().large)
    assert state.replicated_digest() == donor.replicated_digest()
    other_model = Buffers()
    other_model.large.zero_()
    other = make(other_model)
    with pytest.raises(Misuse, match=r"b/0/large .*some ranks only"):
        hand_over(donor, other, step=1, own=lost.slot_of(1).own)


def test_batch_normalisation_buffers_belong_to_the_rank() -> None:
    model = nn.BatchNorm1d(3)
    state = make(model)
    names = ["b/0/running_mean", "b/0/running_var", "b/0/num_batches_tracked"]
    assert list(state.own_part()["buffers"]) == names


def test_modes_come_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 2))
    state = make(model)
    model[1].eval()
    model[0].requires_grad_(False)
    take(state, 0)
    expected = state.tensors.modes()
    model.train()
    model[2].eval()
    model[0].requires_grad_(True)
    model[2].bias.requires_grad_(False)
    state.restore(0, decode(state.slot_of(0).own))
    assert state.tensors.modes() == expected
    assert [module.training for module in model] == [True, False, True]
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]
    constructed = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 2))
    other = make(constructed)
    hand_over(state, other, step=0, own=state.slot_of(0).own)
    assert other.tensors.modes() == expected


def test_a_parameter_of_another_type_is_refused() -> None:
    model = nn.Linear(2, 2)
    state = make(model)
    take(state, 0)
    model.double()
    with pytest.raises(Misuse, match="differs from the one that was saved"):
        state.restore(0, decode(state.slot_of(0).own))


def test_a_sample_tells_ranks_with_other_parameters_apart() -> None:
    model = nn.Linear(300, 300)
    state = make(model)
    state.copy(5)
    sample = state.sample(5)
    state.copy(5)
    assert state.sample(5) == sample
    with torch.no_grad():
        model.weight.mul_(1.0001)
    state.copy(5)
    assert state.sample(5) != sample
