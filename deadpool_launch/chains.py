"""Chains: jobs of one name that wait in Slurm's queue, each going on from the checkpoint of the one
before.

They share a folder of durable checkpoints. A job whose end is the chain's (the script ended, or
would fail again) leaves a note there, and takes those that wait out of the queue; one that starts
all the same reads it, and ends with the same exit code.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from deadpool_launch.backends.base import SiteError
from deadpool_launch.exits import ExitCode
from deadpool_launch.options import LaunchOptions

_NOTE = "chain.json"
#: Exit codes after which the next job would come no further.
_LAST = frozenset({ExitCode.OK, ExitCode.SCRIPT_FAILED, ExitCode.JOB_FAULT})


class ChainEnd(msgspec.Struct, frozen=True):
    """How a chain ended, and in which job."""

    chain: str
    job_id: str
    exit_code: int
    reason: str

    def __str__(self) -> str:
        return (
            f"the chain ended with job {self.job_id}: {self.reason} (exit code {self.exit_code}); "
            "nothing is left to do"
        )


def is_last(exit_code: int) -> bool:
    """Whether no job of the chain is to follow one that ended so."""
    return exit_code in _LAST


def end(
    options: LaunchOptions,
    how: ChainEnd,
    cancel_waiting: Callable[[str], None],
    say: Callable[[str], None],
) -> None:
    """Tell the jobs that follow, and take them out of the queue.

    ``cancel_waiting`` raises ``SiteError``.
    """
    folder = _folder(options)
    fresh = folder / f".{_NOTE}.{os.getpid()}"
    try:
        fresh.write_bytes(msgspec.json.encode(how))
        fresh.rename(folder / _NOTE)
    except OSError as error:
        say(f"jobs of the chain that start cannot be told that it is over ({error.strerror})")
    try:
        cancel_waiting(how.chain)
    except SiteError as error:
        say(f"the jobs of the chain that wait are still in the queue ({error})")


def ended(options: LaunchOptions) -> ChainEnd | None:
    """How the chain of this job ended; ``None`` if it goes on, or there is none."""
    if options.chain is None:
        return None
    try:
        how = msgspec.json.decode((_folder(options) / _NOTE).read_bytes(), type=ChainEnd)
    except (OSError, msgspec.MsgspecError):
        return None
    return how if how.chain == options.chain else None


def _folder(options: LaunchOptions) -> Path:
    """That of the chain's checkpoints."""
    assert options.checkpoint_dir is not None
    assert options.checkpoint_name is not None
    return Path(options.checkpoint_dir) / options.checkpoint_name
