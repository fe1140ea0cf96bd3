"""A training job under ``deadpool-launch`` on the mini cluster, as tests handle it: submit, strike,
wait, compare.
"""

from __future__ import annotations

import itertools
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mini_cluster import MiniCluster
from mini_cluster_nodes import wait_until

from deadpool_launch import journal

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_small.py"
#: Generous: a deadline for things that take a second on a free machine.
LONG_S = 240.0
#: Agents may take this long to start; what a test gives itself comes later and wins.
PATIENCE = "--agent-start-timeout=240"

_numbers = itertools.count(1)


@dataclass
class TrainingJob:
    """One submitted job and what its journal tells."""

    cluster: MiniCluster
    job_id: int
    run_dir: Path
    #: When ``strike`` was last called, on the clock of the journal.
    struck_at: float = 0.0
    _seen: list[dict[str, Any]] = field(default_factory=list)

    def records(self, kind: str | None = None, **fields: Any) -> list[dict[str, Any]]:
        """The journal so far, restricted to a kind and to given values."""
        return [
            record
            for record in journal.read(self.run_dir)
            if kind in (None, record["kind"])
            and all(record.get(name) == value for name, value in fields.items())
        ]

    def said(self) -> str:
        """What the launcher told the user."""
        return "\n".join(record["text"] for record in self.records("say"))

    def output(self) -> str:
        """Standard output and error of the batch script."""
        path = self.run_dir.parent / f"{self.run_dir.name}.out"
        return path.read_text() if path.exists() else ""

    def everything(self) -> str:
        """All that helps to understand a failed test."""
        parts = [f"--- output\n{self.output()}", f"--- said\n{self.said()}"]
        for path in sorted((self.run_dir / "logs").glob("*.log")):
            parts.append(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}")
        return "\n".join(parts)

    def wait(self, what: str, holds: Callable[[], Any], timeout_s: float = LONG_S) -> Any:
        """Wait until ``holds`` is true; fails with everything the job said."""

        def probe() -> Any:
            if self.records("end"):
                return holds() or "ended"
            return holds()

        try:
            found = wait_until(probe, bool, what=what, timeout_s=timeout_s)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.everything()}") from error
        assert found != "ended", f"the job ended before {what}\n{self.everything()}"
        return found

    def wait_held(self, rank: int, step: int) -> None:
        """Wait until the rank stands still inside the step (see ``--hold`` of the script)."""
        path = self.run_dir / f"hold-{rank}-{step}"
        self.wait(f"rank {rank} is in step {step}", path.exists)

    def release(self, rank: int, step: int) -> None:
        """Let a process that stands still in a step go on."""
        (self.run_dir / f"release-{rank}-{step}").touch()

    def wait_step(self, step: int) -> None:
        """Wait until some rank has completed the step."""
        self.wait(f"step {step}", lambda: self.records("step", step=step))

    def node_of(self, rank: int) -> str:
        """The node on which the rank's newest process runs."""
        return str(self.records("rank", rank=rank)[-1]["node"])

    def rank_process(self, rank: int) -> int:
        """The rank's process id as the host sees it."""
        record = self.records("rank", rank=rank)[-1]
        return pid_on_host(self.cluster, record["node"], record["pid"])

    def launcher_process(self) -> int:
        """The process id of the newest launcher, as the host sees it."""
        record = [*self.records("job"), *self.records("launcher")][-1]
        host = self.cluster.job_info(self.job_id).batch_host
        return pid_on_host(self.cluster, host, record["pid"])

    def strike(self, fault: str, rank: int) -> str:
        """Bring a fault about at the rank or its node; returns the node."""
        node = self.node_of(rank)
        pid = self.rank_process(rank) if fault in ("kill", "freeze") else 0
        self.struck_at = time.time()
        bring_about(self.cluster, fault, node, pid)
        return node

    def wait_end(self, timeout_s: float = LONG_S) -> dict[str, Any]:
        """Wait for the verdict; returns the journal's last record."""
        self.cluster.wait_job(self.job_id, timeout_s, accept_completing=True)
        ends = self.records("end")
        assert ends, f"the launcher left no verdict\n{self.everything()}"
        return ends[0]

    def final_state(self) -> dict[int, dict[str, str]]:
        """Digests of every rank's final state, by part."""
        return {record["rank"]: record["parts"] for record in self.records("final")}

    def incidents(self) -> list[dict[str, Any]]:
        """The closing records of all incidents."""
        return self.records("incident", phase="closed")

    def process_ids(self) -> dict[int, list[tuple[str, int]]]:
        """All processes that each rank has had, as (node, pid)."""
        found: dict[int, list[tuple[str, int]]] = {}
        for record in self.records("rank"):
            found.setdefault(record["rank"], []).append((record["node"], record["pid"]))
        return found

    def phases(self, number: int = 1) -> dict[str, float]:
        """Seconds from the strike to the last time each phase of an incident was reached."""
        return {
            record["phase"]: round(record["at"] - self.struck_at, 3)
            for record in self.records("incident", number=number)
        }


def pid_on_host(cluster: MiniCluster, node: str, pid_in_node: int) -> int:
    """The host's number of a process that knows itself by another one."""
    for process in cluster.node_pids(node):
        if process.pid_in_node == pid_in_node:
            return process.pid
    raise AssertionError(f"no process {pid_in_node} on {node}")


def bring_about(cluster: MiniCluster, fault: str, node: str, pid: int) -> None:
    """Strike a node, or the process on it that the host knows by this number."""
    match fault:
        case "power-off":
            cluster.power_off(node)
        case "vanish":
            cluster.vanish(node)
        case "freeze-node":
            cluster.freeze(node)
        case "kill":
            os.kill(pid, signal.SIGKILL)
        case "freeze":
            os.kill(pid, signal.SIGSTOP)
        case _:
            raise ValueError(fault)


def submit(
    cluster: MiniCluster,
    *,
    nodes: int = 4,
    launch: Sequence[str] = (),
    script: str | Path = SCRIPT,
    script_args: Sequence[str] = (),
    no_kill: bool = True,
    sbatch: Sequence[str] = (),
    runs: Path | None = None,
) -> TrainingJob:
    """Submit a batch script that becomes ``deadpool-launch SCRIPT``, with these options of
    ``sbatch``; the run directory is made in ``runs``, by default the shared directory.
    """
    run_dir = (runs or cluster.base) / f"run-{next(_numbers)}"
    command = [
        str(Path(sys.executable).parent / "deadpool-launch"),
        PATIENCE,
        *launch,
        f"--run-dir={run_dir}",
        "--record-final-state",
        str(script),
        "--",
        *script_args,
    ]
    text = f"#!/bin/bash\n#SBATCH --output={run_dir}.out\n"
    text += "#SBATCH --no-kill\n" if no_kill else ""
    text += f"exec {shlex.join(command)}\n"
    job_id = cluster.submit(text, nodes=nodes, no_kill=False, extra_args=sbatch)
    return TrainingJob(cluster, job_id, run_dir)
