"""Whatever has no test of a killed peer is refused at the start, in one sentence."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deadpool_runtime.groups.engines import Engines, require_supported
from deadpool_runtime.groups.errors import UnsupportedLayout
from deadpool_runtime.groups.registry import GroupRegistry


def _model() -> nn.Module:
    return nn.Linear(4, 4)


def _hooked() -> nn.Module:
    model = DistributedDataParallel(_model())
    model.register_comm_hook(None, lambda _, bucket: bucket.buffer())
    return model


def _mesh() -> Any:
    return dist.device_mesh.init_device_mesh("cpu", (1,))


def _fully_shard(**options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(_model(), mesh=_mesh(), **options)


def _offloaded() -> Any:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return _fully_shard(offload_policy=CPUOffloadPolicy(pin_memory=False))


def _hooked_fully_shard() -> Any:
    model = _fully_shard()
    model.set_all_reduce_hook(lambda gradient: None)
    return model


def _first_fsdp() -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(_model(), device_id=torch.device("cpu"))


def _old_replicate() -> Any:
    from torch.distributed._composable.replicate import replicate

    return replicate(_model())


def _dtensor_in_ddp() -> Any:
    from torch.distributed.tensor import distribute_module

    wrapped = DistributedDataParallel(_model())
    distribute_module(wrapped.module, _mesh())
    return wrapped


def _zero(**options: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(_model().parameters(), torch.optim.SGD, lr=0.1, **options)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "static_graph": (lambda: DistributedDataParallel(_model(), static_graph=True), "static_graph"),
    "comm_hook": (_hooked, "communication hook"),
    "compile": (lambda: torch.compile(DistributedDataParallel(_model())), "compile"),
    "fsdp1": (_first_fsdp, "use fully_shard"),
    "offload": (_offloaded, "offload_policy"),
    "all_reduce_hook": (_hooked_fully_shard, "all-reduce hook"),
    "old_replicate": (_old_replicate, "replicate_with_fsdp"),
    "dtensor_in_ddp": (_dtensor_in_ddp, "device_mesh="),
    "zero_overlap": (lambda: _zero(overlap_with_ddp=True), "overlap_with_ddp"),
    "zero_view": (lambda: _zero(parameters_as_bucket_view=True), "parameters_as_bucket_view"),
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
    assert Engines([model], [torch.optim.SGD(model.parameters(), lr=0.1)]).layout == ""


def test_buckets_cannot_be_fixed_after_training_began(crew: Any) -> None:
    def body() -> None:
        _join_alone(crew)
        model = DistributedDataParallel(_model())
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(UnsupportedLayout, match="before the first step"):
            Engines([model])

    crew.start(body).result()


def test_every_wrapper_must_be_given_to_attach(crew: Any) -> None:
    def body() -> None:
        registry = _join_alone(crew)
        known, dropped = DistributedDataParallel(_model()), DistributedDataParallel(_model())
        dropped.itself = dropped
        del dropped
        unknown = [DistributedDataParallel(_model())]
        with pytest.raises(UnsupportedLayout, match="DistributedDataParallel was not given"):
            Engines([known])
        Engines([known, *unknown])
        unknown.clear()
        Engines([nn.ModuleList([known])])
        registry.seal()
        with pytest.raises(UnsupportedLayout, match="made after attach"):
            DistributedDataParallel(_model())

    crew.start(body).result()


def test_every_sharded_module_must_be_given_to_attach(crew: Any) -> None:
    def body() -> None:
        _join_alone(crew)
        known, unknown = _fully_shard(), _fully_shard()
        with pytest.raises(UnsupportedLayout, match=r"fully_shard .* was not given to attach"):
            Engines([known])
        del unknown
        Engines([known])

    crew.start(body).result()


def test_sparse_and_dense_gradients_have_buckets_of_their_own(crew: Any) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2)
            self.table = nn.Embedding(5, 2, sparse=True)
            self.last = nn.Linear(2, 1, bias=False)

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(self.table(index)))  # type: ignore[no-any-return]

    def body() -> None:
        _join_alone(crew)
        model = DistributedDataParallel(Mixed())
        engines = Engines([model])
        for _ in range(2):
            model(torch.tensor([1, 3])).sum().backward()
            assert model.module.table.weight.grad.is_sparse
            engines.reset()

    crew.start(body).result()


def _stage(model: nn.Module, **options: Any) -> Any:
    from torch.distributed.pipelining import PipelineStage

    return PipelineStage(model, 0, 1, torch.device("cpu"), **options)


def _with_shapes(model: nn.Module) -> Any:
    shape = torch.zeros(1, 4)
    return _stage(model, input_args=shape, output_args=shape.clone().requires_grad_())


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).sum()


def _schedule(stage: Any, kind: str = "ScheduleGPipe") -> Any:
    from torch.distributed import pipelining

    given = stage if kind == "ScheduleGPipe" else [stage]
    return getattr(pipelining, kind)(given, 2, loss_fn=_loss)


PIPELINES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "shapes": (lambda model: _schedule(_stage(model)), "input_args and output_args"),
    "schedule": (
        lambda model: _schedule(_with_shapes(model), "ScheduleInterleaved1F1B"),
        "ScheduleInterleaved1F1B: use one of",
    ),
    "stranger": (lambda model: _schedule(_with_shapes(_model())), "not given to attach"),
    "shared": (
        lambda model: [_schedule(stage) for stage in [_with_shapes(model)] * 2],
        "share one stage",
    ),
}


@pytest.mark.parametrize("kind", PIPELINES)
def test_untested_pipeline_is_refused(crew: Any, kind: str) -> None:
    make, words = PIPELINES[kind]

    def body() -> None:
        _join_alone(crew)
        model = _model()
        kept = make(model)
        with pytest.raises(UnsupportedLayout, match=words) as caught:
            Engines([model])
        assert len(str(caught.value).splitlines()) == 1
        del kept

    crew.start(body).result()


def test_pipeline_is_found_and_reset_and_no_other_may_follow(crew: Any) -> None:
    def body() -> None:
        registry = _join_alone(crew)
        model = _model()
        _schedule(_with_shapes(_model()))  # dropped at once
        schedule = _schedule(_with_shapes(model))
        engines = Engines([model])
        assert engines.layout == "pipeline"
        engines.reset()
        assert schedule._stage_forward_initialized
        losses: list[torch.Tensor] = []
        schedule.step(torch.ones(2, 4), target=torch.ones(2, 4), losses=losses)
        assert len(losses) == 2
        registry.seal()
        with pytest.raises(UnsupportedLayout, match="before attach"):
            _schedule(_with_shapes(model))

    crew.start(body).result()


def test_schedules_are_watched_whenever_pipelining_is_imported() -> None:
    """In a new Python, where the module is not there yet when the registry is installed."""
    code = """
