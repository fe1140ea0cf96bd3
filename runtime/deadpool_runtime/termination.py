"""SIGTERM in a rank: held, unless the script has a handler of its own.

At a job's time limit Slurm sends SIGTERM to every process of every step, and kills what is left
half a minute later. The launcher gets it too, and uses the time to bring all ranks to the end of a
step and to have a durable checkpoint of it written. So the signal ends no rank; the agent's word
does.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

#: As a shell says it.
_EXIT_CODE = 128 + signal.SIGTERM


def hold() -> None:
    """Let SIGTERM do nothing. Called once, in the main thread of the rank, before its script.

    By a handler: what the script executes has the signal's usual effect back. What it forks has it
    too (worker processes of a ``DataLoader`` are ended by it).
    """
    signal.signal(signal.SIGTERM, _held)
    # Calls of C code that it comes into go on.
    signal.siginterrupt(signal.SIGTERM, False)
    os.register_at_fork(
        before=_put_off, after_in_parent=_put_off_no_more, after_in_child=_back_to_usual
    )


def end_unless_handled() -> None:
    """The agent ends this rank: at once, as SIGTERM would, if the script has no handler for that
    signal; else the signal follows.
    """
    if signal.getsignal(signal.SIGTERM) is _held:
        os._exit(_EXIT_CODE)


def _held(_signal: int, _frame: FrameType | None) -> None:
    pass


class _Mask(threading.local):
    """Signals that the thread had blocked before it forked."""

    blocked: set[int | signal.Signals]


_mask = _Mask()


def _put_off() -> None:
    """A child that is ended at once must not take that for the signal that its parent holds."""
    _mask.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))


def _put_off_no_more() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.blocked)


def _back_to_usual() -> None:
    if signal.getsignal(signal.SIGTERM) is _held:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _put_off_no_more()
