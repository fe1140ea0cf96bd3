"""What a launcher leaves in the run directory for those who cannot hear it: which launcher leads,
and how the job ended.

The batch script's own exit code, and Slurm's state of the job, say nothing once the batch host is
dead: the job is ended with ``scancel`` then, and Slurm shows it as CANCELLED.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TypeVar

import msgspec

RESULT_NAME = "result.json"
_SUCCESSOR_NAME, _WAITING_NAME = "successor.json", "launcher.waits"


class Result(msgspec.Struct, frozen=True):
    """How a job ended. ``launcher``: the node that ended it; empty where that is not known."""

    verdict: str
    exit_code: int
    reason: str
    launcher: str
    term: int


class _Successor(msgspec.Struct, frozen=True):
    """A launcher that took over on another node than the one before."""

    term: int
    node: str


_Kind = TypeVar("_Kind", Result, _Successor)


def record(run_dir: Path, result: Result) -> None:
    """Write the result; a full disk changes nothing about the verdict."""
    _write(run_dir / RESULT_NAME, result)


def recorded(run_dir: Path) -> Result | None:
    """The result, once there is one."""
    return _read(run_dir / RESULT_NAME, Result)


def announce(run_dir: Path, term: int, node: str) -> None:
    """Say that this launcher has taken over on another node; not one that came up so late that the
    next one has said so already.
    """
    if successor(run_dir, term):
        return
    _write(run_dir / _SUCCESSOR_NAME, _Successor(term, node))


def successor(run_dir: Path, term: int) -> str:
    """The node of a launcher on another node with a term above ``term``; empty if none has."""
    found = _read(run_dir / _SUCCESSOR_NAME, _Successor)
    return found.node if found is not None and found.term > term else ""


def wait_for_verdict(run_dir: Path) -> None:
    """Say that a launcher which leads no more lives, and will end the batch script."""
    with contextlib.suppress(OSError):
        (run_dir / _WAITING_NAME).touch(mode=0o600)


def somebody_waits(run_dir: Path) -> bool:
    """Whether there is such a launcher."""
    return (run_dir / _WAITING_NAME).exists()


def _write(path: Path, what: Result | _Successor) -> None:
    fresh = path.with_name(f".{path.name}")
    with contextlib.suppress(OSError):
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(what) + b"\n")
        fresh.rename(path)


def _read(path: Path, kind: type[_Kind]) -> _Kind | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None
