"""Runs admission checks on the node where it is called.

The preflight does so on every node, and ``agent/admission.py`` before a spare takes ranks. What the
commands print goes to a log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from deadpool_runtime.protocol import AdmissionCheck

#: How often is looked whether a command has ended; there is no reason to look more often.
_LOOK_S = 0.02
#: The longest part of a command's last words that goes into a reason.
_MOST_WORDS = 200


def log_name(node: str) -> str:
    """Name of the file in the run directory's ``logs`` with what the commands print."""
    return f"admission-{node}.log"


async def reason_to_refuse(
    checks: Sequence[AdmissionCheck],
    node: str,
    log_path: Path,
    started: Callable[[int | None], None] = lambda _pid: None,
) -> str:
    """Why the node fails the first check that it fails; empty if it passes all.

    ``started`` is told the process id of each command, and None when its exit status was taken.
    Cancelled, it ends the command.
    """
    for check in checks:
        problem = await _run(check, node, log_path, started)
        if problem:
            return f"fails the admission check '{check.command}': {problem}"
    return ""


async def _run(
    check: AdmissionCheck, node: str, log_path: Path, started: Callable[[int | None], None]
) -> str:
    try:
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            begins = os.fstat(log).st_size
            process = subprocess.Popen(
                ["/bin/sh", "-c", check.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "DEADPOOL_NODE": node},
                start_new_session=True,
            )
        finally:
            os.close(log)
    except OSError as error:
        return f"it cannot be run ({error})"
    started(process.pid)
    try:
        async with asyncio.timeout(check.timeout_s):
            while not _has_ended(process.pid):
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        return f"no end within {check.timeout_s:g} s"
    finally:
        # While its exit status is not taken, no other process can have its number.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        started(None)
    if code == 0:
        return ""
    words = _last_words(log_path, begins)
    how = f"exit code {code}" if code > 0 else f"ended by signal {-code}"
    return f"{how}{f': {words}' if words else ''}"


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _last_words(log_path: Path, begins: int) -> str:
    """The last line that the command printed."""
    try:
        with log_path.open("rb") as log:
            log.seek(max(begins, log.seek(0, os.SEEK_END) - 4096))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip()[:_MOST_WORDS] for line in reversed(lines) if line.strip()), "")
