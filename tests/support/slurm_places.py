"""Places in which a job runs that a ``SlurmClient`` can be asked about: two nodes that are process
trees here, and the nodes of a mini cluster.
"""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mini_cluster import MiniCluster
from mini_cluster_nodes import wait_until

from deadpool_slurm.client import Change, SlurmClient, SlurmError
from deadpool_slurm.local import LocalClient
from deadpool_slurm.parse import JobFacts, NodeFacts

PATIENCE_S = 300.0
_ASK = Path(__file__).parents[1] / "scripts" / "ask_slurm.py"
_STEP = """\
trap 'touch {mark}.told; exit 0' TERM
touch {mark}.up
while true; do sleep 0.1; done
"""


class Place(Protocol):
    """Where a job of two nodes can be had."""

    #: Whether there is a queue.
    is_slurm: bool

    @property
    def client(self) -> SlurmClient:
        """What is tested."""

    def begin_job(self, *, options: Sequence[str] = ()) -> str:
        """A job that runs; its id."""

    def begin_step(self, job_id: str, node: str) -> tuple[str, Path]:
        """A step that runs; its name, and a file whose ``.told`` is there after SIGTERM."""

    def lose(self, node: str) -> None:
        """The node is gone."""

    def waiting(self, name: str) -> list[str]:
        """The jobs in the queue of that name."""


class LocalPlace:
    """This machine."""

    is_slurm = False

    def __init__(self, base: Path) -> None:
        self._base = base
        self.client = LocalClient("contract", ["local1", "local2"])
        self._processes: list[subprocess.Popen[bytes]] = []

    def begin_job(self, *, options: Sequence[str] = ()) -> str:
        return self.client.job_id

    def begin_step(self, job_id: str, node: str) -> tuple[str, Path]:
        mark = self._base / f"{node}-{len(self._processes)}"
        environment = {**os.environ, **self.client.variables_of(node)}
        script = _STEP.format(mark=mark)
        # A session of its own, as agents have.
        process = subprocess.Popen(["sh", "-c", script], env=environment, start_new_session=True)
        self._processes.append(process)
        name = self.client.begin_step(node, process.pid)
        wait_for(mark.with_suffix(".up"))
        return name, mark

    def lose(self, node: str) -> None:
        self.client.switch_off(node)
        while self.client.strike(node):
            pass

    def waiting(self, name: str) -> list[str]:
        return []

    def close(self) -> None:
        """End what is left."""
        for node in ("local1", "local2"):
            self.lose(node)
        for process in self._processes:
            process.wait()


class ClusterPlace:
    """A mini cluster. ``variables``: what the client has in its environment on the first node."""

    is_slurm = True

    def __init__(self, cluster: MiniCluster, variables: Mapping[str, str]) -> None:
        self._cluster = cluster
        self.client: SlurmClient = ClientOnNode(cluster, "n1", variables)
        self._steps: list[subprocess.Popen[str]] = []

    def begin_job(self, *, options: Sequence[str] = ()) -> str:
        script = "#!/bin/bash\n#SBATCH --no-kill\nwhile true; do sleep 1; done\n"
        job = self._cluster.submit(script, nodes=2, no_kill=False, extra_args=options)
        self._cluster.wait_job_state(job, "RUNNING", PATIENCE_S)
        return str(job)

    def begin_step(self, job_id: str, node: str) -> tuple[str, Path]:
        name = f"step-{len(self._steps)}"
        mark = self._cluster.base / f"{job_id}-{name}"
        options = ["--overlap", "--no-kill", "-N1", "-n1", "-w", node, f"--job-name={name}"]
        argv = ["srun", f"--jobid={job_id}", *options, "sh", "-c", _STEP.format(mark=mark)]
        self._steps.append(self._cluster.popen_on("n1", argv, stderr=subprocess.DEVNULL))
        wait_for(mark.with_suffix(".up"))
        return name, mark

    def queue(self, name: str) -> None:
        """A job that waits."""
        self._cluster.submit(
            "#!/bin/bash\nsleep 9\n", nodes=1, job_name=name, extra_args=["--hold"]
        )

    def lose(self, node: str) -> None:
        self._cluster.mark_down(node)

    def waiting(self, name: str) -> list[str]:
        queue = self._cluster.squeue()
        return [str(job.job_id) for job in queue if (job.name, job.state) == (name, "PENDING")]

    def close(self) -> None:
        """The steps end with their jobs."""
        for job in self._cluster.squeue():
            self._cluster.cancel(job.job_id)
        for step in self._steps:
            with contextlib.suppress(subprocess.TimeoutExpired):
                step.wait(PATIENCE_S)


class ClientOnNode:
    """The ``SlurmClient`` that is chosen on a node; each call is a program there."""

    def __init__(self, cluster: MiniCluster, node: str, variables: Mapping[str, str]) -> None:
        self._cluster = cluster
        self._node = node
        self._variables = variables

    def job(self, job_id: str, *, submission: bool = False) -> JobFacts:
        facts: JobFacts = self._ask("job", job_id, submission=submission)
        return facts

    def nodes(self, names: Sequence[str]) -> dict[str, NodeFacts]:
        found: dict[str, NodeFacts] = self._ask("nodes", names)
        return found

    def steps(self, job_id: str) -> list[str]:
        names: list[str] = self._ask("steps", job_id)
        return names

    def config(self) -> dict[str, str]:
        settings: dict[str, str] = self._ask("config")
        return settings

    def do(self, change: Change) -> bool:
        done: bool = self._ask("do", change)
        return done

    def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        asked = base64.b64encode(pickle.dumps((method, arguments, options))).decode()
        # Set inside: with another PATH the node would not be entered.
        changed = [f"{name}={value}" for name, value in self._variables.items()]
        argv = ["env", *changed, sys.executable, str(_ASK), asked]
        done = self._cluster.run_on(self._node, argv)
        assert done.returncode == 0, done.stderr
        kind, value = pickle.loads(base64.b64decode(done.stdout))
        if kind == "error":
            raise SlurmError(value)
        return value


def wait_for(path: Path) -> None:
    """Until the file is there."""
    wait_until(path.exists, bool, what=f"{path.name} is there", timeout_s=PATIENCE_S)
