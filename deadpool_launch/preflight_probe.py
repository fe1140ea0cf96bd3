"""Runs on every node before training and prints one line about it: ``python -m
deadpool_launch.preflight_probe``.

It looks at what the ranks will need (Python, packages, the directories that all nodes share, shared
memory, clock) without importing torch, so that it ends in well under a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from deadpool_launch.policy.admission import log_name, reason_to_refuse
from deadpool_launch.version import deadpool_version, installed_version
from deadpool_runtime.protocol import AdmissionCheck

#: Marks the probe's line among what else a node may print.
PREFIX = "deadpool-probe "
#: Said of a directory in which the launcher's file is not seen.
NOT_SHARED = "is not the one that the launcher's node has"
#: How long a new file may take to be seen on another node (network file systems cache), in seconds.
_TOKEN_TIMEOUT_S = 5.0


def probe(
    run_dir: Path,
    token: str,
    admission: Sequence[AdmissionCheck] = (),
    checkpoint_dir: Path | None = None,
) -> dict[str, Any]:
    """The facts about this node; values are plain JSON. ``checkpoint_dir``: looked at if there is
    one.
    """
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    return {
        "node": node,
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "deadpool": deadpool_version(),
        "torch": installed_version("torch"),
        "run_dir": _problem(run_dir, token),
        "checkpoint_dir": _problem(checkpoint_dir, token) if checkpoint_dir is not None else "",
        "admission": _refusal(run_dir, node, admission) if admission else "",
        "shm_free_nbytes": _shm_free(),
        "cpus": len(os.sched_getaffinity(0)),
        "clock": time.time(),
    }


def token_path(directory: Path, token: str) -> Path:
    """The file by which the nodes can tell that they see the launcher's directory; the token stands
    in it too.
    """
    return directory / f".preflight-{token}"


def _problem(directory: Path, token: str) -> str:
    """Empty if the directory is the launcher's and can be written."""
    deadline = time.monotonic() + _TOKEN_TIMEOUT_S
    while not _has_token(directory, token):
        if time.monotonic() > deadline:
            return NOT_SHARED
        time.sleep(0.1)
    mine = directory / f".preflight-{token}-{socket.gethostname()}-{os.getpid()}"
    try:
        mine.write_text("")
        mine.unlink()
    except OSError as error:
        return f"cannot be written: {error.strerror}"
    return ""


def _has_token(directory: Path, token: str) -> bool:
    try:
        return token_path(directory, token).read_text() == token
    except OSError:
        return False


def _refusal(run_dir: Path, node: str, checks: Sequence[AdmissionCheck]) -> str:
    log_path = run_dir / "logs" / log_name(node)
    with contextlib.suppress(OSError):
        log_path.parent.mkdir(mode=0o700, exist_ok=True)
    return asyncio.run(reason_to_refuse(checks, node, log_path))


def _shm_free() -> int:
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return 0


def main() -> None:
    """Print the line. Arguments: run directory, token, the admission checks as JSON, and the
    directory for durable checkpoints if there is one.
    """
    run_dir, token, checks, *rest = sys.argv[1:]
    admission = msgspec.json.decode(checks, type=list[AdmissionCheck])
    checkpoint_dir = Path(rest[0]) if rest else None
    print(PREFIX + json.dumps(probe(Path(run_dir), token, admission, checkpoint_dir)), flush=True)


if __name__ == "__main__":
    main()
