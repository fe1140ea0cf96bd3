"""Shared memory that MPI processes left in /dev/shm because they were killed while they started.

A mover takes away the names of its library's shared memory once its world is up. One that is killed
before that leaves a file, which nobody would delete as long as the node runs.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path

from deadpool_runtime.replication.arena import SHM

#: How MPI libraries name such files: MPICH.
PREFIXES = ("mpich_shm_",)
#: A library maps its file as soon as it has made it.
UNUSED_AFTER_S = 0.1


def remove_leftovers(shm: Path = SHM) -> list[Path]:
    """Delete this user's files of MPI libraries that no process has mapped; what was deleted."""
    found = [path for path in _files(shm) if _is_old(path)]
    if not found:
        return []
    used = _mapped(f"{shm}/")
    removed = []
    for path in found:
        if str(path) not in used:
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path)
    return removed


def _files(shm: Path) -> list[Path]:
    try:
        return sorted(path for path in shm.iterdir() if path.name.startswith(PREFIXES))
    except OSError:
        return []


def _is_old(path: Path) -> bool:
    try:
        info = path.lstat()
    except OSError:
        return False
    own = stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid()
    return own and time.time() - info.st_mtime > UNUSED_AFTER_S


def _mapped(folder: str) -> set[str]:
    """The files of the folder that any process of this user has mapped."""
    used = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        # Another user's cannot be read, and a process may be gone by now.
        with contextlib.suppress(OSError):
            for line in maps.read_text(errors="replace").splitlines():
                path = line.split(maxsplit=5)[-1]
                if path.startswith(folder):
                    used.add(path)
    return used
