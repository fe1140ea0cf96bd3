"""Nodes that are process trees on this machine: for rehearsals, demonstrations and laptops.

A node is its agent and everything that descends from it. The launcher becomes a *child subreaper*:
what loses its parent becomes the launcher's child instead of init's, so that no process of a node
can get out of sight. Besides descent, a variable in the environment says which node a process
belongs to, since an orphan's descent is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from deadpool_launch.backends import adopted
from deadpool_launch.backends.base import AgentHandle, Allocation, Check, Sight, SiteError
from deadpool_launch.errors import StartFailed, UnsuitableError
from deadpool_launch.options import LaunchOptions
from deadpool_launch.policy.admission import log_name, reason_to_refuse
from deadpool_launch.preflight import node_rules
from deadpool_launch.preflight.facts import Facts
from deadpool_launch.preflight.own import local_answers
from deadpool_runtime import parking
from deadpool_runtime.replication.arena import SHM, arena_path

_NODE_VARIABLE = "DEADPOOL_LOCAL_NODE"
#: How long the processes of a node may take to be gone after SIGKILL, in seconds.
_KILL_TIMEOUT_S = 10.0
_LITTLE_SHM_NBYTES = 256 << 20


def local_nodes(count: int) -> tuple[str, ...]:
    """The names of this many nodes."""
    return tuple(f"local{number}" for number in range(1, count + 1))


class LocalBackend:
    """``Backend`` whose nodes ``local1``, ``local2``, … are process trees.

    All of them have the machine's /dev/shm; a node that is powered off loses its part of it, as
    memory is lost with a machine.
    """

    def __init__(self) -> None:
        # Tells this launcher's processes and files from those of another one on the machine.
        self._token = secrets.token_hex(4)
        self._job_id = self._token
        #: Whose descendants the nodes are: this process, or with agents of a launcher that ended
        #: its parent, which adopted them.
        self._root = os.getpid()
        self._agents: dict[str, list[LocalAgent]] = {}
        #: Processes ever seen on a node, by process id; the time of creation guards against reuse.
        self._seen: dict[int, tuple[str, float]] = {}

    def discover(self, options: LaunchOptions) -> Allocation:
        """As many nodes as the options ask for."""
        count = (options.nodes or 1) + options.spares
        self._job_id = f"{Path(options.run_dir).name}.{self._token}"
        return Allocation(
            job_id=self._job_id,
            nodes=local_nodes(count),
            batch_host=None,
            launcher_host="127.0.0.1",
            env={"GLOO_SOCKET_IFNAME": "lo"},
        )

    def restore(self, allocation: Allocation, term: int) -> None:
        """The job and its mark on processes are what they were."""
        self._job_id = allocation.job_id
        self._token = allocation.job_id.rpartition(".")[2]
        self._root = os.getppid()

    def adopt(self, node: str, saved: Mapping[str, Any]) -> AgentHandle:
        """The agent is a child of this process's parent now."""
        process = adopted.AdoptedProcess(saved["pid"], saved["created"])
        agent = LocalAgent(self, node, process, Path(saved["log"]))
        self._agents.setdefault(node, []).append(agent)
        return agent

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
        agent = LocalAgent(self, node, process, log_path)
        self._agents.setdefault(node, []).append(agent)
        return agent

    def agent_command(self, node: str, argv: Sequence[str], log_path: Path) -> list[str]:
        """The agent's own command line; its output goes to ``log_path``."""
        return list(argv)

    def ends_at(self) -> float | None:
        """There is no time limit."""
        return None

    def look(self, nodes: Sequence[str]) -> Sight | None:
        """Nobody but the launcher watches these nodes."""
        return None

    def requeue(self) -> None:
        """There is no queue."""
        raise SiteError("there is no queue with --site local")

    def cancel_waiting(self, name: str) -> None:
        """There is no queue."""

    def comment(self, text: str) -> None:
        """There is no place for it."""

    def leave(self) -> None:
        """Let what was started go on."""
        self._agents.clear()

    async def close(self) -> None:
        """Kill every process of every node."""
        await asyncio.gather(*(self.power_off(node) for node in self._agents))

    # ------------------------------------------------------------ faults

    async def power_off(self, node: str) -> None:
        """Kill every process of the node; return when all are gone (or after a deadline), and its
        arena with them.
        """
        await self._kill_all(node)
        for path in SHM.glob(arena_path(self._job_id, node, 0).name[:-1] + "*"):
            shutil.rmtree(path, ignore_errors=True)

    async def _kill_all(self, node: str) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _KILL_TIMEOUT_S
        # Stopped first, so that none sees another one die and reports it. New ones may have been
        # forked between the look and the kill: look again until there are none.
        while processes := self.processes(node):
            for number in (signal.SIGSTOP, signal.SIGKILL):
                _signal(processes, number)
            self._reap(node)
            if loop.time() > deadline:
                return
            await asyncio.sleep(0.01)
        self._reap(node)

    def vanish(self, node: str) -> None:
        """Silence the node: its connections stay open, nothing answers; ``power_off`` ends it."""
        self.freeze(node)

    def freeze(self, node: str) -> None:
        """Stop every process of the node."""
        stopped: set[int] = set()
        # Until a look finds no new one: what is stopped cannot fork.
        while new := [found for found in self.processes(node) if found.pid not in stopped]:
            _signal(new, signal.SIGSTOP)
            stopped |= {found.pid for found in new}

    def processes(self, node: str) -> list[psutil.Process]:
        """The living processes of the node, its agents first."""
        agents = {agent.pid for agent in self._agents.get(node, [])}
        found: list[psutil.Process] = []
        for process in psutil.Process(self._root).children(recursive=True):
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if self._node_of(process) == node and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return sorted(found, key=lambda process: process.pid not in agents)

    def _node_of(self, process: psutil.Process) -> str | None:
        """The node of a process: by earlier sight, its agent, its variable, session or parent."""
        created = process.create_time()
        seen = self._seen.get(process.pid)
        if seen is not None and seen[1] == created:
            return seen[0]
        node = self._node_of_agent(process.pid) or self._node_of_variable(process)
        if node is None:
            node = self._node_of_agent(os.getsid(process.pid))
        if node is None:
            parent = process.parent()
            if parent is not None and parent.pid not in (os.getpid(), self._root):
                node = self._node_of(parent)
        if node is not None:
            self._seen[process.pid] = (node, created)
        return node

    def _node_of_agent(self, pid: int) -> str | None:
        for node, agents in self._agents.items():
            if any(agent.pid == pid for agent in agents):
                return node
        return None

    def _node_of_variable(self, process: psutil.Process) -> str | None:
        try:
            mark = process.environ().get(_NODE_VARIABLE, "")
        except (psutil.Error, OSError):
            return None
        token, _, node = mark.partition(":")
        return node if token == self._token and node in self._agents else None

    def _reap(self, node: str) -> None:
        """Collect the exit codes of the node's orphans, which are this process's children now."""
        agents = {agent.pid for agents in self._agents.values() for agent in agents}
        for pid, (owner, _) in list(self._seen.items()):
            if owner == node and pid not in agents:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def variables_of(self, node: str) -> dict[str, str]:
        """What marks a process as belonging to the node."""
        return {_NODE_VARIABLE: f"{self._token}:{node}"}


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
        self._node = node
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
        await self._backend.power_off(self._node)
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


def _signal(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


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
