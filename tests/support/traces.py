"""What a test may leave on the machine: nothing. Compares what is there before and after it."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

#: Beginnings of names that this project, Python, Slurm or munge give to files in shared places.
OURS = ("deadpool", "torch_", "torchelastic", "tmp", "pymp", "slurm", "munge", "sem.", "psm_")
PLACES = (Path("/dev/shm"), Path("/tmp"))


def traces(processes: bool) -> set[str]:
    """Files in shared places that could be ours and, if asked, descendants of this process."""
    found = {
        str(path)
        for place in PLACES
        if place.is_dir()
        for path in place.iterdir()
        if path.name.startswith(OURS)
    }
    for child in psutil.Process().children(recursive=True) if processes else ():
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                found.add(f"process {child.pid} {' '.join(child.cmdline())[:100]}")
        except psutil.Error:
            continue
    return found


def new_traces(before: set[str], processes: bool, patience_s: float) -> set[str]:
    """What is there now and was not before, once it has had time to go away."""
    deadline = time.monotonic() + patience_s
    while new := traces(processes) - before:
        if time.monotonic() > deadline:
            return new
        time.sleep(0.1)
    return set()
