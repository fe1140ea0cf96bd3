"""How Slurm is asked here: by its commands where they are, else by pyslurm."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec

from deadpool_slurm.client import CALL_TIMEOUT_S, SlurmClient, SlurmError
from deadpool_slurm.commands import PROGRAMS, CommandLineClient
from deadpool_slurm.pyslurm_client import PYTHON_VARIABLE, PyslurmClient
from deadpool_slurm.ways import PYSLURM, VARIABLE, Choice, choose


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
