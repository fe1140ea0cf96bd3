"""Which ranks keep one whole model together: what a job that has no spare left can do without.

Found from the same objects as the classes of tensors, see ``classes``. Under DDP each rank has the
whole model; of a mesh with a replicated and a sharded dimension, those that differ in the sharded
one only. All ranks of a replica name the same ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from deadpool_runtime.kinds import is_dtensor, plain_parts
from deadpool_runtime.replication.classes import Ranks, same_in_mesh
from deadpool_runtime.tensors import TensorMap

#: What ``Engines.layout`` says of the layouts that may get smaller.
_SHRINKING = (
    "DistributedDataParallel",
    "DistributedDataParallel, ZeroRedundancyOptimizer",
    "DTensor, fully_shard",
    "DTensor, replicate",
)


def replica_of(
    tensors: TensorMap, layout: str, ranks_of: Callable[[str], Ranks], rank: int
) -> tuple[Ranks, str]:
    """The ranks that have one whole model together with ``rank``, and why the job needs all of
    them; that is empty if it can do without while another replica is whole.

    ``ranks_of``: the ranks that have what a key names in common.
    """
    parameters = list(tensors.parameters())
    replica = _together([tensor for _, tensor in parameters], rank)
    if layout not in _SHRINKING:
        return replica, f"of the parallel layouts, {layout or 'one process'} cannot"
    for key, tensor in parameters:
        if key.startswith("x"):
            continue  # of an extra each rank has its own; who comes back takes a peer's
        part, _ = next(plain_parts(key, tensor))
        if len(ranks_of(part)) < 2:
            return replica, f"no other rank has what rank {rank} has of the model"
    return replica, ""


def _together(parameters: Sequence[Any], rank: int) -> Ranks:
    """The ranks that each have another part of the same parameters."""
    found = {rank}
    for tensor in parameters:
        if is_dtensor(tensor):
            mesh, placements = tensor.device_mesh, tensor.placements
            coordinate = mesh.get_coordinate()
            if coordinate is not None:
                sharded = [not placement.is_replicate() for placement in placements]
                members = mesh.mesh.flatten().tolist()
                found.update(same_in_mesh(tuple(mesh.mesh.shape), members, coordinate, sharded))
    return tuple(sorted(found))
