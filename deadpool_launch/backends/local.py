"""Nodes that are process trees on this machine: for rehearsals, demonstrations and laptops.

A node is its agent and everything that descends from it; ``deadpool_slurm.local`` keeps track of
that. The launcher becomes a *child subreaper*: what loses its parent becomes the launcher's child
instead of init's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from deadpool_launch.backends import adopted
from deadpool_launch.backends.asking import Asking
from deadpool_launch.backends.base import AgentHandle, Allocation, Check, Sight
from deadpool_launch.errors import StartFailed, UnsuitableError
from deadpool_launch.options import LaunchOptions
from deadpool_launch.policy.admission import log_name, reason_to_refuse
from deadpool_launch.preflight import node_rules
from deadpool_launch.preflight.facts import Facts
from deadpool_launch.preflight.own import local_answers
from deadpool_runtime import parking
from deadpool_runtime.replication.arena import SHM, arena_path
from deadpool_slurm.client import SlurmError
from deadpool_slurm.local import KILL_TIMEOUT_S, LocalClient

_LITTLE_SHM_NBYTES = 256 << 20


def local_nodes(count: int) -> tuple[str, ...]:
    """The names of this many nodes."""
    return tuple(f"local{number}" for number in range(1, count + 1))


class LocalBackend(Asking):
    """``Backend`` whose nodes ``local1``, ``local2``, … are process trees.

    All of them have the machine's /dev/shm; a node that is powered off loses its part of it, as
    memory is lost with a machine.
    """

    def __init__(self) -> None:
        # Tells this launcher's processes and files from those of another one on the machine.
        self._token = secrets.token_hex(4)
        self.client: LocalClient = LocalClient(self._token)
        self._agents: dict[str, list[LocalAgent]] = {}

    @property
    def job_id(self) -> str:
        """The job's."""
        return self.client.job_id

    def discover(self, options: LaunchOptions) -> Allocation:
        """As many nodes as the options ask for."""
        count = (options.nodes or 1) + options.spares
        nodes = local_nodes(count)
        self.client.begin_job(f"{Path(options.run_dir).name}.{self._token}", nodes)
        return Allocation(
            job_id=self.job_id,
            nodes=nodes,
            batch_host=None,
            launcher_host="127.0.0.1",
            env={"GLOO_SOCKET_IFNAME": "lo"},
        )

    def restore(self, allocation: Allocation, term: int) -> None:
        """The job and its mark on processes are what they were."""
        self.client.take_over(allocation.job_id, allocation.nodes)

    def adopt(self, node: str, saved: Mapping[str, Any]) -> AgentHandle:
        """The agent is a child of this process's parent now."""
        process = adopted.AdoptedProcess(saved["pid"], saved["created"])
        return self._watch(LocalAgent(self, node, process, Path(saved["log"])))

    async def examine(self, options: LaunchOptions, *, thorough: bool = False) -> Facts:
        """What is to be known of this machine, which all nodes are."""
        nodes = local_nodes((options.nodes or 1) + options.spares)
        return Facts(nodes=nodes, answers=await asyncio.to_thread(local_answers, nodes, options))

    async def preflight(self, options: LaunchOptions) -> list[Check]:
        """Whether the run directory and shared memory can be used."""
        checks = [_run_dir_check(Path(options.run_dir))]
        with contextlib.suppress(OSError):
            free = shutil.disk_usage("/dev/shm").free
            checks.append(
                Check("shared memory", True, f"{free >> 20} MiB free in /dev/shm")
                if free >= _LITTLE_SHM_NBYTES
                else Check("shared memory", None, f"only {free >> 20} MiB free in /dev/shm")
            )
        logs = Path(options.run_dir) / "logs"
        if options.admission:
            # The nodes that discover named.
            nodes = local_nodes((options.nodes or 1) + options.spares)
            logs.mkdir(exist_ok=True, mode=0o700)
            reasons = await asyncio.gather(
                *(
                    reason_to_refuse(options.admission, node, logs / log_name(node))
                    for node in nodes
                )
            )
            checks += [
                node_rules.admission_check(node, reason)
                for node, reason in zip(nodes, reasons, strict=True)
                if reason
            ]
        return checks

    async def start_agent(self, node: str, argv: Sequence[str], log_path: Path) -> AgentHandle:
        """Start the agent as a child in a session of its own."""
        _become_subreaper()
        try:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            with log_path.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=asyncio.subprocess.STDOUT,
                    env={**os.environ, **self.variables_of(node)},
                    start_new_session=True,
                )
        except OSError as error:
            raise StartFailed(f"the agent of {node} cannot be started: {error}") from error
        return self._watch(LocalAgent(self, node, process, log_path))

    def agent_command(self, node: str, argv: Sequence[str], log_path: Path) -> list[str]:
        """The agent's own command line; its output goes to ``log_path``."""
        return list(argv)

    def ends_at(self) -> float | None:
        """There is no time limit."""
        return None

    def look(self, nodes: Sequence[str]) -> Sight | None:
        """Nobody but the launcher watches these nodes."""
        return None

    def leave(self) -> None:
        """Let what was started go on."""
        self._agents.clear()

    async def close(self) -> None:
        """Kill every process of every node."""
        await asyncio.gather(*(self.end(node) for node in self._agents))

    async def end(self, node: str) -> None:
        """Kill every process of the node; return when all are gone (or after a deadline), and its
        arena with them.
        """
        with contextlib.suppress(SlurmError):
            for wait_s in self.client.killing(node, time.monotonic() + KILL_TIMEOUT_S):
                await asyncio.sleep(wait_s)
        for path in SHM.glob(arena_path(self.job_id, node, 0).name[:-1] + "*"):
            shutil.rmtree(path, ignore_errors=True)

    def variables_of(self, node: str) -> dict[str, str]:
        """What marks a process as belonging to the node."""
        return self.client.variables_of(node)

    def _watch(self, agent: LocalAgent) -> LocalAgent:
        self._agents.setdefault(agent.node, []).append(agent)
        self.client.begin_step(agent.node, agent.pid)
        return agent

    # ------------------------------------------------------------ faults

    async def power_off(self, node: str) -> None:
        """The node and all that runs on it are gone."""
        self.client.switch_off(node)
        await self.end(node)

    def vanish(self, node: str) -> None:
        """Silence the node: its connections stay open, nothing answers; ``power_off`` ends it."""
        self.freeze(node)

    def freeze(self, node: str) -> None:
        """Stop every process of the node."""
        self.client.freeze(node)

    def processes(self, node: str) -> list[psutil.Process]:
        """The living processes of the node, its agents first."""
        return self.client.processes(node)


