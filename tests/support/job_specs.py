"""What an agent is told of a job that is never run, for tests of connections."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from deadpool_runtime import protocol

_SPEC = protocol.JobSpec(
    job_id="1",
    run_dir="/nowhere",
    script="none.py",
    script_args=[],
    world_size=1,
    nproc_per_node=1,
    env={},
    heartbeat_s=0.1,
    frozen_after_s=1.0,
    confirm_timeout_s=8.0,
    stop_grace_s=1.0,
    record_final_state=False,
    fault_steps={},
)


def job_spec(**changes: Any) -> protocol.JobSpec:
    """A job of one rank, unless told otherwise."""
    return replace(_SPEC, **changes)
