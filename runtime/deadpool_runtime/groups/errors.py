"""The errors of this package; everything else that is raised comes from torch."""

from __future__ import annotations


class UnsupportedLayout(ValueError):
    """The program uses something that DEADPOOL cannot recover in place, so it is refused.

    Raised while the program sets itself up, never in the middle of training.
    """


class ShimUnavailable(RuntimeError):
    """The native shim cannot be built on this machine; the message says what is missing."""


class GroupsAborted(RuntimeError):
    """The process's groups were aborted, so nothing can be built on them until a rebuild."""


class RebuildFailed(RuntimeError):
    """A group could not be connected again; a rebuild for a later epoch may still succeed."""
