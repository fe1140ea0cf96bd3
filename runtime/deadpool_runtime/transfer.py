"""Sending the replicated part of a state from a rank that has it to one that has not.

Both ranks make a group of two under the plan's store. The manifest goes first (names, types,
shapes), then the plain values and all tensors as one stream of bytes cut into chunks, then the
hash, which the receiver compares with its own. Nothing in it can run code in the receiver.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from deadpool_runtime.encoding import Digest, decode, encode, tensor_bytes
from deadpool_runtime.errors import CorruptState
from deadpool_runtime.groups.registry import GroupRegistry
from deadpool_runtime.state import Slot

CHUNK_NBYTES = 32 << 20
#: For connecting, and for each chunk.
TIMEOUT = timedelta(seconds=60)
_SENDER, _RECEIVER = 0, 1


class Entry(msgspec.Struct, frozen=True):
    """One tensor. ``on_cpu``: it lies on the CPU whatever its parameter's device."""

    key: str
    dtype: str
    shape: list[int]
    on_cpu: bool


class Manifest(msgspec.Struct, frozen=True):
    """What the stream of bytes holds, in this order, after ``meta_nbytes`` of plain values."""

    step: int
    meta_nbytes: int
    entries: list[Entry]


class Pair:
    """A connection between the sender and the receiver of one state."""

    def __init__(
        self, registry: GroupRegistry, store: dist.Store, epoch: int, receiver: int, me: int
    ) -> None:
        prefixed = dist.PrefixStore(f"deadpool/{epoch}/state/{receiver}", store)
        place = _RECEIVER if me == receiver else _SENDER
        # Watched, so that a Revoke can break it: the other end may be stopped, not dead.
        self._group: Any = registry.watch_store(
            lambda: dist.ProcessGroupGloo(prefixed, place, 2, TIMEOUT)
        )

    def send(self, data: torch.Tensor) -> None:
        """Send a flat uint8 tensor; the receiver must know its length."""
        if data.numel():
            self._group.send([data], _RECEIVER, 0).wait()

    def receive(self, nbytes: int) -> torch.Tensor:
        """Receive a flat uint8 tensor of that length."""
        data = torch.empty(nbytes, dtype=torch.uint8)
        if nbytes:
            self._group.recv([data], _SENDER, 0).wait()
        return data

    def send_sized(self, data: bytes) -> None:
        """Send bytes and their length."""
        self.send(torch.tensor([len(data)], dtype=torch.int64).view(torch.uint8))
        self.send(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def receive_sized(self) -> bytes:
        """Receive bytes whose length is not known."""
        nbytes = int(self.receive(8).view(torch.int64))
        return self.receive(nbytes).numpy().tobytes()


def send_slot(pair: Pair, slot: Slot, on_cpu: set[str]) -> None:
    """Send the replicated part of ``slot``."""
    assert slot.step is not None
    meta = encode(slot.meta, "the optimizer's state")
    entries = [
        Entry(key, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), key in on_cpu)
        for key, tensor in slot.tensors.items()
    ]
    pair.send_sized(msgspec.msgpack.encode(Manifest(slot.step, len(meta), entries)))
    for chunk in _chunks(meta, slot):
        pair.send(chunk)
    pair.send_sized(_digest(meta, slot).encode())


def receive_slot(pair: Pair, slot: Slot) -> int:
    """Fill ``slot`` with what the peer sends; returns the step, which the caller must check.

    Raises ``CorruptState`` when the hash does not fit; the slot is then not to be used.
    """
    manifest = msgspec.msgpack.decode(pair.receive_sized(), type=Manifest)
    slot.tensors = {
        entry.key: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for entry in manifest.entries
    }
    meta = torch.empty(manifest.meta_nbytes, dtype=torch.uint8)
    targets = [meta, *(tensor.view(-1).view(torch.uint8) for tensor in slot.tensors.values())]
    left = sum(target.numel() for target in targets)
    chunk = torch.empty(0, dtype=torch.uint8)
    at = 0
    for target in targets:
        filled = 0
        while filled < target.numel():
            if at == chunk.numel():
                chunk, at = pair.receive(min(left, CHUNK_NBYTES)), 0
                left -= chunk.numel()
            size = min(target.numel() - filled, chunk.numel() - at)
            target[filled : filled + size].copy_(chunk[at : at + size])
            filled += size
            at += size
    encoded = meta.numpy().tobytes()
    if pair.receive_sized().decode() != _digest(encoded, slot):
        raise CorruptState(f"The state of step {manifest.step} arrived with a different hash.")
    slot.meta = decode(encoded)
    slot.meta["on_cpu"] = {entry.key for entry in manifest.entries if entry.on_cpu}
    return manifest.step


def _chunks(meta: bytes, slot: Slot) -> Iterator[torch.Tensor]:
    """The stream, each chunk but the last of full length; a chunk is valid until the next."""
    staging = torch.empty(CHUNK_NBYTES, dtype=torch.uint8)
    used = 0
    pieces = [torch.frombuffer(bytearray(meta), dtype=torch.uint8)]
    pieces += [tensor_bytes(tensor) for tensor in slot.tensors.values()]
    for piece in pieces:
        taken = 0
        while taken < piece.numel():
            size = min(piece.numel() - taken, CHUNK_NBYTES - used)
            staging[used : used + size].copy_(piece[taken : taken + size])
            used += size
            taken += size
            if used == CHUNK_NBYTES:
                yield staging
                used = 0
    if used:
        yield staging[:used]


def _digest(meta: bytes, slot: Slot) -> str:
    digest = Digest()
    digest.add(meta, "plain values")
    for key, tensor in slot.tensors.items():
        digest.add(key, key)
        digest.add_tensor(tensor)
    return digest.hexdigest()
