"""What wraps the user's models: which wrappers are supported, and bringing them back to rest.

An exception out of the middle of a step leaves a wrapper with half of a backward pass noted
down. ``Engines.reset`` forgets it, so that the step can be run again from its start. Each wrapper
has a file beside this one; support for another is one more, and a test of a killed peer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deadpool_runtime.groups import ddp, fsdp, pipelines
from deadpool_runtime.groups.errors import UnsupportedLayout
from deadpool_runtime.kinds import is_dtensor, is_zero

#: Classes that are refused wherever they appear, and what to say. They are looked for by name in
#: modules that are loaded anyway, since importing them takes seconds.
_REFUSED_CLASSES = (
    (
        "torch.distributed.fsdp",
        "FullyShardedDataParallel",
        "FullyShardedDataParallel: use fully_shard",
    ),
    (
        "torch._dynamo.eval_frame",
        "OptimizedModule",
        "torch.compile(model): compile its parts in place, part.compile(dynamic=False)",
    ),
)


class Engines:
    """The wrappers around a program's models, in a form that every process of the job shares.

    Make it in every process right after the program's objects, before the first step. It refuses,
    with one sentence, whatever cannot be brought back exactly after an interruption, and fixes
    what DDP would otherwise decide in its first step, which a process that joins later has not
    seen.
    """

    def __init__(
        self, modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer] = ()
    ) -> None:
        self._modules = list(modules)
        self._optimizers = list(optimizers)
        require_supported(self._modules, self._optimizers)
        ddp.require_known(self._modules)
        fsdp.require_known(self._modules)
        #: Held here, as the program need not keep them in a place that is known.
        self._schedules = pipelines.schedules_of(self._modules)
        pipelines.require_supported(self._schedules)
        for wrapper in ddp.wrappers(self._modules):
            ddp.freeze(wrapper)
            ddp.hold_group(wrapper)
        fsdp.settle(self._modules)
        self._switches = fsdp.switches(self._modules)
        #: What was found, for people: "pipeline, DTensor, DistributedDataParallel". Empty if the
        #: models are plain.
        self.layout = ", ".join(self._found())

    def reset(self) -> None:
        """Forget the interrupted step: no gradients, nothing under way.

        Called in every process of the new epoch, survivor or replacement, while no step is
        running.
        """
        for wrapper in ddp.wrappers(self._modules):
            ddp.reset(wrapper)
        fsdp.reset(self._modules)
        for module in self._modules:
            for parameter in module.parameters():
                parameter.grad = None
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        for owner, name, value in self._switches:
            setattr(owner, name, value)
        for schedule in self._schedules:
            pipelines.reset(schedule)

    def _found(self) -> list[str]:
        found = ["pipeline"] if self._schedules else []
        parameters = [p for module in self._modules for p in module.parameters()]
        # DDP over DTensors has the local parts instead, marked by that attribute.
        if any(is_dtensor(p) or hasattr(p, "_st_info") for p in parameters):
            found.append("DTensor")
        found += sorted({fsdp.spoken(wrapper) for wrapper in fsdp.wrappers(self._modules)})
        if any(True for _ in ddp.wrappers(self._modules)):
            found.append("DistributedDataParallel")
        if any(is_zero(optimizer) for optimizer in self._optimizers):
            found.append("ZeroRedundancyOptimizer")
        return found


def require_supported(modules: Iterable[object], optimizers: Iterable[object] = ()) -> None:
    """Refuse, with one sentence, whatever cannot be brought back exactly after an interruption."""
    for given in (*modules, *optimizers):
        parts = given.modules() if isinstance(given, nn.Module) else [given]
        for part in parts:
            _refuse_classes(part)
            _refuse_old_replicate(part)
            if isinstance(part, DistributedDataParallel):
                ddp.require_supported(part)
                _refuse_sharded_inside(part)
            if is_zero(part):
                _refuse_zero_options(part)
        if isinstance(given, nn.Module):
            for wrapper in fsdp.wrappers([given]):
                fsdp.require_supported(wrapper)


def _refuse_classes(part: object) -> None:
    for module_name, class_name, sentence in _REFUSED_CLASSES:
        kind = getattr(sys.modules.get(module_name), class_name, None)
        if kind is not None and isinstance(part, kind):
            raise UnsupportedLayout(f"Recovery in place does not support {sentence}.")


def _refuse_old_replicate(part: object) -> None:
    """The older composable replicate hides a DDP wrapper where no module leads to it."""
    module: Any = sys.modules.get("torch.distributed._composable.replicate")
    contract: Any = sys.modules.get("torch.distributed._composable.contract")
    if module is None or contract is None or not isinstance(part, nn.Module):
        return
    registry = contract._get_registry(part)
    if registry and "replicate" in registry:
        state = module.replicate.state(part)
        if isinstance(state, module._ReplicateState):
            raise UnsupportedLayout(
                "Recovery in place does not support torch.distributed._composable.replicate: use "
                "DistributedDataParallel, or replicate of "
                "torch.distributed._composable.replicate_with_fsdp."
            )


def _refuse_sharded_inside(wrapper: DistributedDataParallel) -> None:
    if any(is_dtensor(parameter) for parameter in wrapper.parameters()):
        raise UnsupportedLayout(
            "DistributedDataParallel was given DTensor parameters that it does not know of: pass "
            "it device_mesh= with the data-parallel dimension of the same mesh."
        )


def _refuse_zero_options(optimizer: Any) -> None:
    for option, is_used in (
        ("overlap_with_ddp", optimizer._overlap_with_ddp),
        ("parameters_as_bucket_view", optimizer.parameters_as_bucket_view),
    ):
        if is_used:
            raise UnsupportedLayout(
                f"Recovery in place does not support ZeroRedundancyOptimizer with {option}=True: "
                f"leave that option out."
            )
