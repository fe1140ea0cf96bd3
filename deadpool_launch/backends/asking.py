"""What both kinds of nodes are asked and told in the same words, through ``SlurmClient``."""

from __future__ import annotations

from abc import ABC, abstractmethod

from deadpool_launch.backends.base import SiteError
from deadpool_slurm.client import (
    Change,
    Comment,
    EndWaiting,
    Requeue,
    SlurmClient,
    SlurmError,
)


class Asking(ABC):
    """The part of ``Backend`` that goes to the site."""

    client: SlurmClient

    @property
    @abstractmethod
    def job_id(self) -> str:
        """The job's."""

    def requeue(self) -> None:
        """Back into the queue; the batch script is killed by it."""
        self._do(Requeue(self.job_id))

    def cancel_waiting(self, name: str) -> None:
        """End the user's jobs of this name that have not begun."""
        self._do(EndWaiting(name))

    def comment(self, text: str) -> None:
        """The job's ``Comment``, as ``squeue -o %k`` shows it."""
        self._do(Comment(self.job_id, text))

    def _do(self, change: Change) -> None:
        try:
            self.client.do(change)
        except SlurmError as error:
            raise SiteError(str(error)) from error
