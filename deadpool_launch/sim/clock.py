"""Virtual time: one queue of what will happen, and the only source of randomness."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

#: The shortest delay of anything, in seconds.
SOON_S = 0.001


class EventQueue:
    """Calls in order of their time, equal times in the order in which they were asked for.

    Nothing here or in what it calls may depend on the order of a set or on the hash of a string:
    the same seed has to give the same run in every process.
    """

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        #: Calls made so far.
        self.calls = 0
        self.dice = random.Random(seed)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, time: float, what: Callable[..., None], *args: Any) -> None:
        """Call ``what`` when it is ``time``."""
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, what, args))

    def later(self, delay_s: float, what: Callable[..., None], *args: Any) -> None:
        """Call ``what`` after a delay."""
        self.at(self.now + delay_s, what, *args)

    def delay(self, most_s: float = 0.2) -> float:
        """A random delay of at most so many seconds."""
        return SOON_S + self.dice.random() * most_s

    @property
    def next_at(self) -> float | None:
        """When the next call is due; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def run_next(self) -> None:
        """Let time pass to the next call, and make it."""
        self.now, _, what, args = heapq.heappop(self._heap)
        self.calls += 1
        what(*args)
