"""Runs on every node before training and prints one line about it: ``python -m
deadpool_launch.preflight.probe``.

It looks at what the ranks will need (Python, packages, the directories that all nodes share,
memory, clock) without importing torch, so that it ends in well under a second unless it is to call
other nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import re
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from deadpool_launch import channel
from deadpool_launch.policy.admission import log_name, reason_to_refuse
from deadpool_launch.preflight import lookups
from deadpool_launch.preflight.calls import call
from deadpool_launch.preflight.facts import NOT_SHARED, PREFIX, ProbeTask
from deadpool_launch.version import deadpool_version, installed_version
from deadpool_runtime.protocol import AdmissionCheck
from deadpool_runtime.replication.memory import free_memory

#: How long a new file may take to be seen on another node (network file systems cache), in seconds.
_TOKEN_TIMEOUT_S = 5.0
#: Packages that bring NCCL, the newest first.
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")


def probe(task: ProbeTask) -> dict[str, Any]:
    """The facts about this node; values are plain JSON."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    run_dir = Path(task.run_dir)
    checkpoint_dir = Path(task.checkpoint_dir) if task.checkpoint_dir else None
    memory_nbytes, memory_limit = _memory()
    facts: dict[str, Any] = {
        "node": node,
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "deadpool": deadpool_version(),
        "torch": installed_version("torch"),
        "mpi4py": installed_version("mpi4py"),
        "nccl": next(filter(None, map(installed_version, _NCCL)), None),
        "gpus": _gpus(),
        "run_dir": _problem(run_dir, task.token),
        "checkpoint_dir": _problem(checkpoint_dir, task.token) if checkpoint_dir else "",
        "admission": _refusal(run_dir, node, task.admission) if task.admission else "",
        "shm_free_nbytes": _shm_free(),
        "memory_nbytes": memory_nbytes,
        "memory_limit": memory_limit,
        "cpus": len(os.sched_getaffinity(0)),
    }
    if task.launcher_host:
        facts["names"] = msgspec.to_builtins(lookups.look_up(task.launcher_host))
    if task.launcher is not None and not facts["run_dir"]:
        secret = channel.read_secret(run_dir)
        facts["calls"] = asyncio.run(call(node, task.launcher, secret))
    # Last, as the launcher compares it with the time at which it has the answer.
    return {**facts, "clock": time.time()}


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


def _memory() -> tuple[int | None, str]:
    """What copies of the state may take, and what it is that limits them."""
    try:
        return free_memory()
    except OSError as error:
        return None, str(error)


def _gpus() -> int:
    """NVIDIA's, by their devices: no library is loaded for it."""
    try:
        names = os.listdir("/dev")
    except OSError:
        return 0
    return sum(re.fullmatch(r"nvidia\d+", name) is not None for name in names)


def main() -> None:
    """Print the line. The argument is the ``ProbeTask`` as JSON."""
    task = msgspec.json.decode(sys.argv[1], type=ProbeTask)
    print(PREFIX + json.dumps(probe(task)), flush=True)


if __name__ == "__main__":
    main()