import sys
from deadpool_runtime.groups import pipelines, watching
pipelines.watch()
assert "torch.distributed.pipelining" not in sys.modules
from torch.distributed.pipelining import schedules
assert hasattr(schedules._PipelineSchedule.__init__, watching.MARK)
before = list(sys.meta_path)
pipelines.watch()
assert sys.meta_path == before
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_layout_is_named(crew: Any) -> None:
    def body() -> None:
        _join_alone(crew)
        assert Engines([_model()]).layout == ""
        assert Engines([_fully_shard()]).layout == "DTensor, fully_shard"
        wrapped = DistributedDataParallel(_model())
        assert Engines([wrapped], [_zero()]).layout == (
            "DistributedDataParallel, ZeroRedundancyOptimizer"
        )

    crew.start(body).result()


def test_group_outlives_its_model(crew: Any) -> None:
    """Otherwise DDP's reducer frees it under Python's lock, for which Gloo's thread may wait."""

    def body() -> None:
        _join_alone(crew)
        model = DistributedDataParallel(_model())
        group = weakref.ref(model.process_group)
        engines = Engines([model])
        dist.destroy_process_group()
        del engines, model
        gc.collect()
        assert group() is not None

    crew.start(body).result()


def test_switches_of_fully_shard_are_as_they_were_at_the_start(crew: Any) -> None:
    def body() -> None:
        _join_alone(crew)
        model = _fully_shard()
        model.set_reshard_after_backward(False)
        engines = Engines([model])
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(True)
        model.set_is_last_backward(False)
        engines.reset()
        state = model._get_fsdp_state()
        (group,) = state._fsdp_param_groups
        assert group.reduce_grads
        assert group.all_reduce_grads
        assert not group.reshard_after_backward
        assert state._state_ctx.is_last_backward

    crew.start(body).result()


def _join_alone(crew: Any) -> GroupRegistry:
    registry = GroupRegistry()
    registry.install(detached=False)
    dist.init_process_group(
        "gloo", store=crew.client(), rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    return registry
