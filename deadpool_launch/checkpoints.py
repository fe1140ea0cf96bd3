"""The launcher's part in durable checkpoints, as far as it touches the disk.

Each job has a folder of its own in the one that the user names, so that two jobs with the same
``--checkpoint-dir`` neither overwrite nor remove what the other wrote. The jobs of a chain have one
together, of which one runs at a time.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection
from pathlib import Path

from deadpool_launch.errors import UsageError
from deadpool_runtime.durable import index


class NotCommitted(Exception):
    """What the ranks wrote did not become a checkpoint; the text says why."""


def job_directory(directory: Path, job_id: str, chain: str | None = None) -> Path:
    """Where the checkpoints of this job are, or of all jobs of its chain."""
    return directory / (chain or job_id)


def make_directory(given: Path, job_id: str, chain: str | None = None) -> None:
    """Make the job's folder and see that it can be written; ``UsageError`` if not."""
    directory = job_directory(given, job_id, chain)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".probe-{secrets.token_hex(4)}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"--checkpoint-dir {given}: cannot be used ({error.strerror}); "
            "name a directory that you can write"
        ) from error


def found(directory: Path, job_id: str | None, world_size: int) -> tuple[int, ...]:
    """The steps of the checkpoints that an earlier launcher of this job left, newest first.

    ``job_id``: None for those of any job, in the folder of a chain.
    """
    steps = []
    for step in index.list_complete(directory):
        complete = index.read_complete(directory, step)
        if job_id in (None, complete.job_id) and complete.world_size == world_size:
            steps.append(step)
    return tuple(steps)


def commit(
    directory: Path,
    step: int,
    epoch: int,
    world_size: int,
    keep: int,
    earlier: Collection[int] = (),
) -> tuple[int, ...]:
    """Make a checkpoint of what all ranks wrote from copies of ``epoch``, remove those that are not
    among the ``keep`` newest; return the steps of those that are. ``earlier``: steps of an earlier
    launcher's, which are older than all others. Raises ``NotCommitted``.
    """
    try:
        complete = index.commit(directory, step, world_size)
        if complete.epoch != epoch:
            # Ranks have begun to write the step anew; when all have, it is committed again.
            raise NotCommitted(f"it was written again in epoch {complete.epoch}")
        index.prune(directory, keep, set(earlier) - {step})
        return tuple(index.list_complete(directory))
    except index.CheckpointIncomplete as error:
        raise NotCommitted(str(error)) from error
    except OSError as error:
        where = os.fspath(error.filename) if error.filename is not None else directory
        raise NotCommitted(f"{where} cannot be used ({error.strerror or error})") from error