class LocalAgent:
    """``AgentHandle`` of a child process."""

    def __init__(
        self,
        backend: LocalBackend,
        node: str,
        process: asyncio.subprocess.Process | adopted.AdoptedProcess,
        log_path: Path,
    ) -> None:
        self._backend = backend
        self.node = node
        self._process = process
        self._log_path = log_path

    @property
    def pid(self) -> int:
        """The agent's process id."""
        return self._process.pid

    async def wait(self) -> int:
        """The agent's exit code (negative: the signal that ended it)."""
        return await self._process.wait()

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, ``grace_s``, then SIGKILL to every process of the node."""
        if grace_s > 0 and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace_s)
        await self._backend.end(self.node)
        await self._process.wait()

    def last_words(self) -> str:
        """The last line of the agent's output."""
        return last_line(self._log_path)

    def saved(self) -> dict[str, Any]:
        """Which process it is, and where its output goes."""
        return {**adopted.mark(self.pid), "log": str(self._log_path)}


def last_line(path: Path) -> str:
    """The last line of a text file that is not blank; empty if there is none."""
    try:
        lines = path.read_text(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _run_dir_check(run_dir: Path) -> Check:
    try:
        run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe = run_dir / f".probe-{secrets.token_hex(4)}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        return node_rules.run_dir_problem(run_dir, error)
    return Check("run directory", True, f"{run_dir} can be written")


def _become_subreaper() -> None:
    try:
        parking.prctl(parking.PR_SET_CHILD_SUBREAPER, 1)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise UnsuitableError(f"the launcher cannot adopt orphaned processes: {reason}") from error
