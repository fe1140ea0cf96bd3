"""Takes the stacks of a rank that hangs; the rank's part is ``deadpool_runtime.stacks``.

Beside them goes what the kernel says of each thread, which is all there is to see of one that sits
in a system call or in C++ code.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from deadpool_runtime.stacks import STACK_SIGNAL, stack_path

#: How long a process has to write its stacks. What comes after waits for it, the recovery included.
STACK_S = 2.0
#: The text is complete when it has not grown for this long.
_QUIET_S = 0.1


class NoStack(Exception):
    """The text says why the process's stacks could not be had."""


async def take_stack(arena: Path, rank: int, born: int, pid: int, target: Path) -> None:
    """Have the process write its stacks, and put them into ``target``; raises ``NoStack``."""
    source = stack_path(arena, rank, born)
    try:
        before = source.stat().st_size
        os.kill(pid, STACK_SIGNAL)
    except OSError as error:
        raise NoStack(f"the process cannot be asked: {error.strerror}") from error
    try:
        size = await _written(source, before)
        text = source.read_bytes()[before:size].decode(errors="replace")
        threads = kernel_view(pid)
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(f"{text or '(no Python stack was written)'}\n{threads}\n")
    except OSError as error:
        raise NoStack(f"it cannot be written: {error}") from error
    if not text:
        raise NoStack(f"the process wrote nothing within {STACK_S:g} s")


async def _written(source: Path, before: int) -> int:
    """The size of the text once it no longer grows."""
    deadline = time.monotonic() + STACK_S
    size, since = before, time.monotonic()
    while time.monotonic() < deadline:
        await asyncio.sleep(0.02)
        now_size = source.stat().st_size
        if now_size != size:
            size, since = now_size, time.monotonic()
        elif size > before and time.monotonic() - since >= _QUIET_S:
            break
    return size


def kernel_view(pid: int) -> str:
    """A line for each thread of the process: its name, its state, and where in the kernel it is."""
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name)):
        try:
            name = (task / "comm").read_text().strip()
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it has ended
            continue
        try:
            place = (task / "wchan").read_text().strip()
        except OSError:
            place = ""
        where = f" in {place}" if place not in ("", "0") else ""
        lines.append(f"kernel thread {task.name} ({name}): state {state}{where}")
    return "\n".join(lines)
