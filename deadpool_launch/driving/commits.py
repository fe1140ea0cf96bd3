"""Durable checkpoints that all ranks have written their parts of are made whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from deadpool_launch import checkpoints
from deadpool_launch.controller import events
from deadpool_launch.controller.config import Config
from deadpool_launch.journal import Journal

#: Time that checkpoints have to be committed when the job is over.
COMMIT_S = 60.0


class Commits:
    """One at a time, in the order in which they are asked for; ``emit`` is told of each."""

    def __init__(
        self,
        config: Config,
        journal: Journal,
        emit: Callable[[events.Event], None],
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._journal = journal
        self._emit = emit
        self._clock = clock
        self._turn = asyncio.Lock()
        #: Those that are under way.
        self.tasks: set[asyncio.Task[None]] = set()

    def begin(self, wanted: events.CommitCheckpoint, earlier: Callable[[], frozenset[int]]) -> None:
        """Commit one. ``earlier()``: those that are there when its turn comes."""
        task = asyncio.create_task(self._commit(wanted, earlier))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def settle(self) -> None:
        """Give those that are under way the time that they may have when the job is over."""
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=COMMIT_S)

    async def _commit(
        self, wanted: events.CommitCheckpoint, earlier: Callable[[], frozenset[int]]
    ) -> None:
        step, epoch = wanted.step, wanted.epoch
        directory = Path(self._config.checkpoint_dir)
        async with self._turn:
            began_at = self._clock()
            try:
                kept = await asyncio.to_thread(
                    checkpoints.commit,
                    directory,
                    step,
                    epoch,
                    self._config.world_size,
                    self._config.checkpoint_keep,
                    earlier(),
                )
            except checkpoints.NotCommitted as error:
                reason = str(error)
                self._journal.write("checkpoint", step=step, epoch=epoch, failed=reason)
                self._emit(events.CheckpointFailed(self._clock(), step, epoch, reason))
                return
            now = self._clock()
            self._journal.write(
                "checkpoint",
                step=step,
                epoch=epoch,
                directory=str(directory),
                kept=list(kept),
                commit_s=round(now - began_at, 6),
            )
            self._emit(events.CheckpointCommitted(now, step, epoch, kept))
