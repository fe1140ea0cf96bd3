"""Runs the program that has an answer of Slurm's, within a deadline."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from deadpool_slurm.client import SlurmError


def call(
    argv: Sequence[str], variables: Mapping[str, str], timeout_s: float, name: str
) -> subprocess.CompletedProcess[str]:
    """The program's end, with what it printed. ``name``: what it is called in errors."""
    try:
        return subprocess.run(
            argv,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{name} did not answer within {timeout_s:g} s") from None
    except OSError as error:
        raise SlurmError(f"{name} cannot be run: {error.strerror}") from error
