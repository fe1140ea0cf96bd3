"""What a ZeroRedundancyOptimizer shares out: whose it is when others take part, and from whom."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deadpool_runtime.errors import CorruptState
from deadpool_runtime.replication.loaded import Loaded
from deadpool_runtime.sharing import Shards, SharedState

SIZES = (3, 11, 4, 7, 4, 2, 9)


@contextmanager
def world(size: int, rank: int, backend: str = "fake") -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store = FakeStore() if backend == "fake" else dist.HashStore()
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def zero() -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    parameters = [nn.Parameter(torch.full((size,), float(size))) for size in SIZES]
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.5}]
    return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.1)


def trained(optimizer: Any) -> list[list[int]]:
    """Which parameters each group of the optimizer inside has, by their places among all."""
    place = {id(each): index for index, each in enumerate(optimizer._all_params)}
    return [[place[id(each)] for each in g["params"]] for g in optimizer.optim.param_groups]


def step(optimizer: Any) -> None:
    for parameter in optimizer._all_params:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize(("size", "rank"), [(3, 1), (1, 0), (4, 2), (9, 8)])
def test_settled_optimizer_trains_what_a_new_one_would(
    monkeypatch: pytest.MonkeyPatch, size: int, rank: int
) -> None:
    with world(size, rank):
        expected = trained(zero())
    with world(4, 2):
        optimizer = zero()
        inner = optimizer.optim
        monkeypatch.setattr(dist, "get_world_size", lambda _group=None: size)
        monkeypatch.setattr(dist, "get_rank", lambda _group=None: rank)
        SharedState([optimizer]).settle()
        monkeypatch.undo()
        assert trained(optimizer) == expected
        assert optimizer.optim is inner
        assert (optimizer.world_size, optimizer.rank, optimizer.global_rank) == (size, rank, rank)
        assert len(optimizer._partition_parameters()) == size


def copy_of(tensors: dict[str, torch.Tensor]) -> Loaded:
    return Loaded({"p/0/weight": torch.ones(2)} | tensors, {"o/1/0/0/step"}, b"", [])


def test_shards_of_all_make_the_state_of_one() -> None:
    with world(1, 0, "gloo"):
        plain = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        shared = SharedState([plain, zero()])
        first = {"o/1/0/0/step": torch.tensor(3.0), "o/1/0/0/exp_avg": torch.arange(3.0)}
        second = {"o/1/1/2/exp_avg": torch.arange(2.0)}
        brought = Shards()
        mine = first | {"o/0/0/0/momentum_buffer": torch.ones(2)}
        shared.parts_in(copy_of(mine), {"o/1/0/0/times": 3, "o/0/0/0/times": 1}, 0, brought)
        shared.parts_in(copy_of(second), {"o/1/1/2/times": 4}, 1, brought)
        found = shared.exchange(brought, (0, 1))
        assert found.tensors.keys() == (first | second).keys()
        assert all(torch.equal(found.tensors[key], each) for key, each in (first | second).items())
        assert found.on_cpu == {"o/1/0/0/step"}
        assert found.plain == {"o/1/0/0/times": 3, "o/1/1/2/times": 4}
        assert shared.without(mine) == {"o/0/0/0/momentum_buffer"}


def test_shards_that_are_missing_or_brought_twice_are_refused() -> None:
    with world(1, 0, "gloo"):
        shared = SharedState([zero()])
        for ranks in ([0], [0, 1, 1], [0, 2]):
            with pytest.raises(CorruptState, match="over ranks \\[0, 1\\]"):
                shared.exchange(Shards(ranks), (0, 1))


def test_only_an_optimizer_of_all_ranks_may_get_smaller() -> None:
    with world(4, 2):
        shared = SharedState([zero()])
        assert shared
        assert shared.everywhere(4)
        assert not shared.everywhere(8)
    assert not SharedState([torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)])


def test_size_that_is_foreseen_is_the_same_before_and_after_the_first_step() -> None:
    from deadpool_runtime.replication.forecast import forecast
    from deadpool_runtime.state import TrainingState
    from deadpool_runtime.tensors import TensorMap

    with world(4, 2):
        optimizer = zero()
        model = nn.ParameterList(optimizer._all_params)
        tensors = TensorMap([model], [optimizer], {})

        def ranks_of(key: str) -> tuple[int, ...]:
            return (2,) if key.startswith("o/") else (0, 1, 2, 3)

        state = TrainingState(tensors, [], {}, ranks_of)
        before = forecast(tensors, state.items(), ranks_of, 2, 100)
        step(optimizer)
        after = forecast(tensors, state.items(), ranks_of, 2, 100)
        assert before.unknown == after.unknown == ""
        assert after.sizes == before.sizes
