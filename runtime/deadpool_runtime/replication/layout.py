"""Tensors as entries of segments, and as views of a slot's memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from deadpool_runtime.errors import UnsupportedState
from deadpool_runtime.replication.manifest import ALIGN_TENSOR_NBYTES, Entry, Segment
from deadpool_runtime.replication.slots import SlotFile
from deadpool_runtime.replication.streams import copy_all

Tensors = tuple[tuple[torch.Tensor, ...], ...]


class Placed(Protocol):
    """One tensor to copy, and the ranks that have the same bytes (see ``state.Item``)."""

    @property
    def key(self) -> str: ...
    @property
    def tensor(self) -> torch.Tensor: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def on_cpu(self) -> bool: ...


def layout_segments(items: Iterable[Placed]) -> tuple[tuple[Segment, ...], Tensors]:
    """The segments of these tensors, and for each the tensors of its entries.

    Segments come in the order in which their ranks are first met, entries in that of ``items``, so
    ranks that name the same tensors in the same order agree. Tensors may be without memory (meta),
    to foresee a layout.
    """
    entries: dict[tuple[int, ...], list[Entry]] = {}
    tensors: dict[tuple[int, ...], list[torch.Tensor]] = {}
    ends: dict[tuple[int, ...], int] = {}
    for item in items:
        tensor, offset = item.tensor, ends.get(item.ranks, 0)
        nbytes = tensor.numel() * tensor.element_size()
        entry = Entry(
            key=item.key,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            offset=offset,
            nbytes=nbytes,
            on_cpu=item.on_cpu,
        )
        entries.setdefault(item.ranks, []).append(entry)
        tensors.setdefault(item.ranks, []).append(tensor)
        ends[item.ranks] = offset + -(-nbytes // ALIGN_TENSOR_NBYTES) * ALIGN_TENSOR_NBYTES
    segments = tuple(
        Segment(ranks=ranks, entries=tuple(each), nbytes=ends[ranks])
        for ranks, each in entries.items()
    )
    return segments, tuple(tuple(each) for each in tensors.values())


def dtype_of(entry: Entry) -> torch.dtype:
    """The entry's type; UnsupportedState if this torch does not have it."""
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedState(f"{entry.key} has the type {entry.dtype}, unknown to this torch.")
    return dtype


def views_of(slot: SlotFile, segments: Sequence[Segment], index: int) -> list[torch.Tensor]:
    """A contiguous tensor over the slot's memory for each entry of a segment."""
    segment = segments[index]
    if not segment.nbytes:
        return [torch.empty(entry.shape, dtype=dtype_of(entry)) for entry in segment.entries]
    memory = torch.frombuffer(slot.segment_view(index), dtype=torch.uint8)
    return [
        memory[entry.offset : entry.offset + entry.nbytes].view(dtype_of(entry)).view(entry.shape)
        for entry in segment.entries
    ]


@torch.no_grad()
def read_into(
    slot: SlotFile, segments: Sequence[Segment], tensors: Sequence[Sequence[torch.Tensor]]
) -> None:
    """Copy every segment of the slot into ``tensors``, which are as ``layout_segments`` gave them.

    The slot must have been prepared, sealed or read as a copy with these segments, all of them
    present. Returns when the values are there, on the GPU too.
    """
    usual: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    inference: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    devices = set()
    for index, live in enumerate(tensors):
        for entry, target, source in zip(
            segments[index].entries, live, views_of(slot, segments, index), strict=True
        ):
            if target.shape != source.shape or target.dtype != source.dtype:
                raise UnsupportedState(
                    f"{entry.key} is {target.dtype} {tuple(target.shape)} here and {source.dtype} "
                    f"{tuple(source.shape)} in the copy."
                )
            pairs = inference if target.is_inference() else usual
            for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
                if stride == 0 and size > 1:  # repeats of one element in memory
                    target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
            pairs[0].append(target)
            pairs[1].append(source)
            devices.add(target.device)
    copy_all(*usual, non_blocking=True)
    if inference[0]:
        with torch.inference_mode():
            copy_all(*inference, non_blocking=True)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
