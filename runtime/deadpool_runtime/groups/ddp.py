"""DistributedDataParallel: its buckets are fixed at the start, and an interrupted step is undone.

Besides classes of torch this works on private parts of them, as no public call does the same.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deadpool_runtime.groups import native
from deadpool_runtime.groups.errors import UnsupportedLayout
from deadpool_runtime.groups.watching import Watch

#: The groups of the wrappers, held until the process ends. Once the program has destroyed a group
#: and dropped the model, DDP's reducer is the last to hold it, and takes its Backend apart under
#: Python's lock, which a thread of the Backend may need to end: a deadlock now and then.
_held_groups: list[dist.ProcessGroup] = []

#: Every living wrapper of this process, from ``watch`` on.
_wrappers = Watch(
    "A DistributedDataParallel was made after attach, where it cannot be reset after "
    "an interruption: make it before attach, and give it to attach."
)


def watch() -> None:
    """Note every wrapper that this process makes from here on."""
    _wrappers.open()
    _wrappers.follow(DistributedDataParallel)


def seal() -> None:
    """Refuse wrappers from here on, since nobody would reset them."""
    _wrappers.seal()


def require_known(modules: Iterable[nn.Module]) -> None:
    """Refuse a program with a wrapper that is not in the modules: nobody would reset it."""
    known = list(wrappers(modules))

    def unknown() -> bool:
        return any(all(each is not one for one in known) for each in list(_wrappers.living))

    if unknown():
        gc.collect()  # one that the program has dropped may be waiting for this
        if unknown():
            raise UnsupportedLayout(
                "A DistributedDataParallel was not given to attach, so it could not be recovered: "
                "give attach a list of all of them, and of their optimizers."
            )


def wrappers(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Every DDP wrapper in the modules."""
    for module in modules:
        for part in module.modules():
            if isinstance(part, DistributedDataParallel):
                yield part


def require_supported(ddp: Any) -> None:
    """Refuse options whose state after an interruption is not known to be exact."""
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
                f"Recovery in place does not support DistributedDataParallel with {option}: "
                f"leave that option out."
            )


def freeze(ddp: Any) -> None:
    """Fix the gradient buckets.

    DDP lays its buckets out anew after the first step, in the order in which gradients arrived,
    and the layout decides the order in which gradients are summed. A process that joins later has
    never seen that step. So the layout is fixed before the first step, from the order of the
    parameters alone, which is the same in every process.
    """
    if ddp._has_rebuilt_buckets:
        raise UnsupportedLayout(
            "DistributedDataParallel has trained already, and its gradient buckets can only "
            "be fixed before the first step."
        )
    # With find_unused_parameters DDP itself never lays its buckets out anew.
    if not ddp.find_unused_parameters:
        native.load().freeze_buckets(ddp.reducer, _bucket_layout(ddp))


def hold_group(ddp: Any) -> None:
    """Keep the wrapper's group, so that its threads are never joined under Python's lock."""
    if all(group is not ddp.process_group for group in _held_groups):
        _held_groups.append(ddp.process_group)


def reset(ddp: Any) -> None:
    """Forget the interrupted step."""
    ddp.reducer._reset_state()
    native.load().forget_size(ddp.reducer)
    if not ddp.find_unused_parameters:
        native.load().keep_buckets(ddp.reducer)  # the reset has just taken the mark away
    # An exception inside no_sync() leaves these two as they were there. They decide which
    # collectives the next forward pass runs, so every process must start from the same.
    ddp.require_backward_grad_sync = True
    ddp.require_forward_param_sync = True


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
        expect_sparse,  # by the parameter's index, unlike the list of tensors
        order,
    )
    return [list(bucket) for bucket in layout]
