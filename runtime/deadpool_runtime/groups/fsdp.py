"""fully_shard (FSDP2, also in two dimensions) and the composable replicate that is built on it.

What these build lazily in the first forward pass needs no peer, so a process that joins later
builds the same. What an exception leaves half done is undone here.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from deadpool_runtime.groups.errors import UnsupportedLayout

#: Switches of a parameter group that a body, or a pipeline, turns on and off around backward.
_GROUP_SWITCHES = ("reduce_grads", "all_reduce_grads", "reshard_after_backward")


def wrappers(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Every module to which fully_shard or replicate was applied."""
    # By name, since importing FSDP takes long where nobody uses it.
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is not None:
        for module in modules:
            yield from (part for part in module.modules() if isinstance(part, kind))


def require_known(modules: Iterable[nn.Module]) -> None:
    """Refuse a program with a sharded module that is not in the modules: nobody would reset it."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None:
        return
    known = {id(each) for each in wrappers(modules)}

    def unknown() -> list[Any]:
        return [
            each
            for each in gc.get_objects()
            if issubclass(type(each), kind) and id(each) not in known
        ]

    if unknown():
        gc.collect()  # one that the program has dropped may be waiting for this
        for each in unknown():
            raise UnsupportedLayout(
                f"A module with {spoken(each)} ({type(each).__name__}) was not given to attach, so "
                f"it could not be recovered: give attach a list of all models."
            )


def spoken(wrapper: Any) -> str:
    """What the user called."""
    return (
        "replicate"
        if type(wrapper._get_fsdp_state()).__name__ == "_ReplicateState"
        else ("fully_shard")
    )


def require_supported(wrapper: Any) -> None:
    """Refuse options whose state after an interruption is not known to be exact."""
    if not hasattr(wrapper, "reset_iter_state"):
        raise UnsupportedLayout(
            f"Recovery in place of {spoken(wrapper)} needs torch 2.13 or newer, which can undo an "
            f"interrupted step."
        )
    groups = wrapper._get_fsdp_state()._fsdp_param_groups
    if len(groups) > 1:
        raise UnsupportedLayout(
            "Recovery in place does not support a shard_placement_fn that gives parameters of one "
            "module different meshes: apply fully_shard to smaller modules."
        )
    for group in groups:
        used = {
            "an offload_policy": type(group.offload_policy).__name__ != "OffloadPolicy",
            "reshard_after_forward=<number>": _reshards_to_part(group),
            "an all-reduce hook": group._all_reduce_hook is not None,
            "a communication class of your own": any(
                not type(part).__name__.startswith("Default")
                for part in (group._all_gather_comm, group._reduce_scatter_comm)
            ),
        }
        for option, is_used in used.items():
            if is_used:
                raise UnsupportedLayout(
                    f"Recovery in place does not support {spoken(wrapper)} with {option}: leave "
                    f"that option out."
                )


def settle(modules: Iterable[nn.Module]) -> None:
    """Leave every parameter sharded, as it is between steps; an evaluation leaves some whole."""
    for wrapper in wrappers(modules):
        wrapper.reshard()


def switches(modules: Iterable[nn.Module]) -> list[tuple[Any, str, bool]]:
    """Object, name and present value of every switch that decides which collectives run."""
    found = []
    for wrapper in wrappers(modules):
        state = wrapper._get_fsdp_state()
        for group in state._fsdp_param_groups:
            found += [(group, name, getattr(group, name)) for name in _GROUP_SWITCHES]
    return found


def reset(modules: Iterable[nn.Module]) -> None:
    """Forget the interrupted step: parameters sharded, nothing gathered, no gradients."""
    states = [wrapper._get_fsdp_state() for wrapper in wrappers(modules)]
    for state in states:
        for group in state._fsdp_param_groups:
            # Waiting for it, as torch's own reset does, would raise: its peers are gone.
            group._all_gather_result = None
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
    for state in states:
        state._state_ctx.is_last_backward = True
        # None before the first forward pass, when there is nothing to forget.
        if state._is_root:
            state._reset_iter_state()


def _reshards_to_part(group: Any) -> bool:
    after = group.post_forward_mesh_info
    return after is not None and after.mesh != group.mesh_info.mesh
