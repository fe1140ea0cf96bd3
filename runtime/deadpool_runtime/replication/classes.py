"""Which ranks have the same bytes of a tensor in common.

Found from the program's own objects: the process group of a DDP wrapper, the mesh and placements
of a DTensor (which fully_shard and replicate make of every parameter), the partition of a
ZeroRedundancyOptimizer. What none of them speaks of belongs to this rank alone; that is never
wrong, only dearer. All ranks of a class find the same class, since each of these objects is the
same on all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deadpool_runtime.errors import UnsupportedState
from deadpool_runtime.groups import members
from deadpool_runtime.kinds import is_dtensor, is_zero, plain_parts
from deadpool_runtime.tensors import TensorMap

#: Global ranks, ascending.
Ranks = tuple[int, ...]


def ranks_in_common(tensors: TensorMap, models: Sequence[nn.Module], rank: int) -> dict[str, Ranks]:
    """For every key of ``tensors.everything()`` the ranks that have the same bytes, ``rank``
    (this process) among them."""
    wrapped = dict(_in_ddp(models))
    alone = (rank,)
    found: dict[str, Ranks] = {}
    for key, tensor in (*tensors.parameters(), *tensors.buffers()):
        ranks = _ranks_of(key, tensor, wrapped, alone)
        for part, _ in plain_parts(key, tensor):
            found[part] = ranks
    for key, _ in tensors.optimizer_state():
        optimizer, parameter = tensors.trained_by(key)
        # A ZeroRedundancyOptimizer has state only on the rank that trains the parameter.
        found[key] = alone if is_zero(optimizer) else _ranks_of(key, parameter, wrapped, alone)
    return found


def same_in_mesh(
    shape: Sequence[int],
    ranks: Sequence[int],
    coordinate: Sequence[int],
    replicated: Sequence[bool],
) -> Ranks:
    """The ranks of a mesh that differ from ``coordinate`` only in replicated dimensions.

    ``ranks``: those of the mesh, the last dimension running fastest.
    """
    places: list[int] = [0]
    for size, own, is_replicated in zip(shape, coordinate, replicated, strict=True):
        steps = range(size) if is_replicated else (own,)
        places = [place * size + step for place in places for step in steps]
    return tuple(sorted(ranks[place] for place in places))


def _in_ddp(models: Sequence[nn.Module]) -> Iterator[tuple[int, Ranks]]:
    """The id of each tensor that a DDP wrapper keeps the same, and the ranks of its group."""
    for model in models:
        for part in model.modules():
            if isinstance(part, DistributedDataParallel):
                group = tuple(sorted(members.ranks_of(part.process_group)))
                # Not those that the module has at present: over DTensors DDP hides its own.
                for parameter in part._module_parameters:
                    yield id(parameter), group
                for name, buffer in part.module.named_buffers():
                    if name not in part.parameters_to_ignore:
                        yield id(buffer), group


def _ranks_of(key: str, tensor: Any, wrapped: dict[int, Ranks], alone: Ranks) -> Ranks:
    if not is_dtensor(tensor):
        return wrapped.get(id(tensor), alone)
    if id(tensor) in wrapped:
        raise UnsupportedState(f"{key} is a DTensor inside a DistributedDataParallel.")
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedState(
            f"{key} is a DTensor of which each rank has a summand (Partial): redistribute it "
            f"before attach."
        )
    mesh: Any = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # the mesh is of other ranks
        return alone
    members: torch.Tensor = mesh.mesh
    return same_in_mesh(
        tuple(members.shape),
        members.flatten().tolist(),
        coordinate,
        [placement.is_replicate() for placement in tensor.placements],
    )
