"""A process that a launcher before this one started: followed, signalled, but nobody's child here.

It has the part of ``asyncio.subprocess.Process`` that the back ends use. Its exit code is not to be
had; whoever started launchers before this one takes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import psutil

#: In place of an exit code that is not known; never taken for success.
UNKNOWN_EXIT = 255
_POLL_S = 0.1


class AdoptedProcess:
    """The process with this id, if it is the one that was created then.

    ``created``: its time of creation, as psutil tells it; a reused process id is another process.
    """

    def __init__(self, pid: int, created: float) -> None:
        self.pid = pid
        self.returncode: int | None = None
        try:
            self._process = psutil.Process(pid)
            if self._process.create_time() != created:
                self.returncode = UNKNOWN_EXIT
        except psutil.Error:
            self.returncode = UNKNOWN_EXIT

    async def wait(self) -> int:
        """Until it has ended."""
        while self._runs():
            await asyncio.sleep(_POLL_S)
        return UNKNOWN_EXIT

    def terminate(self) -> None:
        """SIGTERM; raises ``ProcessLookupError`` if it has ended."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL; raises ``ProcessLookupError`` if it has ended."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if not self._runs():
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, number)

    def _runs(self) -> bool:
        if self.returncode is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                # is_running compares the time of creation.
                if self._process.is_running() and (self._process.status() != psutil.STATUS_ZOMBIE):
                    return True
            self.returncode = UNKNOWN_EXIT
        return False


def mark(pid: int) -> dict[str, float]:
    """What ``AdoptedProcess`` needs of a process that runs now."""
    try:
        return {"pid": pid, "created": psutil.Process(pid).create_time()}
    except psutil.Error:
        return {"pid": pid, "created": 0.0}
