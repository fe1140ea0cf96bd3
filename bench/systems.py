"""The systems that ``recovery.py`` compares: how each starts the same training script on the mini
cluster, and where it says that it noticed something.

Three nodes train and one is spare in all of them. Each is set up as its own pages say, with short
time-outs: whoever waits for a silent node waits about three seconds where that can be set.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_cluster import MiniCluster
from struck import slurmctld_signs, torchrun_signs
from training_job import TrainingJob, submit

SCRIPT = Path(__file__).parent / "scripts" / "train_struck.py"
#: Ranks, each on a node of its own, and nodes that wait.
WORLD, SPARES = 3, 1
#: Seconds that Slurm waits for a silent node, and that a requeued job waits (default: 300, 120).
SLURMD_TIMEOUT_S, REQUEUE_WAIT_S = 5, 10
#: Heartbeats, or keep-alives, of a second that may be missed.
MISSED = 3
#: Of a collective, for systems that have no other way to learn of a node that fell silent.
COLLECTIVE_TIMEOUT_S = 30


@dataclass
class Started:
    """A job under one of the systems."""

    #: Whether a fault may come, as far as the system is concerned.
    ready: Callable[[], bool]
    #: When the system noticed something, faults or not.
    signs: Callable[[], list[float]]
    #: What else it tells of the fault, once training goes on.
    told: Callable[[], dict[str, Any]]
    #: Everything that helps to understand why it did not.
    said: Callable[[], str]


@dataclass(frozen=True)
class System:
    """A way to live with faults, as it is set up here."""

    name: str
    #: For readers: the settings that decide how long things take.
    settings: str
    start: Callable[[MiniCluster, Path, Sequence[str]], Started]
    #: Whether Slurm has to give up silent nodes quickly.
    slurm_decides: bool = False


def _deadpool(spare_start: str) -> Callable[[MiniCluster, Path, Sequence[str]], Started]:
    def start(cluster: MiniCluster, folder: Path, arguments: Sequence[str]) -> Started:
        job = submit(
            cluster,
            nodes=WORLD + SPARES,
            launch=[
                f"--spares={SPARES}",
                f"--spare-start={spare_start}",
                f"--heartbeat-timeout={MISSED}s",
            ],
            script=SCRIPT,
            script_args=arguments,
        )

        def ready() -> bool:
            # The spare's parked process must be warm, as it is in any job older than a few seconds.
            if spare_start != "at-start":
                return True
            (spare,) = job.records("job")[0]["spares"]
            return bool(job.records("event", name="AgentWarm", node=spare))

        return Started(ready, lambda: _signs(job), lambda: _told(job), lambda: job.everything())

    return start


def _signs(job: TrainingJob) -> list[float]:
    return [record["at"] for record in job.records("incident")]


def _told(job: TrainingJob) -> dict[str, Any]:
    (closed,) = job.incidents()
    return {
        "rung": closed["rung"],
        "phases_at": {record["phase"]: record["at"] for record in job.records("incident")},
    }


def elastic_command(
    program: Sequence[str], arguments: Sequence[str], more: Sequence[str] = ()
) -> list[str]:
    """torchrun, or what takes its options, on each node; an agent that finds all places taken waits
    for one. HOST stands for the job's first node."""
    return [
        *program,
        *(f"--nnodes={WORLD}", "--nproc-per-node=1", "--max-restarts=100"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=HOST:29400", "--rdzv-id=struck"),
        f"--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt={MISSED},last_call_timeout=1,"
        "read_timeout=600",
        *("--monitor-interval=0.1", *more, str(SCRIPT), *arguments),
        f"--timeout={COLLECTIVE_TIMEOUT_S}",
    ]


def _elastic(
    program: Sequence[str], more: Sequence[str] = ()
) -> Callable[[MiniCluster, Path, Sequence[str]], Started]:
    def start(cluster: MiniCluster, folder: Path, arguments: Sequence[str]) -> Started:
        command = shlex.join(elastic_command(program, arguments, more))
        text = (
            f"#!/bin/bash\n#SBATCH --no-kill --output={folder}/batch.out\n"
            "export LOGLEVEL=INFO\n"
            # Otherwise a new agent waits for ever in a later round: it looks there for an address
            # that rank 0 only publishes in its own first round (torch 2.13).
            "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n"
            "srun --no-kill --kill-on-bad-exit=0 --ntasks-per-node=1 "
            f"--output={folder}/agent-%N.log {command.replace('HOST', '$(hostname)')}\n"
        )
        cluster.submit(text, nodes=WORLD + SPARES, no_kill=False)

        def logs() -> str:
            paths = sorted(folder.glob("agent-*.log"))
            return "\n".join(path.read_text(errors="replace") for path in paths)

        return Started(
            lambda: True,
            lambda: torchrun_signs(logs(), time.localtime().tm_year),
            lambda: {},
            logs,
        )

    return start


def requeue_script(arguments: Sequence[str], folder: Path) -> str:
    """A batch script that starts the ranks with srun and, if they fail, goes back to the queue."""
    command = shlex.join(
        [sys.executable, str(SCRIPT), *arguments, f"--timeout={COLLECTIVE_TIMEOUT_S}"]
    )
    rank = f"RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS exec {command}"
    return (
        f"#!/bin/bash\n#SBATCH --requeue --open-mode=append --output={folder}/batch.out\n"
        "export MASTER_ADDR=$(hostname) MASTER_PORT=29500\n"
        "srun --kill-on-bad-exit=1 --ntasks-per-node=1 --open-mode=append "
        f"--output={folder}/srun.out bash -c {shlex.quote(rank)} && exit 0\n"
        f"date +%s.%N >> {folder}/ended\n"
        "scontrol requeue $SLURM_JOB_ID\n"
    )


def _requeue(cluster: MiniCluster, folder: Path, arguments: Sequence[str]) -> Started:
    cluster.submit(requeue_script(arguments, folder), nodes=WORLD, no_kill=False)
    ended = folder / "ended"

    def signs() -> list[float]:
        own = [float(at) for at in ended.read_text().split()] if ended.exists() else []
        return [*own, *slurmctld_signs((cluster.logs / "slurmctld.log").read_text())]

    def said() -> str:
        return "\n".join(p.read_text(errors="replace") for p in folder.glob("*.out"))

    return Started(lambda: True, signs, lambda: {}, said)


AT_START = System(
    "DEADPOOL, spare at-start", "defaults: heartbeat time-out 3 s", _deadpool("at-start")
)
ON_FAILURE = System(
    "DEADPOOL, spare on-failure", "defaults: heartbeat time-out 3 s", _deadpool("on-failure")
)
TORCHRUN = System(
    "torchrun, standby agent",
    "c10d rendezvous; keep_alive_interval=1, keep_alive_max_attempt=3 (defaults 5 and 3), "
    "last_call_timeout=1 (30), monitor interval 0.1 s; TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, "
    "without which a standby agent of torch 2.13 never gets in",
    _elastic([sys.executable, "-m", "torch.distributed.run"]),
)
REQUEUE = System(
    "sbatch --requeue",
    f"SlurmdTimeout={SLURMD_TIMEOUT_S} (default 300), cred_expire={REQUEUE_WAIT_S} (default 120, "
    "the wait of a requeued job); a fourth node is idle, so nothing queues",
    _requeue,
    slurm_decides=True,
)


def resiliency(python: str) -> System:
    """NVIDIA's resiliency extension, its launcher in the place of torchrun, for the interpreter of
    an environment that has it."""
    return System(
        "NVRx ft_launcher, standby agent",
        "as torchrun; --ft-restart-policy=any-failed (default), no heartbeats from the script",
        _elastic(
            [python, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher"],
            ["--ignore-missing-fault-tol-cfg"],
        ),
    )
