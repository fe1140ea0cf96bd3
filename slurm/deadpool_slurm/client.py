"""What the launcher asks of Slurm, and what it has it do: one interface of five methods.

Behind it are Slurm's commands (``commands.py``), pyslurm (``pyslurm_client.py``), and nodes that
are process trees on one machine (``local.py``); ``access.py`` chooses. The same tests hold for all.

Every call has a deadline of its own, shorter than Slurm's (its commands retry for minutes when the
controller is away). One that fails, hangs or says what cannot be read raises ``SlurmError``: no
answer is never taken for "no node is down" or "the job is gone".

The calls block; in an event loop run them in a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from deadpool_slurm import parse

#: Deadline of one call, in seconds.
CALL_TIMEOUT_S = 10.0


class SlurmError(Exception):
    """Slurm refused, or did not answer."""


@dataclass(frozen=True, slots=True)
class EndStep:
    """End (or signal) the job's step of this name. ``signal``: its name without SIG."""

    job_id: str
    name: str
    signal: str | None = None


@dataclass(frozen=True, slots=True)
class EndJob:
    """End the job with all its steps."""

    job_id: str


@dataclass(frozen=True, slots=True)
class Requeue:
    """Put the running job back into the queue, which ends its processes."""

    job_id: str


@dataclass(frozen=True, slots=True)
class EndWaiting:
    """End the user's jobs of this name that have not begun."""

    name: str


@dataclass(frozen=True, slots=True)
class Comment:
    """Put a comment on the job, where it is shown with it."""

    job_id: str
    text: str


@dataclass(frozen=True, slots=True)
class KeepNodes:
    """Give every other node of the job back; the job never gets them again."""

    job_id: str
    nodes: tuple[str, ...]


Change = EndStep | EndJob | Requeue | EndWaiting | Comment | KeepNodes


class SlurmClient(Protocol):
    """What the launcher asks of Slurm. Every method may raise ``SlurmError``."""

    def job(self, job_id: str, *, submission: bool = False) -> parse.JobFacts:
        """The job as it is now; with ``submission`` also how it was submitted, as far as Slurm
        keeps that.
        """

    def nodes(self, names: Sequence[str]) -> dict[str, parse.NodeFacts]:
        """The state of these nodes; one that Slurm does not know is missing."""

    def steps(self, job_id: str) -> list[str]:
        """The names of the job's steps."""

    def config(self) -> dict[str, str]:
        """Slurm's configuration by the names of slurm.conf, and its version (``SLURM_VERSION``)."""

    def do(self, change: Change) -> bool:
        """Make the change; false if there was nothing to change."""
