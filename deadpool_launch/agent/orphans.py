"""What ranks leave behind when they die: workers, helpers, daemons. They come to the agent, their
subreaper, and are ended a moment later.

The moment is for programs that tidy up when their owner is gone, such as Python's resource tracker,
which then removes the owner's shared memory; killed at once they would leave it.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil

#: Time that processes left behind have to end by themselves.
GRACE_S = 1.0


class Orphans:
    """Keeps account of children of this process that are neither ranks nor the parked process."""

    def __init__(self) -> None:
        #: Came here while every rank lived: daemons that a living rank started on purpose.
        self._of_the_living: set[int] = set()
        self._doomed: dict[int, tuple[float, float]] = {}

    def rank_ended(self, session: int, tag: str, known: set[int]) -> None:
        """The rank that led ``session`` is gone: what has come here since it lived is its."""
        left = {pid for pid in children() if pid not in known and pid not in self._of_the_living}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(OSError, psutil.Error):
                if process.pid not in known and (
                    os.getsid(process.pid) == session
                    or process.environ().get("DEADPOOL_RANK_TAG") == tag
                ):
                    left.add(process.pid)
        for pid in left:
            with contextlib.suppress(psutil.Error):
                created = psutil.Process(pid).create_time()
                self._doomed[pid] = (created, time.monotonic() + GRACE_S)

    def look(self, known: set[int]) -> None:
        """Take exit statuses, end those whose time is up, note who belongs to living ranks."""
        reap(known)
        now = time.monotonic()
        for pid, (created, deadline) in list(self._doomed.items()):
            try:
                process = psutil.Process(pid)
                if process.create_time() != created:
                    raise psutil.NoSuchProcess(pid)
                if now < deadline:
                    continue
                for each in (*process.children(recursive=True), process):
                    with contextlib.suppress(psutil.Error):
                        each.kill()
            except psutil.NoSuchProcess:
                pass
            del self._doomed[pid]
        self._of_the_living = {
            pid for pid in children() if pid not in known and pid not in self._doomed
        }


def children() -> set[int]:
    """The direct children of this process."""
    found: set[int] = set()
    try:
        for task in Path("/proc/self/task").iterdir():
            found.update(int(pid) for pid in (task / "children").read_text().split())
    except OSError:  # a kernel without these files
        return {child.pid for child in psutil.Process().children()}
    return found


def reap(known: set[int]) -> None:
    """Take the exit status of children nobody waits for."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in known:
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(ended.si_pid, os.WNOHANG)
