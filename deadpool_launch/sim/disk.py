"""Durable checkpoints of the simulated job: parts that ranks write, what is committed of them, and
which of that is of the history that counts.
"""

from __future__ import annotations

import random
from collections.abc import Set
from dataclasses import dataclass

from deadpool_launch.controller.events import CheckpointCommitted, CheckpointFailed
from deadpool_launch.sim.promises import PromiseBroken
from deadpool_launch.sim.values import Lineages, State

KEEP = 2


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank wrote."""

    epoch: int
    state: State


class Disk:
    """``every``: steps from one checkpoint to the next; 0 for none."""

    def __init__(self, world_size: int, every: int, lineages: Lineages) -> None:
        self.world_size = world_size
        self.every = every
        self.lineages = lineages
        self.parts: dict[int, dict[int, Part]] = {}
        self.complete: set[int] = set()
        self.damaged: set[int] = set()
        #: The launcher was told of these, with this past.
        self.told: dict[int, int] = {}
        #: The next commit fails.
        self.full = False
        self.reads = 0
        #: The past of the last step that all ranks have completed in the history that counts.
        self.common = 0

    # ------------------------------------------------------------ writing

    def wants(self, step: int) -> bool:
        """Whether a checkpoint of this step is to be written."""
        return self.every > 0 and step > 0 and step % self.every == 0

    def write(self, rank: int, epoch: int, state: State) -> None:
        """The rank's part is on disk, in the place of an older one."""
        self._spoil(state.step)
        self.parts.setdefault(state.step, {})[rank] = Part(epoch, state)

    def _spoil(self, step: int) -> None:
        self.complete.discard(step)
        self.damaged.discard(step)
        self.told.pop(step, None)

    def commit(self, at: float, step: int, epoch: int) -> CheckpointCommitted | CheckpointFailed:
        """Make a checkpoint of the parts, if they are all there and belong together."""
        parts = self.parts.get(step, {})
        epochs = {part.epoch for part in parts.values()}
        full, self.full = self.full, False
        if full or len(parts) < self.world_size or epochs != {epoch}:
            return CheckpointFailed(at, step, epoch, "no space left")
        lineages = {part.state.lineage for part in parts.values()}
        if len(lineages) != 1:
            raise PromiseBroken(f"the checkpoint of step {step} has parts of different pasts")
        self.complete.add(step)
        self.told[step] = lineages.pop()
        for old in sorted(self.complete)[:-KEEP]:
            self._spoil(old)
        return CheckpointCommitted(at, step, epoch, tuple(sorted(self.complete, reverse=True)))

    # ------------------------------------------------------------ reading

    def newest(self, refused: Set[int]) -> int | None:
        """The newest checkpoint that is good, of this history, and known to the launcher."""
        good = [
            step
            for step, lineage in self.told.items()
            if step not in refused | self.damaged and self.lineages.is_past(lineage, self.common)
        ]
        return max(good, default=None)

    def read(self, rank: int, step: int) -> Part | str:
        """The rank's part, or why it cannot be had."""
        self.reads += 1
        if step not in self.complete or step in self.damaged:
            return f"a file of the checkpoint of step {step} differs"
        part = self.parts[step][rank]
        if not self.lineages.is_past(part.state.lineage, self.common):
            raise PromiseBroken(f"the checkpoint of step {step} is not of this history")
        return part

    def damage(self, dice: random.Random) -> bool:
        """A bit of a checkpoint changes; False if there is none."""
        if not self.complete:
            return False
        self.damaged.add(dice.choice(sorted(self.complete)))
        return True
