"""How many bytes of state each node keeps and sends, from a model and its layout. Pure.

The state of each rank is cut into the segments that the runtime would find, named by the ranks that
have the same bytes. From there on the runtime's own functions answer: who holds whose replica, and
what the slots take on every node (``deadpool_runtime.replication.placement``), as the launcher
asks them before the first step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from deadpool_launch.errors import UsageError
from deadpool_launch.plan import check_factor
from deadpool_runtime.durable.share import SPLIT_NBYTES
from deadpool_runtime.replication.naming import Ranks, packed
from deadpool_runtime.replication.placement import Holding, Nodes, choose_holders
from deadpool_runtime.replication.room import Need, needs

#: Bytes of an element.
DTYPES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
#: Tensors of a parameter's size that torch's optimizers keep for it.
OPTIMIZERS: Mapping[str, int] = {"adamw": 2, "adam": 2, "sgd": 0, "sgd-momentum": 1, "none": 0}
SHARDINGS = ("ddp", "zero1", "fsdp", "hsdp")
#: What is no tensor: random states, data position, schedulers, counters. Assumed.
OWN_NBYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Model:
    """What a rank has to keep for each parameter."""

    parameters: int
    dtype: str = "fp32"
    optimizer: str = "adamw"
    #: Type of the optimizer's tensors; that of the parameters if None, as torch makes them.
    optimizer_dtype: str | None = None

    @property
    def weight_nbytes(self) -> int:
        """Of a parameter itself."""
        return DTYPES[self.dtype]

    @property
    def optimizer_nbytes(self) -> int:
        """Of what the optimizer keeps for a parameter."""
        return OPTIMIZERS[self.optimizer] * DTYPES[self.optimizer_dtype or self.dtype]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the ranks are. Tensor-parallel ranks are neighbours, then data-parallel ones, then the
    stages of the pipeline.
    """

    nodes: int
    spares: int
    nproc_per_node: int
    sharding: str
    tensor: int = 1
    pipeline: int = 1
    #: With ``hsdp``: over so many ranks a replica is sharded.
    shard: int = 1
    #: So many other nodes keep what one node alone has.
    factor: int = 1
    #: So many steps lie between two that they get.
    interval: int = 1
    #: Spares run an agent from the start, and so can hold replicas.
    warm_spares: bool = True

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.nodes * self.nproc_per_node

    @property
    def data(self) -> int:
        """Data-parallel ranks of each part of the model."""
        return self.world // (self.tensor * self.pipeline)

    def check(self, data: int | None) -> None:
        """Raise a ``UsageError`` if the ranks do not come out even, or not as ``data`` says."""
        parts = self.tensor * self.pipeline
        if self.world % parts:
            raise UsageError(
                f"--tp {self.tensor} x --pp {self.pipeline}: {self.world} ranks ({self.nodes} "
                f"nodes x {self.nproc_per_node}) are not a multiple of {parts}"
            )
        if data is not None and data != self.data:
            raise UsageError(
                f"--dp {data}: must be {self.data}, as {self.world} ranks are shared by --tp "
                f"{self.tensor} x --pp {self.pipeline}"
            )
        if self.sharding == "hsdp" and (self.shard < 2 or self.data % self.shard):
            raise UsageError(
                f"--shard {self.shard}: must be 2 or more and divide the {self.data} data-parallel "
                "ranks"
            )

    def check_factor(self) -> None:
        """Raise a ``UsageError`` if there are fewer other nodes than are to hold replicas."""
        check_factor(self.factor, self.nodes, self.spares, warm_spares=self.warm_spares)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The busiest node. Bytes are those of one step, unless said otherwise."""

    need: Need
    #: What writing a durable checkpoint takes for a while.
    save_nbytes: int
    #: From the GPUs, or from the ranks' memory, to the node's shared memory.
    copied_nbytes: int
    #: Over the network to other nodes, of a step that has replicas.
    sent_nbytes: int
    #: The whole job's state, each byte once.
    state_nbytes: int
    #: Ranks whose state nobody else would have without a replica.
    alone: bool

    @property
    def memory_nbytes(self) -> int:
        """What the node must have for DEADPOOL."""
        return self.need.nbytes + self.save_nbytes


def sizes(model: Model, layout: Layout) -> Sizes:
    """What the node that has most to keep and to send keeps and sends."""
    parts = layout.tensor * layout.pipeline
    count = math.ceil(model.parameters / parts)
    return _sizes(layout, count * model.weight_nbytes, count * model.optimizer_nbytes)


def sizes_of_rank(nbytes: int, layout: Layout) -> Sizes:
    """The same where a rank has so many bytes of state, shared as ``layout.sharding`` says; with
    ``zero1`` that does not say which are shared, so it is not for this.
    """
    times = {"fsdp": layout.data, "hsdp": layout.shard}.get(layout.sharding, 1)
    return _sizes(layout, nbytes * times, 0)


def _sizes(layout: Layout, weights: int, kept: int) -> Sizes:
    """``weights`` and ``kept`` are the bytes of each tensor- and pipeline-parallel part."""
    segments = _segments(layout, weights, kept)
    names = [f"n{index}" for index in range(layout.nodes + layout.spares)]
    active, spares = tuple(names[: layout.nodes]), tuple(names[layout.nodes :])
    node_of = {rank: active[rank // layout.nproc_per_node] for rank in range(layout.world)}
    own = dict.fromkeys(segments, OWN_NBYTES)
    holding = Nodes(active, spares if layout.warm_spares else ())
    holders = choose_holders(segments, node_of, holding, layout.factor)
    need = needs(segments, own, node_of, holders, layout.interval)
    saves = _saves(segments)
    by_node: dict[str, list[int]] = {}
    for rank, node in node_of.items():
        by_node.setdefault(node, []).append(rank)

    def most(of: Mapping[int, int]) -> int:
        return max(sum(of[rank] for rank in ranks) for ranks in by_node.values())

    copied = {rank: sum(each.values()) + OWN_NBYTES for rank, each in segments.items()}
    sent = {rank: _sent(segments[rank], holders[rank]) for rank in segments}
    saving = {node: sum(saves[rank] for rank in ranks) for node, ranks in by_node.items()}
    busiest = max(by_node, key=lambda node: need[node].nbytes + saving[node])
    state = {name: nbytes for each in segments.values() for name, nbytes in each.items()}
    return Sizes(
        need=need[busiest],
        save_nbytes=saving[busiest],
        copied_nbytes=most(copied),
        sent_nbytes=most(sent),
        state_nbytes=sum(state.values()) + layout.world * OWN_NBYTES,
        alone=any(len(name) == 1 for name in state),
    )


def _segments(layout: Layout, weights: int, kept: int) -> dict[int, dict[Ranks, int]]:
    segments: dict[int, dict[Ranks, int]] = {}
    for stage in range(layout.pipeline):
        for slot in range(layout.tensor):
            first = stage * layout.data * layout.tensor + slot
            last = first + layout.data * layout.tensor
            group = tuple(range(first, last, layout.tensor))
            for rank, found in zip(group, _group(layout, group, weights, kept), strict=True):
                segments[rank] = {name: nbytes for name, nbytes in found.items() if nbytes}
    return dict(sorted(segments.items()))


def _group(
    layout: Layout, group: tuple[int, ...], weights: int, kept: int
) -> list[dict[Ranks, int]]:
    """The segments of each rank of a data-parallel group; ``weights`` and ``kept`` are the bytes of
    its part of the model."""
    count = len(group)
    match layout.sharding:
        case "ddp":
            return [{packed(group): weights + kept}] * count
        case "zero1":
            whole, share = packed(group), math.ceil(kept / count)
            if count == 1:
                return [{whole: weights + kept}]
            return [{whole: weights, (rank,): share} for rank in group]
        case "fsdp":
            return [{(rank,): math.ceil((weights + kept) / count)} for rank in group]
        case _:
            same = [packed(group[place :: layout.shard]) for place in range(layout.shard)]
            share = math.ceil((weights + kept) / layout.shard)
            return [{same[place % layout.shard]: share} for place in range(count)]


def _sent(segments: Mapping[Ranks, int], holding: Holding | None) -> int:
    if holding is None:
        return 0
    shares = holding.shares
    copies = len(shares) + (holding.deputy is not None)
    return sum(segments[name] for each in shares for name in each.segments) + copies * OWN_NBYTES


def _saves(segments: Mapping[int, Mapping[Ranks, int]]) -> dict[int, int]:
    """What each rank writes of a durable checkpoint: a segment is split between the first of those
    that have it, as ``deadpool_runtime.durable.share`` does with tensors."""
    having: dict[Ranks, list[int]] = {}
    for rank, each in segments.items():
        for name in each:
            having.setdefault(name, []).append(rank)
    written = dict.fromkeys(segments, OWN_NBYTES)
    for name, ranks in having.items():
        nbytes = segments[ranks[0]][name]
        parts = max(1, min(len(ranks), nbytes // SPLIT_NBYTES))
        for rank in ranks[:parts]:
            written[rank] += math.ceil(nbytes / parts)
    return written
