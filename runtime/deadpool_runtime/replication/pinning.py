"""Page-locking of slots, so that a GPU copies into them without a detour and without waiting.

``Pinning`` is the seam: CUDA's implementation, and one that does nothing for CPU training. A slot
that cannot be page-locked is used all the same, slower, and a note says so.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from deadpool_runtime.replication.slots import SlotFile

#: cudaHostRegisterPortable: page-locked for every device of the process.
_PORTABLE = 1

#: The bindings have no types.
_cuda: Any = torch.cuda


class PinningFailed(RuntimeError):
    """Memory could not be page-locked."""


class Pinning(Protocol):
    """Page-locks memory of this process. ``register`` and ``unregister`` come in pairs."""

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock this memory, or raise ``PinningFailed``."""

    def unregister(self, address: int) -> None:
        """Undo ``register``; the memory must still be mapped. Does not raise."""


class NoPinning:
    """For devices that need none."""

    def register(self, address: int, nbytes: int) -> None:
        """See ``Pinning``."""

    def unregister(self, address: int) -> None:
        """See ``Pinning``."""


class CudaPinning:
    """Through the CUDA runtime that torch has loaded, in the context of ``device``: a thread that
    says nothing would make another one on the first GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, nbytes: int) -> None:
        """See ``Pinning``."""
        runtime = _cuda.cudart()
        with _cuda.device(self._device):
            error = runtime.cudaHostRegister(address, nbytes, _PORTABLE)
        if int(error) != 0:
            raise PinningFailed(
                f"CUDA could not page-lock {nbytes / (1 << 20):,.1f} MiB of the arena "
                f"({runtime.cudaGetErrorString(error)}), so copies to it are slower: raise the "
                f"limit of locked memory (ulimit -l) or give the node more memory."
            )

    def unregister(self, address: int) -> None:
        """See ``Pinning``."""
        with _cuda.device(self._device):
            _cuda.cudart().cudaHostUnregister(address)


class PinnedSlots:
    """Keeps each slot's present mapping page-locked. For one thread at a time."""

    def __init__(self, pinning: Pinning, note: Callable[[str], None]) -> None:
        """``note``: told once, in a sentence, when page-locking fails."""
        self._pinning = pinning
        self._note = note
        self._noted = False
        #: Slot -> address, size and mapping; the mapping is held so that it outlives its lock.
        self._locked: dict[Path, tuple[int, int, mmap.mmap]] = {}
        #: Mappings that could not be page-locked, so as not to try again at each step.
        self._refused: dict[Path, mmap.mmap] = {}

    def hold(self, slot: SlotFile) -> bool:
        """Page-lock the mapping of ``slot`` in the place of an older one; whether it is locked."""
        mapping, address = slot.mapping, slot.address
        held = self._locked.get(slot.path)
        if held is not None and held[2] is mapping:
            return True
        if self._refused.get(slot.path) is mapping:
            return False
        self._release(slot.path)
        try:
            self._pinning.register(address, len(mapping))
        except PinningFailed as error:
            self._refused[slot.path] = mapping
            if not self._noted:
                self._noted = True
                self._note(str(error))
            return False
        self._locked[slot.path] = address, len(mapping), mapping
        return True

    def release(self) -> None:
        """Unlock everything."""
        for path in list(self._locked):
            self._release(path)
        self._refused.clear()

    def _release(self, path: Path) -> None:
        held = self._locked.pop(path, None)
        if held is not None:
            self._pinning.unregister(held[0])
