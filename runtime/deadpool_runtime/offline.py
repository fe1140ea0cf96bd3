"""The same job without a launcher: one pass, nothing saved, nothing caught.

Under plain Python and ``torchrun`` a script that uses ``attach`` runs as if it did not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist

from deadpool_runtime.data import Batches
from deadpool_runtime.job import Job, Step


class OfflineJob(Job):
    """A job that nobody watches."""

    @property
    def world_size(self) -> int:
        """See ``Job.world_size``."""
        return dist.get_world_size() if dist.is_initialized() else 1

    def steps(
        self, loader: Iterable[Any], *, max_steps: int | None = None, epochs: int | None = None
    ) -> Iterator[tuple[Step, Any]]:
        """See ``Job.steps``."""
        most_steps, most_epochs = self._begin_steps(max_steps, epochs)
        batches = Batches(loader, max_steps=most_steps, epochs=most_epochs, remember=False)
        return self._run(batches)

    def _run(self, batches: Batches) -> Iterator[tuple[Step, Any]]:
        number = 1
        fetched = batches.obtain(1)
        while not fetched.ended:
            step = Step(number)
            yield step, fetched.take()
            number += 1
            fetched = batches.obtain(number, last=step.is_last)
