"""A node's admission checks, run before it takes the ranks of another one.

The preflight has seen to those that have ranks from the start, and a rank that is restarted on its
own node need not wait.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec

from deadpool_launch.policy.admission import log_name, reason_to_refuse
from deadpool_runtime import protocol

#: In this epoch ranks start on nodes that the preflight has just checked.
_FIRST_EPOCH = 1


class Admission:
    """Holds ranks back until the node has passed; ``AgentFailed`` is reported if it does not."""

    def __init__(
        self,
        spec: protocol.JobSpec,
        node: str,
        start: Callable[[protocol.StartRanks], None],
        report: Callable[[protocol.FromAgent], None],
    ) -> None:
        self._spec = spec
        self._node = node
        self._start = start
        self._report = report
        self._passed = not spec.admission
        self._waiting: list[protocol.StartRanks] = []
        self._task: asyncio.Task[None] | None = None
        #: Process id of the command that runs; no one else may take its exit status.
        self.pid: int | None = None

    def start_ranks(self, request: protocol.StartRanks) -> None:
        """Start the ranks, now or once the checks are passed."""
        if request.epoch <= _FIRST_EPOCH:
            self._passed = True
        if self._passed:
            self._start(request)
            return
        self._waiting.append(request)
        if self._task is None:
            self._task = asyncio.create_task(self._check_and_start())

    def check_first(self, passed: Callable[[], None]) -> None:
        """Make the checks before any ranks are asked for, and call ``passed`` if there is nothing
        against the node. They are made again before it takes ranks, which may be much later.
        """
        if self._spec.admission:
            self._task = asyncio.create_task(self._check_before(passed))
        else:
            passed()

    def kill(self, rank: int) -> bool:
        """End a rank that is held back; False if it is not."""
        for at, request in enumerate(self._waiting):
            if rank in request.ranks:
                place = request.ranks.index(rank)
                self._waiting[at] = msgspec.structs.replace(
                    request,
                    ranks=_without(request.ranks, place),
                    local_ranks=_without(request.local_ranks, place),
                )
                killed = int(signal.SIGKILL)
                self._report(protocol.RankExited(rank, request.epoch, None, killed))
                return True
        return False

    async def close(self) -> None:
        """End a command that runs."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _check_before(self, passed: Callable[[], None]) -> None:
        if await self._check():
            self._task = None
            passed()

    async def _check(self) -> bool:
        log_path = Path(self._spec.run_dir) / "logs" / log_name(self._node)
        reason = await reason_to_refuse(self._spec.admission, self._node, log_path, self._runs)
        if reason:
            self._report(protocol.AgentFailed(reason))
        return not reason

    async def _check_and_start(self) -> None:
        if not await self._check():
            return
        self._passed = True
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self._start(request)

    def _runs(self, pid: int | None) -> None:
        self.pid = pid


def _without(numbers: list[int], place: int) -> list[int]:
    return numbers[:place] + numbers[place + 1 :]
