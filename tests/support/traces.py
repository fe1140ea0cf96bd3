"""What a test may leave on the machine: nothing. Compares what is there before and after it."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil

#: Beginnings of names that torch itself leaves in the temporary directory, without DEADPOOL too.
TORCHS_OWN = ("torchinductor_", "torchelastic_")
SHARED_MEMORY = Path("/dev/shm")


def traces(directory: Path) -> set[str]:
    """Files in the temporary directory, ours in shared memory, descendants of this process."""
    found = {str(path) for path in directory.iterdir() if not path.name.startswith(TORCHS_OWN)}
    children = living_children()
    ours = {os.getpid(), *(child.pid for child in children)}
    found |= {str(path) for path in SHARED_MEMORY.glob("*deadpool*") if not _used(path, ours)}
    for child in children:
        with contextlib.suppress(psutil.Error):
            found.add(f"process {child.pid} {' '.join(child.cmdline())[:100]}")
    return found


def living_children() -> list[psutil.Process]:
    """Descendants of this process that have not ended. A process that adopts orphans, as one does
    that has used the local site, keeps their exit status, which takes nothing of the machine."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def _used(path: Path, ours: set[int]) -> bool:
    """Whether it is an arena of a living process that is not one of ours: another job's."""
    try:
        number = (path / "lock").stat().st_ino
        locks = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return False
    held_by = [int(words[4]) for line in locks if (words := line.split())[5].endswith(f":{number}")]
    return any(pid not in ours and psutil.pid_exists(pid) for pid in held_by)


def new_traces(before: set[str], directory: Path, patience_s: float) -> set[str]:
    """What is there now and was not before, once it has had time to go away."""
    deadline = time.monotonic() + patience_s
    while new := traces(directory) - before:
        if time.monotonic() > deadline:
            return new
        time.sleep(0.1)
    return set()
