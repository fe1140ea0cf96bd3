"""The collectives of this process's groups are written into its record (``progress.py``).

What writes them is ``counting.hpp``, which wraps the functions of each group's Backend. A Backend
is watched from its making on, and a rebuilt group counts from one again, as its peers do, of which
some may be new.
"""

from __future__ import annotations

import torch

from deadpool_runtime.groups import native
from deadpool_runtime.groups.mechanism import GroupRecord
from deadpool_runtime.groups.progress import NBYTES, Recorder


class CollectiveCounter:
    """Watches the groups of one process; without a ``recorder`` it does nothing."""

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder

    def install(self) -> None:
        """Let the native part write into the record."""
        if self._recorder is not None:
            native.load().keep_record_in(self._recorder.address, NBYTES)

    def watch(self, record: GroupRecord, epoch: int) -> None:
        """Count the collectives of this group's Backend in ``epoch``, from one.

        A group that cannot be watched goes without: its hangs show by the step clock alone.
        """
        if self._recorder is None:
            return
        device = torch.device(next(iter(record.devices)))
        backend = record.living()._get_backend(device)
        native.load().watch_collectives(backend, record.name, epoch)
