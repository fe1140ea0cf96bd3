"""How many threads fill and hash the chunks of a copy, and the order in which they tell.

One thread hashes some ten GiB a second at best, less than a GPU copies; so where processors are to
spare, a few threads work on groups of chunks at a time. What comes out is the same, in the same
order.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager

Fill = Callable[[int, int], list[bytes]]
_Task = tuple["Future[list[bytes]]", Fill, int, int]

#: More threads than this are of little use: memory is the limit then.
MOST = 4
#: With so many processors for each rank or fewer, all of them compute if there is no device to.
BUSY = 4


def hasher_threads(processors: int, ranks_on_node: int, has_device: bool) -> int:
    """How many threads are to hash. ``has_device``: the state lies on a GPU, so that training
    leaves most of the processors alone."""
    share = processors // max(ranks_on_node, 1)
    if not has_device and share <= BUSY:
        return 1
    return max(1, min(MOST, share // 2))


def present_threads(has_device: bool) -> int:
    """The same for this process, which knows its peers on the node from ``torchrun``'s variable."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    processors = len(os.sched_getaffinity(0))
    return hasher_threads(processors, int(ranks) if ranks.isdigit() else 1, has_device)


class Hashers:
    """Calls a function for group after group of chunks, by so many threads. For one thread at a
    time; one thread means the caller's own.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        # Not the library's pool: it takes no work any more once the script has ended, when the last
        # copy may still be under way.
        for _ in range(threads if threads > 1 else 0):
            threading.Thread(target=self._work, name="deadpool-hasher", daemon=True).start()

    @contextmanager
    def ordered(
        self, fill: Fill, groups: Iterable[tuple[int, int]]
    ) -> Iterator[Iterator[tuple[int, list[bytes]]]]:
        """First chunk and result of ``fill`` for each group, in order. At the end of the context no
        call is under way any more."""
        if self.threads == 1:
            yield ((first, fill(first, last)) for first, last in groups)
            return
        running: deque[tuple[int, Future[list[bytes]]]] = deque()
        try:
            yield self._results(fill, groups, running)
        finally:
            for _, future in running:
                future.cancel()
            wait([future for _, future in running])

    def _results(
        self,
        fill: Fill,
        groups: Iterable[tuple[int, int]],
        running: deque[tuple[int, Future[list[bytes]]]],
    ) -> Iterator[tuple[int, list[bytes]]]:
        for first, last in groups:
            future: Future[list[bytes]] = Future()
            self._tasks.put((future, fill, first, last))
            running.append((first, future))
            # One more than there are threads, so that none waits while a group is told of.
            if len(running) > self.threads:
                yield self._next(running)
        while running:
            yield self._next(running)

    @staticmethod
    def _next(running: deque[tuple[int, Future[list[bytes]]]]) -> tuple[int, list[bytes]]:
        first, future = running[0]
        hashes = future.result()
        running.popleft()
        return first, hashes

    def close(self) -> None:
        """End the threads."""
        for _ in range(self.threads if self.threads > 1 else 0):
            self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, fill, first, last = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fill(first, last))
                except BaseException as error:  # it is raised where the result is asked for
                    future.set_exception(error)
            del task, future, fill
