"""A rank's own slots in the arena of its node: which copy lies where, and the open files.

Used by the training thread, but for ``find`` and what tells of replicas, which the copier's thread
asks as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from deadpool_runtime.replication.arena import Arena, copies_in
from deadpool_runtime.replication.slots import SlotFile
from deadpool_runtime.replication.slotting import SlotTable


class OwnSlots:
    """Those of ``rank``; copies that an earlier process left there are found."""

    def __init__(self, arena: Arena, rank: int, interval: int) -> None:
        self._arena = arena
        self._rank = rank
        self._table = SlotTable(interval, self._there())
        self._files: dict[int, SlotFile] = {}
        self.replicates = self._table.replicates
        self.newest_replicated = self._table.newest_replicated
        self.find = self._table.find
        #: By step: the other one whose copy its own overwrites.
        self._overwrites: dict[int, int | None] = {}

    def _there(self) -> dict[int, int]:
        copies = copies_in(self._arena.path, False, self._rank)
        return {slot: manifest.step for slot, (manifest, _) in copies}

    def go_back(self, step: int, keep: Sequence[int]) -> None:
        """All go on from ``step``; copies of the steps in ``keep`` may be needed as well. No copy
        is under way, and some may have come to nothing."""
        self._overwrites.clear()
        self._table.go_back(step, keep, self._there())

    def number(self, step: int) -> int:
        """The slot for a copy of the step that somebody else puts there."""
        slot, self._overwrites[step] = self._table.take(step)
        return slot

    def take(self, step: int) -> SlotFile:
        """The slot for a new copy of the step."""
        return self._file(self.number(step))

    def overwritten(self, step: int) -> int | None:
        """The step of which the copy of this one overwrites another, if any; to be asked once."""
        return self._overwrites.pop(step, None)

    def holding(self, step: int) -> SlotFile | None:
        """The slot with the copy of the step; the replicator may have put another file there."""
        slot = self.find(step)
        if slot is None:
            return None
        if slot in self._files and not self._files[slot].is_in_place():
            self._files.pop(slot).close()
        return self._file(slot)

    def every(self) -> list[SlotFile]:
        """All of them."""
        return [self._file(slot) for slot in range(self._table.count)]

    def _file(self, slot: int) -> SlotFile:
        if slot not in self._files:
            path = self._arena.own_path(self._rank, slot)
            self._files[slot] = SlotFile.open(path, create=True)
        return self._files[slot]
