"""Errors that end ``deadpool-launch``; each carries one sentence for the user and an exit code.

::

    DeadpoolError
    ├── UsageError            a command line, file or value is wrong                      (2)
    ├── UnsuitableError       the allocation or site cannot keep the job alive            (10)
    │   └── NotInAllocation   there is no allocation at all                               (10)
    └── StartFailed           an agent or a rank did not come up                          (11)

After all but the last nothing was started, and only after ``StartFailed`` is it any use to run the
same command again. Defects of DEADPOOL itself are not in this tree: they are ordinary exceptions,
and ``cli.run`` turns them into exit code 70.
"""

from __future__ import annotations

from typing import ClassVar

from deadpool_launch.exits import ExitCode


class DeadpoolError(Exception):
    """Base of the tree; ``str(error)`` is the sentence the user sees."""

    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL


class UsageError(DeadpoolError):
    """A command line, file or value is wrong; the sentence says what would be right."""

    exit_code = ExitCode.USAGE


class UnsuitableError(DeadpoolError):
    """The allocation or the site cannot keep the job alive through a fault."""

    exit_code = ExitCode.UNSUITABLE


class NotInAllocation(UnsuitableError):
    """The command was run outside any allocation."""


class StartFailed(DeadpoolError):
    """An agent or a rank did not come up."""

    exit_code = ExitCode.START_FAILED
