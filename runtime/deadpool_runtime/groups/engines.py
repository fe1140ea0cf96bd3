"""What wraps the user's model: which wrappers are supported, and bringing them back to rest.

An exception out of the middle of a step leaves a wrapper with half of a backward pass noted
down. ``reset_engines`` forgets it, so that the step can be run again from its start. Support for
another wrapper is one entry in ``_ENGINES`` and a test of a killed peer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deadpool_runtime.groups import native
from deadpool_runtime.groups.errors import UnsupportedLayout

#: Classes that are refused wherever they appear, and what to call them. They are looked for by
#: name in modules that are loaded anyway, since importing them takes seconds.
_REFUSED_CLASSES = (
    ("torch.distributed.fsdp", "FSDPModule", "fully_shard"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "FullyShardedDataParallel"),
    ("torch.distributed.optim", "ZeroRedundancyOptimizer", "ZeroRedundancyOptimizer"),
    ("torch.distributed.pipelining.stage", "_PipelineStageBase", "a pipeline stage"),
    ("torch.distributed.pipelining.schedules", "_PipelineSchedule", "a pipeline schedule"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "torch.compile"),
)


def require_supported(modules: Iterable[object], optimizers: Iterable[object] = ()) -> None:
    """Refuse, with one sentence, whatever cannot be brought back exactly after an interruption.

    Called when the program hands its objects over, before the first step.
    """
    for given in (*modules, *optimizers):
        parts = given.modules() if isinstance(given, nn.Module) else [given]
        for part in parts:
            _refuse_classes(part)
            if isinstance(part, DistributedDataParallel):
                _refuse_ddp_options(part)
        if isinstance(given, nn.Module):
            _refuse_dtensors(given)


def freeze_ddp(module: nn.Module) -> int:
    """Fix the gradient buckets of every DDP wrapper in the module; returns how many there are.

    DDP lays its buckets out anew after the first step, in the order in which gradients arrived,
    and the layout decides the order in which gradients are summed. A process that joins later has
    never seen that step. So the layout is fixed before the first step, from the order of the
    parameters alone, which is the same in every process. Call it in every process of the job,
    right after construction.
    """
    require_supported([module])
    count = 0
    for ddp in _ddp_wrappers([module]):
        if ddp._has_rebuilt_buckets:
            raise UnsupportedLayout(
                "DistributedDataParallel has trained already, and its gradient buckets can only "
                "be fixed before the first step."
            )
        # With find_unused_parameters DDP itself never lays its buckets out anew.
        if not ddp.find_unused_parameters:
            native.load().freeze_buckets(ddp.reducer, _bucket_layout(ddp))
        count += 1
    return count


def reset_engines(
    modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer] = ()
) -> None:
    """Forget the interrupted step: no gradients, nothing under way.

    Called in every process of the new epoch, survivor or replacement, while no step is running.
    """
    modules = list(modules)
    for module in modules:
        for part in module.modules():
            for kind, reset in _ENGINES.items():
                if isinstance(part, kind):
                    reset(part)
        for parameter in module.parameters():
            parameter.grad = None
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)


def _reset_ddp(ddp: Any) -> None:
    ddp.reducer._reset_state()
    if not ddp.find_unused_parameters:
        native.load().keep_buckets(ddp.reducer)  # the reset has just taken the mark away
    # An exception inside no_sync() leaves these two as they were there. They decide which
    # collectives the next forward pass runs, so every process must start from the same.
    ddp.require_backward_grad_sync = True
    ddp.require_forward_param_sync = True


#: How to reset each supported wrapper.
_ENGINES: dict[type, Callable[[Any], None]] = {DistributedDataParallel: _reset_ddp}


def _ddp_wrappers(modules: Iterable[nn.Module]) -> Iterator[Any]:
    for module in modules:
        for part in module.modules():
            if isinstance(part, DistributedDataParallel):
                yield part


def _bucket_layout(ddp: Any) -> list[list[int]]:
    """Buckets as DDP would make them if gradients arrived in reverse order of the parameters.

    DDP's own first layout is a single bucket, which would put all communication after all
    computation.
    """
    parameters, expect_sparse = ddp._build_params_for_reducer()
    # Asked this way it answers with the sizes that DDP uses when it lays out anew.
    limits, _ = ddp._bucket_config.compute_bucket_size_limits(
        static_graph=False, find_unused_parameters=True
    )
    order = list(reversed(range(len(parameters))))
    layout, _ = dist._compute_bucket_assignment_by_size(
        [parameters[index] for index in order],
        limits,
        [expect_sparse[index] for index in order],
        order,
    )
    return [list(bucket) for bucket in layout]


def _refuse_classes(part: object) -> None:
    for module_name, class_name, spoken in _REFUSED_CLASSES:
        kind = getattr(sys.modules.get(module_name), class_name, None)
        if kind is not None and isinstance(part, kind):
            raise UnsupportedLayout(f"Recovery in place does not support {spoken} so far.")


def _refuse_ddp_options(ddp: Any) -> None:
    used = {
        "static_graph=True": ddp.static_graph,
        "mixed_precision": ddp.mixed_precision is not None,
        "a communication hook": bool(ddp._comm_hooks),
        "delay_all_reduce_named_params": bool(ddp._delay_all_reduce_params),
        "an optimizer in the backward pass": any(
            hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.parameters()
        ),
        "dynamo's Python reducer": ddp._use_python_reducer,
    }
    for option, is_used in used.items():
        if is_used:
            raise UnsupportedLayout(
                f"Recovery in place does not support DistributedDataParallel with {option} so far."
            )


def _refuse_dtensors(module: nn.Module) -> None:
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is not None and any(isinstance(tensor, kind) for tensor in module.parameters()):
        raise UnsupportedLayout("Recovery in place does not support DTensor parameters so far.")
