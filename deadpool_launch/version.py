"""Versions of DEADPOOL and of packages beside it, without importing them."""

from __future__ import annotations

from importlib import metadata

#: Name under which DEADPOOL is installed.
DISTRIBUTION = "deadpool-launch"


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or ``None``."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def deadpool_version() -> str:
    """DEADPOOL's version; ``0+source`` when it runs from a source tree without being installed."""
    return installed_version(DISTRIBUTION) or "0+source"
