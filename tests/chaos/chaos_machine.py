"""What faults need of the machine: mounts of our own, small file systems, limits of memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mini_cluster_nodes import wait_until

_CLONE_NEWNS = 0x00020000
_CGROUPS = Path("/sys/fs/cgroup")


def end_in_order() -> None:
    """Let SIGTERM and SIGHUP end this process like an exception: everything is tidied up."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda got, _: sys.exit(128 + got))


def own_mounts() -> None:
    """Enter a mount namespace: what is mounted from here on is gone with this process and its
    children, however they end. Needs root.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "cannot make a mount namespace; are you root?")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


@contextlib.contextmanager
def small_disk(nbytes: int) -> Iterator[Path]:
    """The folder of a file system of this size."""
    folder = Path(tempfile.mkdtemp(prefix="deadpool-chaos-"))
    options = f"size={nbytes},mode=0755"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "deadpool-chaos", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
        folder.rmdir()


def fill(folder: Path) -> Path:
    """Take all room that is left in a file system; returns the file that has it."""
    path = folder / "filler"
    for nbytes in (1 << 20, 4096, 1):
        with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * nbytes)
    return path


@contextlib.contextmanager
def memory_limit(pid: int, more_nbytes: int) -> Iterator[None]:
    """Let a process take only so much more memory: beyond that the kernel kills it.

    Made by a control group below our own; OSError where that cannot be had.
    """
    own, limit = _memory_group()
    group = own / f"deadpool-chaos-{os.getpid()}"
    group.mkdir()
    try:
        # What the process has by now stays with the group that it leaves.
        (group / limit).write_text(str(more_nbytes))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for left in (group / "cgroup.procs").read_text().split():
            (own / "cgroup.procs").write_text(left)
        wait_until(lambda: _removed(group), bool, what=f"{group} is removed", timeout_s=30)


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:
        return False
    return True


def _memory_group() -> tuple[Path, str]:
    """Our own control group for memory, and the name of its file with the limit."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _CGROUPS / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
        if number == "0" and (_CGROUPS / "cgroup.controllers").exists():
            return _CGROUPS / path.lstrip("/"), "memory.max"
    raise OSError("no control group for memory")
