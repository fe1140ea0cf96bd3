"""Which steps are replicated, and which slot a copy goes into.

Pure. Every step is copied on the rank's node; every ``interval``-th is also replicated: 0, N, 2 N,
and once all went back to a step K, which need not be one of these, K, K + N, K + 2 N. What a copy
must not overwrite follows from what may still be gone back to while step ``s`` is copied:

1. Whoever completed ``s`` knows that every rank has come past the optimizer's step of ``s - 1``,
   and so has copied ``s - 2`` on its node. Its copy of ``s - 1`` may be missing yet: both stay.
2. No rank passes the optimizer's step of R + 1, where R is replicated, before its own replica of R
   is confirmed. Whoever completed R + 2 therefore knows that R is whole everywhere. The next one is
   R + N: with an interval of 2 or more, R is whole when R + N begins to be copied, and stays until
   R + N is. The one before R stays too, for the case that a copy of R turns out to be damaged.

With an interval of 1 the steps of 2 are those of 1, and copies use three slots in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

#: Slots of a rank that replicates every step, and of each replica of a rank.
SLOTS = 3
#: Copies that are kept besides the one that is being made, of those with replicas.
_KEPT = 2
#: A rank has no more slots than this, whatever its interval.
MOST_SLOTS = SLOTS + _KEPT


def own_slots(interval: int) -> int:
    """How many slots a rank has for its own copies.

    Of the two newest steps one is replicated if every second is; with longer intervals it may be
    none.
    """
    return SLOTS + min(interval - 1, _KEPT)


def slot_file(replica: bool, rank: int, slot: int) -> str:
    """The name of a slot's file in an arena."""
    return f"{'held' if replica else 'own'}-{rank}-{slot}"


def newest_below(step: int, steps: Iterable[int]) -> list[int]:
    """Of these steps, those that are kept while ``step`` is copied or replicated."""
    return sorted({each for each in steps if each < step}, reverse=True)[:_KEPT]


def slot_for(step: int, there: Mapping[int, int], keep: Set[int], count: int) -> int:
    """The slot that the copy of ``step`` goes into, of ``count``; ``there``: the step in each.

    One with the same step, of which there is another copy then; else the one whose turn it is,
    unless the step that lies there is one to ``keep``.
    """
    for slot, other in there.items():
        if other == step:
            return slot
    free = [slot for slot in range(count) if there.get(slot) not in keep]
    turn = step % count
    if turn in free or not free:
        return turn
    return min(free, key=lambda slot: there.get(slot, -1))


class SlotTable:
    """The slots of one rank's own copies. ``there``: the steps that lie in them at first."""

    def __init__(self, interval: int, there: Mapping[int, int] | None = None) -> None:
        self.count = own_slots(interval)
        self._interval = interval
        self._there = dict(there or {})
        #: The step from which intervals are counted.
        self._base = 0
        #: Steps with replicas.
        self._replicated: list[int] = []

    def replicates(self, step: int) -> bool:
        """Whether there are replicas of the step."""
        return self.newest_replicated(step) == step

    def newest_replicated(self, step: int) -> int:
        """The newest step up to this one of which there are replicas."""
        return step - (step - self._base) % self._interval

    def find(self, step: int) -> int | None:
        """The slot in which a copy of the step is, or is being made."""
        return next((slot for slot, other in self._there.items() if other == step), None)

    def take(self, step: int) -> tuple[int, int | None]:
        """The slot for a new copy of the step, and the other step of which it overwrites a copy."""
        replicated = newest_below(step, self._replicated)
        keep = {step - 1, step - 2, *replicated}
        slot = slot_for(step, self._there, keep, self.count)
        before = self._there.get(slot)
        # Another thread may be reading the old one.
        self._there = {**self._there, slot: step}
        self._replicated = [*replicated, step] if self.replicates(step) else replicated
        return slot, None if before == step else before

    def go_back(self, step: int, keep: Sequence[int], there: Mapping[int, int]) -> None:
        """All go on from ``step``, which is replicated now; so are the steps in ``keep``.
        ``there``: what lies in the slots.
        """
        self._there = dict(there)
        self._base = step
        self._replicated = [*newest_below(step, keep), step]
