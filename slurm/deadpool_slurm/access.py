"""How Slurm is asked here: by its commands where they are, else by pyslurm."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from deadpool_slurm.client import CALL_TIMEOUT_S, SlurmClient, SlurmError
from deadpool_slurm.commands import PROGRAMS, CommandLineClient
from deadpool_slurm.pyslurm_client import PYTHON_VARIABLE, PyslurmClient

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


def find(
    variables: Mapping[str, str] | None = None, *, timeout_s: float = CALL_TIMEOUT_S
) -> tuple[SlurmClient, Choice]:
    """The client for this environment, and how it came to be this one. Raises ``BadAccess``."""
    given = os.environ if variables is None else variables
    path = given.get("PATH")
    absent = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    pyslurm = PyslurmClient(given, timeout_s=timeout_s)

    def probe() -> str:
        if not given.get(PYTHON_VARIABLE) and find_spec("pyslurm") is None:
            return "it is not installed"
        try:
            pyslurm.version()
        except SlurmError as error:
            return str(error).removeprefix("pyslurm: ")
        return ""

    choice = choose(given.get(VARIABLE), absent, probe)
    if choice.way == PYSLURM:
        return pyslurm, choice
    return CommandLineClient(given, timeout_s=timeout_s), choice


def client(
    variables: Mapping[str, str] | None = None, *, timeout_s: float = CALL_TIMEOUT_S
) -> SlurmClient:
    """The client alone. Raises ``BadAccess``."""
    return find(variables, timeout_s=timeout_s)[0]
