"""Figures on disk: what was measured, on what, and by which command."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: Where the figures are that the pages quote.
RESULTS = ROOT / "bench" / "results"


def conditions() -> dict[str, Any]:
    """What figures of this machine depend on."""
    return {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": version("torch"),
        "deadpool": _version("deadpool-launch"),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def keep(
    path: Path, command: str, results: Mapping[str, Any], *, beside: bool = True, **more: Any
) -> None:
    """Write results with the conditions of now; ``beside``: other results of the file stay there,
    each under its name. ``more`` stands beside the conditions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = read(path)["results"] if beside and path.exists() else {}
    record = {"command": command, **conditions(), **more, "results": {**before, **results}}
    path.write_text(json.dumps(record, indent=1) + "\n")


def read(path: Path) -> dict[str, Any]:
    """What ``keep`` wrote."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found
