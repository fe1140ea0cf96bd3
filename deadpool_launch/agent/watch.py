"""Watches the records in which ranks write down what they do.

Their layout is in ``deadpool_runtime.groups.progress``. In the good case nothing is told: a rank
counts as late when it has been in one step for half of what a step may take, and only then is it
reported, again with every change, until it goes on. How fast the ranks go is told rarely.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from deadpool_runtime.groups.progress import Reader, record_path
from deadpool_runtime.protocol import Pace, Paces, Standing, Standings

#: How often the records are looked at, unless a short deadline asks for more.
LOOK_S = 0.5
#: Of what a step may take, the part after which a rank is told of.
LATE = 0.5

#: Fewer steps have no median worth the name; more are waited for.
LEAST_STEPS = 5

#: A process of a rank: the rank and the epoch in which it was started.
Process = tuple[int, int]


def look_interval_s(collective_timeout_s: float) -> float:
    """Seconds between two looks."""
    return min(LOOK_S, collective_timeout_s / 10)


def shape(standing: Standing) -> object:
    """What of a standing is news when it changes: all but the times."""
    groups = [(g.name, g.entered, g.number, g.waits, g.peer_op) for g in standing.groups]
    return standing.epoch, standing.step, groups


class ProgressWatch:
    """The records of one node's ranks; ``report`` gets what is to be told to the launcher.

    ``pace_s``: how often it is told how fast the ranks go; 0 for never.
    """

    def __init__(
        self,
        arena: Path,
        collective_timeout_s: float,
        report: Callable[[Standings | Paces], None],
        pace_s: float = 0.0,
    ) -> None:
        self._arena = arena
        self._late_s = collective_timeout_s * LATE
        self._interval_s = min(look_interval_s(collective_timeout_s), pace_s or LOOK_S)
        self._report = report
        self._readers: dict[Process, Reader] = {}
        self._told: dict[Process, object] = {}
        self._next_at = 0.0
        self._pace_s = pace_s
        self._paces_at = 0.0
        #: Number of the newest step of each process that went into a pace.
        self._paced: dict[Process, int] = {}

    def look(self, processes: Iterable[Process], now: float) -> None:
        """Report what is news, if it is time to look. ``now``: CLOCK_MONOTONIC, in seconds."""
        if now < self._next_at:
            return
        self._next_at = now + self._interval_s
        late, moved = [], []
        for process in processes:
            standing = self._standing(process, self._late_s)
            if standing is None:
                if self._told.pop(process, None) is not None:
                    moved.append(process)
            elif self._told.get(process) != (news := shape(standing)):
                self._told[process] = news
                late.append(standing)
        if late or moved:
            self._report(Standings(late, moved))
        self._tell_paces(processes, now)

    def _tell_paces(self, processes: Iterable[Process], now: float) -> None:
        if not self._pace_s or now < self._paces_at:
            return
        self._paces_at = now + self._pace_s
        paces = [pace for each in processes if (pace := self._pace(each)) is not None]
        if paces:
            self._report(Paces(paces))

    def _pace(self, process: Process) -> Pace | None:
        """Of the steps since it was last told, if there are enough of one epoch."""
        reader = self._reader(process)
        steps = [] if reader is None else reader.timed(self._paced.get(process, 0))
        steps = [step for step in steps if step[1] == steps[-1][1]]
        if len(steps) < LEAST_STEPS:
            return None
        self._paced[process] = steps[-1][0]
        own = sorted(step[2] for step in steps)
        step_s = statistics.median(step[3] for step in steps)
        own_s, low_s = statistics.median(own), own[len(own) // 4]
        return Pace(*process, steps[-1][1], len(steps), own_s, low_s, step_s)

    def answer(self, processes: Iterable[Process], number: int) -> None:
        """Report every rank that is in a step, as the answer to question ``number``."""
        found = [self._standing(process, 0.0) for process in processes]
        self._report(Standings([each for each in found if each is not None], [], number))

    def forget(self, process: Process) -> None:
        """The process is gone, and its record goes with it."""
        self._told.pop(process, None)
        self._paced.pop(process, None)
        reader = self._readers.pop(process, None)
        if reader is not None:
            reader.close()
        record_path(self._arena, *process).unlink(missing_ok=True)

    def _standing(self, process: Process, after_s: float) -> Standing | None:
        """What the process is doing, if it has been in its step for that long."""
        reader, now_ns = self._reader(process), time.monotonic_ns()
        if reader is None:
            return None
        step_s = reader.step_s(now_ns)
        if step_s is None or step_s < after_s:
            return None
        return reader.standing(*process, now_ns)

    def _reader(self, process: Process) -> Reader | None:
        if process not in self._readers:
            try:
                self._readers[process] = Reader(record_path(self._arena, *process))
            except (OSError, ValueError):  # not made yet
                return None
        return self._readers[process]
