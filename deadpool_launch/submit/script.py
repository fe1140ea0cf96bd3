"""The text of a batch script, from what a job asks for. Pure."""

from __future__ import annotations

import shlex
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchScript:
    """Everything that stands in a script."""

    #: Options of ``sbatch``, each as one word.
    options: tuple[str, ...]
    #: What the script is for, for its reader: one line each.
    comment: tuple[str, ...]
    #: Lines of shell before the launcher.
    setup: tuple[str, ...]
    #: The launcher's command line.
    command: tuple[str, ...]

    def text(self) -> str:
        """The whole file."""
        lines = ["#!/bin/bash"]
        lines += [f"#SBATCH {_quoted(option)}" for option in self.options]
        lines += ["", *(f"# {line}" for line in self.comment)]
        lines += self.setup
        lines.append(f"exec {shlex.join(self.command)}")
        return "\n".join(lines) + "\n"


def _quoted(option: str) -> str:
    """The option with its value as ``sbatch`` reads it: quotes and ``#`` mean what they do to a
    shell.
    """
    name, equals, value = option.partition("=")
    return f"{name}={shlex.quote(value)}" if equals else shlex.quote(name)


def time_limit(seconds: float) -> str:
    """``1-06:30:00``, as Slurm writes times."""
    days, rest = divmod(int(seconds), 86400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock
