"""Where tensors are found that are not plain parameters of plain modules.

DTensors, and the optimizer state of wrappers, are met in groups/test_groups_layouts.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal import two_tensor

from deadpool_runtime.errors import UnsupportedState
from deadpool_runtime.kinds import local_part
from deadpool_runtime.tensors import TensorMap

TwoTensor: Any = two_tensor.TwoTensor


def test_inner_tensors_of_a_subclass_are_saved_in_its_place() -> None:
    model: Any = nn.Module()
    inner = (torch.arange(3.0), torch.zeros(3))
    model.weight = nn.Parameter(TwoTensor(*inner))
    found = TensorMap([model], [], {}).everything()
    assert list(found) == ["p/0/weight//a", "p/0/weight//b"]
    found["p/0/weight//b"].copy_(torch.ones(3))
    assert torch.equal(model.weight.b, torch.ones(3))


def test_optimizer_state_of_a_subclass_is_refused() -> None:
    model = nn.Linear(3, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["odd"] = TwoTensor(torch.ones(2), torch.ones(2))
    with pytest.raises(UnsupportedState, match="o/0/0/0/odd is a TwoTensor"):
        TensorMap([model], [optimizer], {}).everything()


def test_a_parameter_that_left_its_module_is_still_the_same_key() -> None:
    """DDP over DTensors takes its parameters out of the module in the first forward pass."""
    model = nn.Linear(3, 3, bias=False)
    weight = model.weight
    tensors = TensorMap([model], [torch.optim.SGD(model.parameters(), lr=0.1)], {})
    del model.weight
    model.weight = weight * 1
    found = tensors.everything()
    assert list(found) == ["p/0/weight"]
    assert found["p/0/weight"] is weight


def test_a_parameter_that_was_exchanged_is_found_where_it_is() -> None:
    model = nn.Linear(3, 3, bias=False)
    tensors = TensorMap([model], [], {})
    model.weight = nn.Parameter(torch.ones(3, 3))
    assert tensors.everything()["p/0/weight"] is model.weight


def test_state_is_made_as_an_optimizer_would_make_it() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(3, 5).t())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tensors = TensorMap([model], [optimizer], {})
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    made = dict(optimizer.state[model.weight])
    tensors.forget_optimizer_state(set())
    for name, value in made.items():
        tensors.make_state(f"o/0/0/0/{name}", value.contiguous(), wrapped=False, on_cpu=False)
    assert tensors.wrapped_state() == []
    for name, value in made.items():
        state = optimizer.state[model.weight][name]
        assert (state.shape, state.dtype, state.stride()) == (
            value.shape,
            value.dtype,
            value.stride(),
        )
    assert local_part(model.weight) is model.weight
