"""The processes of the agents: each is started, watched until it has connected, and ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deadpool_launch.backends.base import AgentHandle, Backend
from deadpool_launch.errors import DeadpoolError
from deadpool_launch.statelog import StateLog


class AgentProcesses:
    """``argv(node, epoch, born)``: an agent's command line. ``spawn``: have something done beside.
    ``wanted(node, born)``: whether this agent is still to be started. ``awaited(node)``: whether
    one is still to connect; ``failed(node, reason)`` is called if it ends before (the core has the
    deadline for silence).
    """

    def __init__(
        self,
        *,
        backend: Backend,
        log: StateLog,
        directory: Path,
        argv: Callable[[str, int, int], list[str]],
        spawn: Callable[[Any], asyncio.Task[Any]],
        wanted: Callable[[str, int], bool],
        awaited: Callable[[str], bool],
        failed: Callable[[str, str], None],
    ) -> None:
        self._backend = backend
        self._log = log
        self._directory = directory
        self._argv = argv
        self._spawn = spawn
        self._wanted = wanted
        self._awaited = awaited
        self._failed = failed
        self._handles: dict[str, AgentHandle] = {}
        #: What ends the last agent of nodes that were given up.
        self._stopping: dict[str, asyncio.Task[Any]] = {}
        #: What the back end needs to find each agent again.
        self.saved: dict[str, dict[str, Any]] = {}

    def __contains__(self, node: str) -> bool:
        return node in self._handles

    def adopt(self, saved: Mapping[str, dict[str, Any]]) -> None:
        """Take over those that another launcher started."""
        self.saved = dict(saved)
        for node, handle in saved.items():
            self._handles[node] = self._backend.adopt(node, handle)

    def watch(self, node: str) -> None:
        """Have the end of one that was adopted noticed."""
        self._spawn(self._watch(node, self._handles[node]))

    def begin(self, node: str, epoch: int, born: int) -> None:
        """Start one, in the place of one that there may be."""
        self.end(node)
        self.saved.pop(node, None)
        self._spawn(self._start(node, epoch, born))

    def end(self, node: str) -> None:
        """End the one of this node, if there is any."""
        handle = self._handles.pop(node, None)
        if handle is not None:
            self._stopping[node] = self._spawn(handle.stop(0.0))

    async def end_all(self, grace_s: float) -> None:
        """End them all; returns when they have ended."""
        await asyncio.gather(
            *(handle.stop(grace_s) for handle in self._handles.values()), return_exceptions=True
        )

    async def _start(self, node: str, epoch: int, born: int) -> None:
        # What ends an agent may end all that runs on its node.
        if (stopping := self._stopping.pop(node, None)) is not None:
            await asyncio.wait([stopping])
            if not self._wanted(node, born):
                return
        log_path = self._directory / f"agent-{node}.log"
        try:
            # Whoever writes them later keeps the mode.
            for path in (log_path, Path(f"{log_path}.srun")):
                path.touch(mode=0o600)
            argv = self._argv(node, epoch, born)
            handle = await self._backend.start_agent(node, argv, log_path)
        except (OSError, DeadpoolError) as error:
            self._failed(node, str(error))
            return
        self._handles[node] = handle
        self.saved[node] = handle.saved()
        self._log.started(node, self.saved[node])
        await self._watch(node, handle)

    async def _watch(self, node: str, handle: AgentHandle) -> None:
        code = await handle.wait()
        if self._awaited(node) and self._handles.get(node) is handle:
            del self._handles[node]
            words = handle.last_words()
            said = f": {words}" if words else ""
            self._failed(node, f"its agent ended with exit code {code}{said}")
