"""By which of the ways Slurm is asked, and why. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deadpool_slurm.client import SlurmError

#: ``commands`` or ``pyslurm``; without it the choice is made here.
VARIABLE = "DEADPOOL_SLURM_ACCESS"
COMMANDS, PYSLURM = "commands", "pyslurm"


class BadAccess(SlurmError):
    """The variable has a value that it cannot have."""


@dataclass(frozen=True, slots=True)
class Choice:
    """``missing``: why Slurm cannot be asked, neither this way nor another; empty if it can."""

    way: str
    reason: str
    missing: str = ""


def choose(asked: str | None, absent: Sequence[str], probe: Callable[[], str]) -> Choice:
    """Which way to take. ``absent``: those of Slurm's commands that are not there. ``probe``: why
    pyslurm cannot be used, empty if it can; called only where that matters.
    """
    lacking = f"{' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not on the PATH"
    if asked == COMMANDS:
        return Choice(COMMANDS, f"{VARIABLE} says so", lacking if absent else "")
    if asked == PYSLURM:
        why_not = probe()
        missing = f"pyslurm, which {VARIABLE} asks for, cannot be used ({why_not})"
        return Choice(PYSLURM, f"{VARIABLE} says so", missing if why_not else "")
    if asked:
        raise BadAccess(f"{VARIABLE}={asked}: must be {COMMANDS} or {PYSLURM}")
    if not absent:
        return Choice(COMMANDS, "they are on the PATH")
    why_not = probe()
    if not why_not:
        return Choice(PYSLURM, lacking)
    return Choice(COMMANDS, "", f"{lacking}, and pyslurm cannot be used ({why_not})")
