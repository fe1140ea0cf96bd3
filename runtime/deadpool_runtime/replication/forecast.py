"""How large a copy of the state will be, known before the first step, and when other ranks take
part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from deadpool_runtime.durable.share import share_nbytes
from deadpool_runtime.kinds import is_zero, local_part, plain_parts
from deadpool_runtime.protocol import SegmentSize
from deadpool_runtime.replication.layout import layout_segments
from deadpool_runtime.replication.naming import packed
from deadpool_runtime.replication.need import predict_state
from deadpool_runtime.replication.slots import room_for
from deadpool_runtime.state import Item
from deadpool_runtime.tensors import TensorMap


@dataclass(frozen=True)
class Forecast:
    """The size of each segment once the optimizers have made their state.

    ``save_nbytes``: memory that writing this rank's part of a durable checkpoint takes.
    ``room_nbytes``: size of a slot that a copy will fit into. ``unknown``: unless empty, for which
    optimizer nothing could be foreseen, so that its state is left out, or what is not certain.
    """

    sizes: list[SegmentSize]
    save_nbytes: int
    room_nbytes: int
    unknown: str


def forecast(
    tensors: TensorMap,
    items: Sequence[Item],
    ranks_of: Callable[[str], tuple[int, ...]],
    rank: int,
    own_nbytes: int,
) -> Forecast:
    """How large a copy of the state will be. ``items``: what there is now; ``own_nbytes``: size of
    the own part."""
    keys = {}
    for key, tensor in tensors.parameters():
        first, _ = next(iter(plain_parts(key, tensor)))
        keys[id(tensor)] = first
    present = {item.key for item in items}
    whole, reasons = list(items), []
    for oi, optimizer in enumerate(tensors.optimizers):
        alone = is_zero(optimizer)
        inner: torch.optim.Optimizer = optimizer.optim if alone else optimizer  # type: ignore[attr-defined]
        prediction = predict_state(inner, local_part)
        if prediction.reason:
            reasons.append(prediction.reason)
        if prediction.states is None:
            continue
        if alone:  # what there is of it is foreseen once more
            whole = [item for item in whole if not item.key.startswith(f"o/{oi}/")]
        for (gi, pi), states in prediction.states.items():
            parameter = inner.param_groups[gi]["params"][pi]
            ranks = (rank,) if alone else ranks_of(keys[id(parameter)])
            for state in states:
                key = f"o/{oi}/{gi}/{pi}/{state.name}"
                if not alone and key in present:
                    continue
                room = torch.empty(state.shape, dtype=state.dtype, device="meta")
                whole.append(Item(key, room, ranks, state.on_cpu))
    segments, _ = layout_segments(whole)
    sizes = [SegmentSize(packed(each.ranks), each.nbytes) for each in segments]
    return Forecast(
        sizes,
        share_nbytes(segments, rank, own_nbytes),
        room_for(segments, tuple(range(len(segments))), own_nbytes),
        " ".join(reasons),
    )
