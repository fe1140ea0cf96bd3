"""Asking Slurm which cluster this is."""

from __future__ import annotations

from deadpool_slurm import access
from deadpool_slurm.client import SlurmError

#: One who submits waits for it.
_TIMEOUT_S = 5.0


def cluster_name() -> str | None:
    """Slurm's ClusterName; ``None`` where there is no Slurm, or it does not answer."""
    try:
        return access.client(timeout_s=_TIMEOUT_S).config().get("ClusterName")
    except SlurmError:
        return None
