"""The launcher's part in durable checkpoints, as far as it touches the disk.

Each launch has a folder of its own in the directory that the user names, so that two with the same
``--checkpoint-dir`` neither overwrite nor remove what the other wrote. In a job that was requeued a
launch takes up the folder that the same command had before; and whoever gives the folder a name
takes up what stands under that name.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import msgspec

from deadpool_launch.errors import UsageError
from deadpool_runtime.durable import index

#: Says which launch wrote to a folder last.
LAUNCH_NAME = "launch.json"


class Command(msgspec.Struct, frozen=True):
    """What a launch runs. The checkpoints of another command are of no use to it."""

    script: str
    script_args: tuple[str, ...]
    world_size: int


class _Launch(msgspec.Struct, frozen=True):
    """Content of ``launch.json``. ``restarts``: how often the job had been begun again."""

    command: Command
    restarts: int


class Place(NamedTuple):
    """A folder for checkpoints, and whether an earlier launch has used it for the same."""

    folder: Path
    taken_up: bool


class NotCommitted(Exception):
    """What the ranks wrote did not become a checkpoint; the text says why."""


def choose(
    directory: Path, job_id: str, name: str | None, command: Command, restarts: int
) -> Place:
    """Where the checkpoints of this launch go. ``name``: the folder's, if the user gives one.

    Otherwise the folder is named after the job, with a number from the second launch of the job on.
    A batch script that runs again after the job was requeued launches the same commands in the same
    order, so each takes up the first folder of its command that no launch has taken up since.
    """
    if name is not None:
        folder = directory / name
        return Place(folder, folder.exists())
    for number in itertools.count(1):
        folder = directory / (job_id if number == 1 else f"{job_id}-{number}")
        before = _last_launch(folder)
        if before is not None and before.command == command and before.restarts < restarts:
            return Place(folder, True)
        if before is None and not folder.exists():
            return Place(folder, False)
    raise AssertionError("there is no last number")


def _last_launch(folder: Path) -> _Launch | None:
    try:
        return msgspec.json.decode((folder / LAUNCH_NAME).read_bytes(), type=_Launch)
    except (OSError, msgspec.MsgspecError):
        return None


def take(folder: Path, command: Command, restarts: int) -> None:
    """Make the folder this launch's. Raises ``UsageError``."""
    fresh = folder / f".{LAUNCH_NAME}"
    try:
        folder.mkdir(exist_ok=True)
        fresh.write_bytes(msgspec.json.encode(_Launch(command, restarts)) + b"\n")
        fresh.rename(folder / LAUNCH_NAME)
    except OSError as error:
        raise _unusable(folder, error) from error


def make_directory(given: Path) -> None:
    """Make the directory that the user names and see that it can be written; ``UsageError`` if
    not.
    """
    try:
        if given.exists() and not given.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        given.mkdir(parents=True, exist_ok=True)
        probe = given / f".probe-{secrets.token_hex(4)}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _unusable(given, error) from error


def _unusable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"--checkpoint-dir {path}: cannot be used ({error.strerror}); "
        "name a directory that you can write"
    )


def found(place: Place, world_size: int) -> tuple[int, ...]:
    """The steps of the checkpoints that an earlier launch left there, newest first. Raises
    ``UsageError`` where the user asks for them and none is of so many ranks.
    """
    if not place.taken_up:
        return ()
    steps = index.list_complete(place.folder)
    sizes = {step: index.read_complete(place.folder, step).world_size for step in steps}
    fitting = tuple(step for step in steps if sizes[step] == world_size)
    if steps and not fitting:
        raise UsageError(
            f"--checkpoint-name {place.folder.name}: the checkpoint of step {steps[0]} there is of "
            f"{sizes[steps[0]]} ranks and this job has {world_size}; run it with as many, or give "
            "another name"
        )
    return fitting


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
