"""Steps that a launcher on a host which is gone has started: known to Slurm alone."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from deadpool_slurm.client import EndStep, SlurmClient, SlurmError

#: Slurm's time to end a step after SIGKILL, as for one's own.
_KILL_TIMEOUT_S = 5.0
_LIST_AGAIN_S = 0.2


class OrphanStep:
    """``AgentHandle`` of a step without its ``srun``. Its end shows by the agent's connection."""

    def __init__(self, client: SlurmClient, job_id: str, step_name: str) -> None:
        self._client = client
        self._job_id = job_id
        self._step_name = step_name
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        """Until ``stop`` has ended it; nobody has its exit code."""
        await self._ended.wait()
        return 255

    async def stop(self, grace_s: float) -> None:
        """End the step through Slurm."""
        if self._ended.is_set():
            return
        if not (grace_s > 0 and await self._signal("TERM", grace_s)):
            await self._signal("KILL", _KILL_TIMEOUT_S)
        self._ended.set()

    def last_words(self) -> str:
        """What ``srun`` said is on the host that is gone."""
        return ""

    def saved(self) -> dict[str, Any]:
        """The step's name."""
        return {"step": self._step_name, "orphan": True}

    async def _signal(self, signal: str, within_s: float) -> bool:
        """Whether Slurm lists the step no more within that time."""
        change = EndStep(self._job_id, self._step_name, signal)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while True:
                    with contextlib.suppress(SlurmError):
                        if not await asyncio.to_thread(self._client.do, change):
                            return True
                    await asyncio.sleep(_LIST_AGAIN_S)
        return False
