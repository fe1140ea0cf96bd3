"""A training state without ranks or arena, and copies of it in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deadpool_runtime.encoding import decode, encode
from deadpool_runtime.state import TrainingState
from deadpool_runtime.tensors import TensorMap


@dataclass
class Copied:
    """What a slot of the arena would hold."""

    tensors: dict[str, torch.Tensor]
    on_cpu: set[str]
    own: bytes

    def restore(self, state: TrainingState, own: bytes | None = None) -> None:
        """Bring it back in ``state``, with another own part if given."""
        state.restore(self.tensors, decode(self.own if own is None else own), self.on_cpu)


def state_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    schedulers: Sequence[Any] = (),
    **extras: Any,
) -> TrainingState:
    """The state of a rank that has everything in common with rank 1."""
    optimizers = [optimizer or torch.optim.SGD(model.parameters(), lr=0.1)]
    modules = {name: item for name, item in extras.items() if isinstance(item, nn.Module)}
    tensors = TensorMap([model], optimizers, modules)
    return TrainingState(tensors, schedulers, extras, lambda key: (0, 1))


def take(state: TrainingState) -> Copied:
    """A copy of the present state."""
    own = encode(state.plain_part() | state.own_part(), "own")
    items = state.items()
    tensors = {item.key: item.tensor.to("cpu").clone().contiguous() for item in items}
    return Copied(tensors, {item.key for item in items if item.on_cpu}, own)


def live(state: TrainingState) -> dict[str, torch.Tensor]:
    """Every tensor's present value."""
    return {key: tensor.detach().clone() for key, tensor in state.tensors.everything().items()}


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """The same names in the same order, types and values."""
    assert list(left) == list(right)
    for key, value in left.items():
        assert value.dtype == right[key].dtype
        assert torch.equal(value, right[key]), key
