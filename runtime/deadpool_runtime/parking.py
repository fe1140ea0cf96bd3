"""What an agent and its parked process say to each other, and the process calls both need.

Apart from ``zygote`` so that the agent, which never imports torch, can use it.
"""

from __future__ import annotations

import ctypes
import os
import signal

import msgspec

PR_SET_PDEATHSIG = 1
PR_SET_TIMERSLACK = 29
PR_SET_CHILD_SUBREAPER = 36
#: Ends a replicator in order. Not SIGTERM, which Slurm sends to every process of a step at the time
#: limit, while replicas are still to be made.
END_SIGNAL = signal.SIGRTMAX - 7
#: Largest request; a request is one packet on a SOCK_SEQPACKET pair.
MAX_REQUEST_NBYTES = 128 << 10


class ForkRequest(msgspec.Struct, frozen=True, tag=True):
    """Agent to parked process, with the rank's end of its socket pair attached.

    ``arena``: the directory of the node's arena, where the rank keeps the copies of its state.
    """

    rank: int
    local_rank: int
    born: int
    host: str
    arena: str
    run_dir: str
    log_path: str
    script: str
    script_args: list[str]
    world_size: int
    nproc_per_node: int
    node_index: int
    job_id: str
    env: dict[str, str]
    record_final_state: bool
    fault_step: int | None
    confirm_timeout_s: float
    agent_pid: int
    checkpoint_dir: str = ""
    checkpoint_every: int = 0
    replication_interval: int = 1


class Warm(msgspec.Struct, frozen=True, tag=True):
    """Parked process to agent: torch is imported; it took ``warm_s`` seconds."""

    warm_s: float


class Forked(msgspec.Struct, frozen=True, tag=True):
    """Parked process to agent: the rank's process exists."""

    rank: int
    born: int
    pid: int


def prctl(option: int, value: int) -> None:
    """prctl(2) with one argument; raises ``OSError``."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl({option}): {os.strerror(errno)}")


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL this process when ``parent_pid``, its parent, ends; at once if that has happened
    already.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
