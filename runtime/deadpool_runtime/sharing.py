"""State that optimizers share out over the ranks, and what becomes of it when others take part.

A ZeroRedundancyOptimizer trains each parameter on one rank, which alone has the optimizer's state
for it. Which rank that is follows from the sizes of the parameters and the number of ranks. When
other ranks take part than before it is found anew (``settle``), and what the copies have of that
state goes to whom it belongs to now (``exchange``). That is done with what was read from the
copies, in host memory, before any of it is restored: no copy changes, and all can be done again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from deadpool_runtime.encoding import decode, encode
from deadpool_runtime.errors import CorruptState
from deadpool_runtime.groups import members
from deadpool_runtime.kinds import is_zero
from deadpool_runtime.replication.loaded import Loaded


@dataclass
class Shards:
    """Parts of the state that is shared out: tensors and plain values by key.

    ``ranks``: whose shards these are. ``on_cpu``: keys of tensors that belong on the CPU whatever
    their parameter's device.
    """

    ranks: list[int] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    on_cpu: set[str] = field(default_factory=set)
    plain: dict[str, Any] = field(default_factory=dict)


class SharedState:
    """The optimizers of a process that share out their state; false if there is none."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._optimizers: dict[int, Any] = {
            index: each for index, each in enumerate(optimizers) if is_zero(each)
        }

    def __bool__(self) -> bool:
        return bool(self._optimizers)

    def everywhere(self, world_size: int) -> bool:
        """Whether each of them shares its state out over all ranks of the job."""
        everyone = list(range(world_size))
        return all(
            sorted(members.ranks_of(each.process_group)) == everyone
            for each in self._optimizers.values()
        )

    def settle(self) -> None:
        """Let each train what falls to this rank among those that take part now. Called when the
        groups are connected; the state of what was trained before is left where it is."""
        for each in self._optimizers.values():
            group = each.process_group
            size, place = dist.get_world_size(group), dist.get_rank(group)
            each.global_rank = dist.get_global_rank(group, place)
            if (each.world_size, each.rank) == (size, place):
                continue
            each.world_size, each.rank = size, place
            each._clear_cache()
            mine = each._partition_parameters()[place]
            for inner, new in zip(each.optim.param_groups, mine, strict=True):
                inner["params"] = new["params"]

    # ------------------------------------------------------------ copies

    def parts_in(self, copy: Loaded, plain: dict[str, Any], rank: int, into: Shards) -> None:
        """Add what a copy has of the shard of ``rank``. ``plain``: what its own part has of the
        optimizers' state that is no tensor."""
        into.ranks.append(rank)
        into.tensors.update((key, copy.tensors[key]) for key in self._shared(copy.tensors))
        into.on_cpu.update(self._shared(copy.on_cpu))
        into.plain.update((key, plain[key]) for key in self._shared(plain))

    def without(self, keys: Collection[str]) -> set[str]:
        """Those of the keys that name nothing that is shared out."""
        return set(keys).difference(self._shared(keys))

    def _shared(self, keys: Iterable[str]) -> Iterator[str]:
        for key in keys:
            if key.startswith("o/") and int(key.split("/", 2)[1]) in self._optimizers:
                yield key

    def _place_of(self, key: str) -> int:
        """The place in the group of the rank that trains the parameter of a key."""
        _, oi, gi, pi, _ = key.split("/", 4)
        optimizer = self._optimizers[int(oi)]
        place: int = optimizer._param_to_rank[optimizer.param_groups[int(gi)]["params"][int(pi)]]
        return place

    # ------------------------------------------------------------ between the ranks

    def exchange(self, brought: Shards, former: Collection[int]) -> Shards:
        """What falls to this rank of all that the ranks bring. Called by all that take part.

        ``former``: the ranks over which it was shared out before. Raises ``CorruptState`` unless
        there is one shard of each.
        """
        group = next(iter(self._optimizers.values())).process_group
        own = dist.get_rank(group)
        heads = [decode(each) for each in _gathered(_head(brought), group)]
        ranks = sorted(rank for head in heads for rank in head["ranks"])
        if ranks != sorted(former):
            raise CorruptState(
                f"The optimizer's state was shared out over ranks {sorted(former)}, and shards of "
                f"{ranks} are there."
            )
        found, under_way, tag = Shards([]), [], 0
        for source, head in enumerate(heads):
            found.plain.update(
                (key, value) for key, value in head["plain"].items() if self._place_of(key) == own
            )
            for key, dtype, shape, on_cpu in head["tensors"]:
                tag += 1
                to = self._place_of(key)
                if to == own:
                    tensor = (
                        brought.tensors[key] if source == own else torch.empty(shape, dtype=dtype)
                    )
                    found.tensors[key] = tensor
                    found.on_cpu.update({key} if on_cpu else ())
                    if source != own and tensor.numel():
                        flat = tensor.view(-1).view(torch.uint8)
                        under_way.append(dist.irecv(flat, group=group, tag=tag, group_src=source))
                elif source == own and brought.tensors[key].numel():
                    flat = brought.tensors[key].view(-1).view(torch.uint8)
                    under_way.append(dist.isend(flat, group=group, tag=tag, group_dst=to))
        for work in under_way:
            if work is not None:
                work.wait()
        return found


def _head(brought: Shards) -> bytes:
    """What a rank brings, without the tensors' values."""
    tensors = [
        (key, each.dtype, list(each.shape), key in brought.on_cpu)
        for key, each in brought.tensors.items()
    ]
    head = {"ranks": brought.ranks, "tensors": tensors, "plain": brought.plain}
    return encode(head, "the optimizer's state")


def _gathered(data: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """What each rank of the group gave."""
    size = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(data)]), group=group)
    most = max(int(each) for each in lengths)
    padded = torch.frombuffer(bytearray(data.ljust(most, b"\0")), dtype=torch.uint8)
    found = [torch.empty(most, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(found, padded, group=group)
    return [
        each.numpy().tobytes()[: int(length)] for each, length in zip(found, lengths, strict=True)
    ]
