"""Tries an MPI world over the nodes, as the movers would be one."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from deadpool_launch.errors import StartFailed
from deadpool_launch.movers import START_TIMEOUT_S, MoverStarter
from deadpool_launch.preflight.facts import MpiWorld
from deadpool_runtime.replication.mover_messages import TRIAL_SAYS

_NAME = "deadpool-preflight-mpi"


async def try_world(
    starter: MoverStarter, kind: str, nodes: Sequence[str], run_dir: Path
) -> MpiWorld:
    """Start an MPI process on each node as the movers are started, and have them meet."""
    log_path = run_dir / "mpi-world.log"
    argv = [sys.executable, "-P", "-m", "deadpool_runtime.replication.mover_trial"]
    argv.append(f"--start-timeout={START_TIMEOUT_S:g}")
    began_at = time.monotonic()
    try:
        step = await starter.start_movers(nodes, argv, _NAME, log_path)
    except StartFailed as error:
        return MpiWorld(kind, len(nodes), 0.0, "", str(error))
    late = ""
    try:
        async with asyncio.timeout(2 * START_TIMEOUT_S):
            code = await step.wait()
    except TimeoutError:
        code, late = 1, f"it did not end within {2 * START_TIMEOUT_S:g} s"
    finally:
        await step.stop(0.0)
    said = log_path.read_text(errors="replace") if log_path.exists() else ""
    told = [line.partition(TRIAL_SAYS)[2] for line in said.splitlines() if TRIAL_SAYS in line]
    if code == 0 and told:
        found = json.loads(told[0])
        return MpiWorld(kind, found["nodes"], time.monotonic() - began_at, str(found["library"]))
    errors = [line.removeprefix("mover: ") for line in said.splitlines() if line.strip()]
    why = late or next((line for line in errors if "mover" in line or "rror" in line), "")
    why = why or step.last_words() or f"exit code {code}"
    return MpiWorld(kind, len(nodes), 0.0, "", why)
