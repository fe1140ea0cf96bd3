"""One pass over a segment: its tensors' bytes into the slot, the hash of each chunk on the way.

``SegmentPlan`` is what stays the same from step to step, ``run`` does one pass. Tensors whose bytes
lie in CPU memory as the slot wants them are copied and hashed together; others (strided, lazily
conjugated) are first copied by torch; those of a device are queued on its stream ahead of the pass.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from deadpool_runtime.errors import UnsupportedState
from deadpool_runtime.replication.fused import Fused
from deadpool_runtime.replication.hashers import Hashers
from deadpool_runtime.replication.layout import views_of
from deadpool_runtime.replication.manifest import CHUNK_NBYTES, Segment, chunks_of
from deadpool_runtime.replication.slots import SlotFile
from deadpool_runtime.replication.streams import CopyStream, copy_all

#: Chunks copied at a time: after so many others are told, and a cancelled copy ends.
GROUP = 4

#: Bytes that torch copies before they are hashed, where there is no library.
_BLOCK_NBYTES = 1 << 20


class SegmentPlan:
    """A segment's entries in the form in which a pass needs them."""

    def __init__(self, segments: Sequence[Segment], index: int) -> None:
        self.segments = segments
        self.index = index
        self.segment = segments[index]
        entries = self.segment.entries
        self.offsets = np.array([entry.offset for entry in entries], np.uint64)
        self.sizes = np.array([entry.nbytes for entry in entries], np.uint64)
        self._ends = [entry.offset + entry.nbytes for entry in entries]
        self._starts = [entry.offset for entry in entries]

    def first_entry(self, at: int) -> int:
        """The first entry that ends behind ``at``."""
        return bisect.bisect_right(self._ends, at)

    def entries_in(self, start: int, end: int) -> range:
        """The entries of which something lies in this part of the segment."""
        return range(self.first_entry(start), bisect.bisect_left(self._starts, end))

    def groups(self) -> Iterator[tuple[int, int]]:
        """First chunk and the one after the last of each group."""
        chunks = chunks_of(self.segment.nbytes)
        for first in range(0, chunks, GROUP):
            yield first, min(first + GROUP, chunks)


class Sources:
    """The live tensors of a segment, held by aliases that keep their memory alive."""

    def __init__(self, plan: SegmentPlan, tensors: Sequence[torch.Tensor], queue_all: bool) -> None:
        """``queue_all``: let the stream copy those in CPU memory too."""
        if len(tensors) != len(plan.segment.entries):
            raise UnsupportedState("The number of tensors is not that of the segment's entries.")
        self.aliases = list(tensors)
        self._bytes: dict[int, torch.Tensor] = {}
        self._storages = [tensor.untyped_storage() for tensor in tensors]
        self._needed = [_extent(tensor) for tensor in tensors]
        self.addresses = np.zeros(len(tensors), np.uint64)
        #: Entries that torch copies, from CPU memory or from a device.
        self.indirect: set[int] = set()
        self.on_device: set[int] = set()
        for position, (entry, tensor) in enumerate(zip(plan.segment.entries, tensors, strict=True)):
            if tensor.numel() * tensor.element_size() != entry.nbytes:
                raise UnsupportedState(f"{entry.key} has changed its size since the layout.")
            if not entry.nbytes:
                continue
            if queue_all or tensor.device.type != "cpu":
                self.on_device.add(position)
            elif is_plain(tensor):
                self.addresses[position] = tensor.data_ptr()
            else:
                self.indirect.add(position)

    def bytes_of(self, position: int) -> torch.Tensor:
        """The bytes of a tensor that has an address."""
        if position not in self._bytes:
            self._bytes[position] = self.aliases[position].view(-1).view(torch.uint8)
        return self._bytes[position]

    def require_memory(self, plan: SegmentPlan) -> None:
        """Raise UnsupportedState if a tensor's memory was taken away (``resize_`` of a storage)."""
        if all(map(operator.ge, [storage.nbytes() for storage in self._storages], self._needed)):
            return
        for entry, storage, needed in zip(
            plan.segment.entries, self._storages, self._needed, strict=True
        ):
            if storage.nbytes() < needed:
                raise UnsupportedState(f"{entry.key} has no memory at the end of the step.")


