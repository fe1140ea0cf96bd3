"""Which ranks have bytes in common: the arithmetic of meshes, and one process's own objects.

That ranks of a class really have the same bytes in every layout is seen where all of them train
(groups/test_groups_layouts.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deadpool_runtime.errors import UnsupportedState
from deadpool_runtime.replication.classes import ranks_in_common, same_in_mesh
from deadpool_runtime.tensors import TensorMap


def test_replicated_dimensions_of_a_mesh() -> None:
    ranks = [0, 1, 2, 3]  # [[0, 1], [2, 3]]
    assert same_in_mesh((2, 2), ranks, (1, 0), (True, False)) == (0, 2)
    assert same_in_mesh((2, 2), ranks, (1, 0), (False, True)) == (2, 3)
    assert same_in_mesh((2, 2), ranks, (1, 0), (True, True)) == (0, 1, 2, 3)
    assert same_in_mesh((2, 2), ranks, (1, 0), (False, False)) == (2,)


def test_ranks_of_a_mesh_in_any_order_come_out_ascending() -> None:
    assert same_in_mesh((3,), [7, 2, 5], (0,), (True,)) == (2, 5, 7)


@given(st.data())
def test_classes_part_a_mesh(data: st.DataObject) -> None:
    """Every rank is in its own class, all members of a class name the same, and the class is as
    large as the replicated dimensions together."""
    shape = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    places = list(itertools.product(*(range(size) for size in shape)))
    ranks = data.draw(st.permutations(range(10, 10 + len(places))))
    replicated = data.draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    classes = {
        rank: same_in_mesh(shape, ranks, place, replicated)
        for rank, place in zip(ranks, places, strict=True)
    }
    expected = 1
    for size, is_replicated in zip(shape, replicated, strict=True):
        expected *= size if is_replicated else 1
    for rank, members in classes.items():
        assert rank in members
        assert len(members) == expected
        assert all(classes[member] == members for member in members)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4))


@pytest.fixture
def alone() -> Iterator[None]:
    """A job of one rank, on whose groups torch believes to be of four."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(
        "fake", store=FakeStore(), rank=2, world_size=4, timeout=timedelta(seconds=60)
    )
    yield
    dist.destroy_process_group()


def classes_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, tuple[int, ...]]:
    tensors = TensorMap([model], [optimizer], {})
    found = ranks_in_common(tensors, [model], 2)
    assert found.keys() == tensors.everything().keys()
    return found


def test_a_model_of_no_wrapper_is_this_ranks_alone() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.one(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert set(classes_of(model, optimizer).values()) == {(2,)}


def test_a_wrapped_part_is_its_groups_and_the_rest_this_ranks_alone(alone: None) -> None:
    model = Model()
    pair = dist.new_group([0, 2])
    inner: Any = nn.Module()
    inner.wrapped = DistributedDataParallel(model, process_group=pair)
    inner.rest = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9)
    for parameter in inner.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    found = classes_of(inner, optimizer)
    assert found["p/0/wrapped.module.one.weight"] == (0, 2)
    assert found["b/0/wrapped.module.mask"] == (0, 2)
    assert found["p/0/rest.weight"] == (2,)
    assert found["o/0/0/0/momentum_buffer"] == (0, 2)
    assert found["o/0/0/5/momentum_buffer"] == (2,)


def test_what_ddp_was_told_to_ignore_is_this_ranks_alone(alone: None) -> None:
    model = Model()
    names = ["one.weight", "mask"]
    ddp: Any = DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(model, names)
    wrapped = ddp(model)
    found = classes_of(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    alone_keys = {key for key, ranks in found.items() if ranks == (2,)}
    assert alone_keys == {"p/0/module.one.weight", "b/0/module.mask"}


def test_summands_are_refused(alone: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (4,))
    model = nn.Module()
    model.part = nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Partial()]))
    with pytest.raises(UnsupportedState, match="Partial"):
        classes_of(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_state_of_zero_is_its_trainers_alone(alone: None) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = DistributedDataParallel(Model())
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=0.1)
    for parameter in wrapped.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    found = classes_of(wrapped, optimizer)
    assert found["p/0/module.one.weight"] == (0, 1, 2, 3)
    mine = {key: ranks for key, ranks in found.items() if key.startswith("o/")}
    # Rank 2 trains one of the four parameters, and Adam has three tensors for it.
    assert len(mine) == 3
    assert set(mine.values()) == {(2,)}
