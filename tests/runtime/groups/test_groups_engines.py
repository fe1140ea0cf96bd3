"""Whatever has no test of a killed peer is refused at the start, in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deadpool_runtime.groups.engines import freeze_ddp, require_supported
from deadpool_runtime.groups.errors import UnsupportedLayout
from deadpool_runtime.groups.registry import GroupRegistry


def _model() -> nn.Module:
    return nn.Linear(4, 4)


def _hooked() -> nn.Module:
    model = DistributedDataParallel(_model())
    model.register_comm_hook(None, lambda _, bucket: bucket.buffer())
    return model


def _fully_shard() -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(_model(), mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))


def _zero() -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(_model().parameters(), torch.optim.SGD, lr=0.1)


def _tensor_parallel() -> Any:
    from torch.distributed.tensor import distribute_module

    return distribute_module(_model(), dist.device_mesh.init_device_mesh("cpu", (1,)))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "static_graph": (lambda: DistributedDataParallel(_model(), static_graph=True), "static_graph"),
    "comm_hook": (_hooked, "communication hook"),
    "compile": (lambda: torch.compile(DistributedDataParallel(_model())), "compile"),
    "fully_shard": (_fully_shard, "fully_shard"),
    "zero": (_zero, "ZeroRedundancyOptimizer"),
    "dtensor": (_tensor_parallel, "DTensor"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_untested_layout_is_refused(crew: Any, kind: str) -> None:
    make, words = REFUSED[kind]

    def body() -> None:
        _join_alone(crew)
        with pytest.raises(UnsupportedLayout, match=words) as caught:
            require_supported([make()])
        assert len(str(caught.value).splitlines()) == 1

    crew.start(body).result()


def test_plain_modules_and_optimizers_are_accepted() -> None:
    model = _model()
    require_supported([model], [torch.optim.SGD(model.parameters(), lr=0.1)])
    assert freeze_ddp(model) == 0


def test_buckets_cannot_be_fixed_after_training_began(crew: Any) -> None:
    def body() -> None:
        _join_alone(crew)
        model = DistributedDataParallel(_model())
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(UnsupportedLayout, match="before the first step"):
            freeze_ddp(model)

    crew.start(body).result()


def _join_alone(crew: Any) -> None:
    GroupRegistry().install(detached=False)
    dist.init_process_group(
        "gloo", store=crew.client(), rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
