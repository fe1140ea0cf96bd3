"""Where a rank is in its Python code, written by the rank itself when its agent asks.

The agent sends a signal and faulthandler answers it in C, so that a thread which holds Python's
lock or sits in a system call is no obstacle. The file is in the node's arena: a process that hangs
because of a shared disk must not be made to write there. Nothing here imports torch.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

#: A signal that neither scripts nor Slurm use: they have SIGUSR1 and SIGUSR2, and the C library
#: takes the lowest of the real-time signals.
STACK_SIGNAL = signal.SIGRTMAX - 6


def stack_path(arena: Path, rank: int, born: int) -> Path:
    """Where the process of ``rank`` that was started in epoch ``born`` writes its stacks."""
    return arena / f"stack-{rank}-{born}"


def answer_signal(path: Path) -> None:
    """From here on ``STACK_SIGNAL`` makes this process write the stacks of its threads to ``path``.

    The file has its name only once that is so; before, the signal would end the process.
    """
    unfinished = path.with_name(f"{path.name}.new")
    handle = os.open(
        unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600
    )
    faulthandler.register(STACK_SIGNAL, file=handle, all_threads=True)
    unfinished.rename(path)
