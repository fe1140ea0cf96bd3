"""What the training thread asks of the copier's thread: a copy, or room for copies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deadpool_runtime.replication.manifest import Segment
from deadpool_runtime.replication.slots import SlotFile
from deadpool_runtime.replication.streams import CopyStream

#: An own part, or what makes it.
Own = bytes | Callable[[], bytes]


class CopyJob:
    """One copy on its way. ``settle`` and ``done_with`` may be called by any thread."""

    def __init__(
        self,
        step: int,
        epoch: int,
        segments: tuple[Segment, ...],
        tensors: list[Sequence[torch.Tensor]],
        versions: list[int | None],
        slot: SlotFile,
        mark: Any,
        stream: CopyStream,
    ) -> None:
        self.step, self.epoch = step, epoch
        self.segments, self.tensors, self.slot = segments, tensors, slot
        self.mark, self.stream = mark, stream
        self.own: Own | None = None
        #: What the own part waits for, if it is still to be made.
        self.own_mark: Any = None
        #: Why this copy is to be given up; "" while it is not.
        self.reason = ""
        #: Set when all copies are made or queued, or there will be none; then wait for ``token``.
        self.queued = threading.Event()
        self.token: Any = None
        #: Whether the slot is this copy's, and whether this copy counts.
        self.prepared, self.sealed = False, False
        self._versions = versions
        self._settling = threading.Lock()
        self._settled = False

    def settle(self) -> None:
        """The copies are made and nothing was let overwrite the tensors since: find out whether
        something did all the same. Only the first call looks.
        """
        with self._settling:
            if self._settled:
                return
            self._settled = True
            live = [tensor for each in self.tensors for tensor in each]
            if versions_of(live) == self._versions:
                return
            for position, (tensor, before) in enumerate(zip(live, self._versions, strict=True)):
                if before is not None and tensor._version != before:
                    keys = [entry.key for each in self.segments for entry in each.entries]
                    self.reason = self.reason or (
                        f"{keys[position]} was changed while state {self.step} was being copied."
                    )
                    return

    def done_with(self) -> None:
        """Let go of the tensors; it is too late to look at them."""
        with self._settling:
            self._settled = True
            self.tensors, self._versions = [], []


class Room:
    """Slots to be made so large, and page-locked."""

    def __init__(self, slots: Sequence[SlotFile], nbytes: int, stream: CopyStream) -> None:
        self.slots, self.nbytes, self.stream = slots, nbytes, stream
        self.made = threading.Event()


def versions_of(live: list[torch.Tensor]) -> list[int | None]:
    """How often torch has seen each tensor change; None where it does not count."""
    try:
        return [tensor._version for tensor in live]
    except RuntimeError:  # tensors made in inference mode count no changes
        return [None if tensor.is_inference() else tensor._version for tensor in live]
