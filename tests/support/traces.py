"""What a test may leave on the machine: nothing. Compares what is there before and after it."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

#: Beginnings of names that torch itself leaves in the temporary directory, without DEADPOOL too.
TORCHS_OWN = ("torchinductor_", "torchelastic_")
SHARED_MEMORY = Path("/dev/shm")


def traces(directory: Path) -> set[str]:
    """Files in the temporary directory, ours in shared memory, descendants of this process."""
    found = {str(path) for path in directory.iterdir() if not path.name.startswith(TORCHS_OWN)}
    found |= {str(path) for path in SHARED_MEMORY.glob("*deadpool*")}
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                found.add(f"process {child.pid} {' '.join(child.cmdline())[:100]}")
        except psutil.Error:
            continue
    return found


def new_traces(before: set[str], directory: Path, patience_s: float) -> set[str]:
    """What is there now and was not before, once it has had time to go away."""
    deadline = time.monotonic() + patience_s
    while new := traces(directory) - before:
        if time.monotonic() > deadline:
            return new
        time.sleep(0.1)
    return set()
