"""How much more host memory copies may take on this node. Nothing here imports torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

#: A limit of cgroup v1 above this means that there is none.
_UNLIMITED_NBYTES = 1 << 60


def free_memory(
    shm: str = "/dev/shm", proc: str = "/proc", cgroups: str = "/sys/fs/cgroup"
) -> tuple[int, str]:
    """The least of what ``shm`` has free, what the job's memory limit leaves and what the machine
    has left, in bytes, and which of them that is, in words.

    The file system's own limit may be larger than the memory of the machine, so both count.
    """
    usage = os.statvfs(shm)
    limits = [(usage.f_bavail * usage.f_frsize, f"what is free in {shm}")]
    limits += _cgroup_limits(Path(proc), Path(cgroups))
    limits += _machine(Path(proc))
    nbytes, words = min(limits)
    return max(nbytes, 0), words


def _machine(proc: Path) -> Iterator[tuple[int, str]]:
    for line in _read(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) << 10, "the memory that this machine has available"


def _cgroup_limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, str]]:
    """What each cgroup from this process's own up to the root leaves."""
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _walk(cgroups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _walk(
                cgroups / "memory",
                path,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )


def _walk(
    root: Path, path: str, limit_name: str, usage_name: str, cache_name: str
) -> Iterator[tuple[int, str]]:
    at = root / path.strip("/")
    while True:
        limit, usage = _read(at / limit_name).strip(), _read(at / usage_name).strip()
        if limit.isdigit() and usage.isdigit() and int(limit) < _UNLIMITED_NBYTES:
            # Cached files that nobody used lately are dropped by the kernel when room is needed.
            cache = _field(_read(at / "memory.stat"), cache_name)
            left = int(limit) - int(usage) + cache
            yield left, f"what the memory limit of the job leaves ({at / limit_name})"
        if at == root:
            return
        at = at.parent


def _field(stat: str, name: str) -> int:
    for line in stat.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