def _extent(tensor: torch.Tensor) -> int:
    """How many bytes of its storage the tensor reaches into."""
    if not tensor.numel():
        return 0
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (int(tensor.storage_offset()) + last + 1) * tensor.element_size()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is its value, in logical order without gaps."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class Pass:
    """One copy of a segment into a slot."""

    def __init__(self, plan: SegmentPlan, sources: Sources, slot: SlotFile) -> None:
        self._plan, self._sources, self._slot = plan, sources, slot
        self._memory = slot.segment_view(plan.index)
        self._views: list[torch.Tensor] = []
        if sources.indirect or sources.on_device:
            self._views = views_of(slot, plan.segments, plan.index)
        #: Entries that torch still has to copy before they are hashed, in order.
        self._waiting = sorted(sources.indirect)
        #: Whether all that comes from CPU memory is in the slot already.
        self._in_place = False
        #: For each group the token after which its bytes from the device are in place.
        self._tokens: dict[int, Any] = {}

    def queue(self, stream: CopyStream) -> None:
        """Hand all that comes from a device to its stream, in groups of chunks."""
        if not self._sources.on_device:
            return
        queued: set[int] = set()
        for first, last in self._plan.groups():
            start, end = first * CHUNK_NBYTES, last * CHUNK_NBYTES
            targets, sources = [], []
            for position in self._plan.entries_in(start, end):
                if position not in self._sources.on_device:
                    continue
                target, source = self._views[position], self._sources.aliases[position]
                if is_plain(source):
                    at = self._plan.segment.entries[position].offset
                    low, high = max(start - at, 0), end - at
                    size = source.element_size()
                    target = target.view(-1)[low // size : high // size]
                    source = source.view(-1)[low // size : high // size]
                elif position in queued:
                    continue
                queued.add(position)
                targets.append(target)
                sources.append(source)
            if targets:
                stream.copy(targets, sources)
            self._tokens[first] = stream.token()

    def copy_cpu(self) -> None:
        """Copy everything that lies in CPU memory now; only the hashes are left to ``run``."""
        positions = [*np.flatnonzero(self._sources.addresses).tolist(), *self._waiting]
        self._in_place = True
        if not positions:
            return
        if not self._views:
            self._views = views_of(self._slot, self._plan.segments, self._plan.index)
        self._copy_whole(positions)
        self._waiting = []

    def run(
        self,
        fused: Fused | None,
        stream: CopyStream,
        tell: Callable[[int, list[bytes]], bool],
        hashers: Hashers,
    ) -> list[bytes] | None:
        """Fill and hash all chunks; ``tell`` gets the first chunk and the hashes of each group, in
        order, and answers whether to go on. All hashes, or None if it was told not to; nothing
        writes the slot any more in either case.
        """

        def fill(first: int, last: int) -> list[bytes]:
            if fused is not None:
                return self._fused(fused, first, last)
            return [self._chunk(chunk) for chunk in range(first, last)]

        hashes: list[bytes] = []
        groups = self._plan.groups()
        with hashers.ordered(fill, self._in_place_groups(groups, stream)) as filled:
            for first, group in filled:
                hashes += group
                if not tell(first, group):
                    return None
        return hashes

    def _in_place_groups(
        self, groups: Iterable[tuple[int, int]], stream: CopyStream
    ) -> Iterator[tuple[int, int]]:
        """Each group, once what others copy of it is in place."""
        for first, last in groups:
            if first in self._tokens:
                stream.wait(self._tokens[first])
            while self._waiting and (
                self._plan.segment.entries[self._waiting[0]].offset < last * CHUNK_NBYTES
            ):
                self._copy_whole([self._waiting.pop(0)])
            yield first, last

    def _copy_whole(self, positions: Sequence[int]) -> None:
        with torch.no_grad():
            copy_all(
                [self._views[position] for position in positions],
                [self._sources.aliases[position] for position in positions],
            )

    def _fused(self, fused: Fused, first: int, last: int) -> list[bytes]:
        plan = self._plan
        addresses = self._sources.addresses
        if self._in_place:
            addresses = np.zeros_like(addresses)
        base = self._slot.address + self._slot.place_of(plan.index)
        return fused.copy_chunks(
            *(base, plan.segment.nbytes, first, last),
            *(addresses, plan.offsets, plan.sizes, plan.first_entry(first * CHUNK_NBYTES)),
        )

    def _chunk(self, chunk: int) -> bytes:
        """The same for one chunk without the library."""
        hasher = xxhash.xxh3_128()
        begin = chunk * CHUNK_NBYTES
        end = min(begin + CHUNK_NBYTES, self._plan.segment.nbytes)
        for start in range(begin, end, _BLOCK_NBYTES):
            self._block(start, min(start + _BLOCK_NBYTES, end))
            hasher.update(self._memory[start : min(start + _BLOCK_NBYTES, end)])
        return hasher.digest()

    def _block(self, start: int, end: int) -> None:
        bytes_there = torch.frombuffer(self._memory, dtype=torch.uint8)
        targets, sources, at = [], [], start
        for position in self._plan.entries_in(start, end):
            entry = self._plan.segment.entries[position]
            low, high = max(start, entry.offset), min(end, entry.offset + entry.nbytes)
            self._memory[at:low] = bytes(low - at)
            at = high
            if self._sources.addresses[position] and not self._in_place:
                source = self._sources.bytes_of(position)
                sources.append(source[low - entry.offset : high - entry.offset])
                targets.append(bytes_there[low:high])
        self._memory[at:end] = bytes(end - at)
        with torch.no_grad():
            copy_all(targets, sources)
