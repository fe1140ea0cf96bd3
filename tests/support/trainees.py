"""Ranks that train in forked processes, die where they are told to, and are replaced, for the tests
of groups. How their state comes back is the matter of each test.
"""

from __future__ import annotations

import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from deadpool_runtime.groups.engines import Engines
from deadpool_runtime.groups.registry import GroupRegistry

PATIENCE = timedelta(seconds=60)


@dataclass(frozen=True)
class Death:
    """Where a rank kills itself, once, in the process that was first to play it."""

    rank: int
    step: int
    #: "forward", "backward" (both in the middle of the model) or "stepped" (after the optimizer).
    phase: str
    #: How often the phase comes before it is this one; pipelines have one for each microbatch.
    count: int = 0
    #: Which process of that rank: 0 is the first, 1 its replacement.
    incarnation: int = 0


class Trainee(ABC):
    """One rank's process: trains, and takes part in every recovery that is declared.

    A subclass makes its model once this is made, and sets ``engines``.
    """

    engines: Engines

    def __init__(self, crew: Any, rank: int, size: int, incarnation: int, epoch: int) -> None:
        self.crew, self.rank, self.size = crew, rank, size
        self.incarnation, self.epoch = incarnation, epoch
        self.client = crew.client()
        self.registry = GroupRegistry()
        self.registry.install(detached=incarnation > 0)
        #: The newest step that is completed.
        self.done = 0
        self._declared = threading.Condition()
        self._newest_epoch = epoch
        threading.Thread(target=self._watch, args=(crew.client(),), daemon=True).start()
        dist.init_process_group(
            "gloo", store=self.open_store(), rank=rank, world_size=size, timeout=PATIENCE
        )

    def open_store(self) -> dist.Store:
        """Where the ranks meet."""
        return self.registry.open_store("127.0.0.1", self.crew.port, PATIENCE)

    def train(self, steps: int) -> None:
        """Train to that step, whatever happens to the others."""
        recovering = self.incarnation > 0
        while self.done < steps or recovering:
            try:
                if recovering:
                    self.client.set(f"parked/{self.epoch}/{self.rank}", "")
                    self.engines.reset()
                    self.recover(self.open_store())
                    recovering = False
                if self.done < steps:
                    self.step(self.done + 1)
                # Nobody may leave while a peer still needs the step that it has just finished.
                dist.barrier()
            except RuntimeError:
                with self._declared:
                    if not self._declared.wait_for(
                        lambda: self._newest_epoch > self.epoch, PATIENCE.total_seconds()
                    ):
                        raise
                self.epoch = self._newest_epoch
                recovering = True

    @abstractmethod
    def step(self, step: int) -> None:
        """One step of training."""

    @abstractmethod
    def recover(self, store: dist.Store) -> None:
        """Rebuild the groups, and go back to the newest step that all have."""

    def _watch(self, client: dist.Store) -> None:
        while True:
            following = self._newest_epoch + 1
            client.wait([f"fault/{following}"], timedelta(days=1))
            self.registry.abort(following)
            with self._declared:
                self._newest_epoch = following
                self._declared.notify_all()


def play(
    crew: Any,
    size: int,
    deaths: list[Death],
    body: Callable[[int, int, int], dict[str, Any]],
    park_s: float,
) -> list[dict[str, Any]]:
    """Run ``body(rank, incarnation, epoch)`` in a process for each rank, replacing those that die,
    and return what each rank reports. ``park_s``: time for survivors to leave their step.
    """
    workers = {rank: crew.start(body, rank, 0, 0) for rank in range(size)}
    incarnations = dict.fromkeys(workers, 0)
    epoch = 0
    for death in deaths:
        lost = {death.rank} if incarnations[death.rank] == death.incarnation else set()
        while lost:
            for rank in lost:
                workers[rank].wait_until_dead()
            epoch += 1
            crew.store.set(f"fault/{epoch}", "")
            for rank in lost:
                incarnations[rank] += 1
                workers[rank] = crew.start(body, rank, incarnations[rank], epoch)
            lost = {rank for rank in workers if not _has_parked(crew, rank, epoch, park_s)}
            for rank in lost:
                os.kill(workers[rank].pid, signal.SIGKILL)
    return [workers[rank].result() for rank in range(size)]


def _has_parked(crew: Any, rank: int, epoch: int, park_s: float) -> bool:
    """Whether the rank has left its step for this epoch; one that has not is replaced as well.

    Gloo now and then forgets a receive whose peer is killed at that moment: the connection is
    closed and nobody wakes the receiver, whom then only the group's time-out frees.
    """
    try:
        crew.store.wait([f"parked/{epoch}/{rank}"], timedelta(seconds=park_s))
    except dist.DistStoreError:
        print(f"rank {rank} has not parked for epoch {epoch}")
        return False
    return True
