"""Nodes that are process trees on this machine, asked like those of Slurm.

A node is what was begun on it and everything that descends from that. Besides descent, a variable
in the environment says which node a process belongs to, since an orphan's descent is gone. Whoever
begins something here is a *child subreaper*, so that no process of a node gets out of sight.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

import psutil

from deadpool_slurm import client, parse
from deadpool_slurm.client import SlurmError
from deadpool_slurm.submission import SubmitText

_NODE_VARIABLE = "DEADPOOL_LOCAL_NODE"
#: How long the processes of a node may take to be gone after SIGKILL, in seconds.
KILL_TIMEOUT_S = 10.0
_NEXT_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class _Step:
    name: str
    pid: int


class LocalClient:
    """``SlurmClient`` of one job on this machine.

    ``token`` tells its processes from those of another job; it is the job's id until another is
    set, which must end with it.
    """

    def __init__(self, token: str, nodes: Sequence[str] = ()) -> None:
        self._token = token
        self.job_id = token
        self._nodes = list(nodes)
        #: Whose descendants the nodes are: this process, or with those of a launcher that ended its
        #: parent, which adopted them.
        self._root = os.getpid()
        self._begun: dict[str, list[_Step]] = {}
        self._off: set[str] = set()
        #: Processes ever seen on a node, by process id; the time of creation guards against reuse.
        self._seen: dict[int, tuple[str, float]] = {}
        self._comment: str | None = None
        self._ended = False

    # ------------------------------------------------------------ the interface

    def job(self, job_id: str, *, submission: bool = False) -> parse.JobFacts:
        """The job as it is now."""
        self._check(job_id)
        return parse.JobFacts(
            job_id=job_id,
            state="CANCELLED" if self._ended else "RUNNING",
            nodes=tuple(node for node in self._nodes if node not in self._off),
            batch_host=None,
            submit_line=None,
            stepmgr=False,
            can_requeue=False,
            comment=self._comment,
            submission=SubmitText(None, None) if submission else None,
        )

    def nodes(self, names: Sequence[str]) -> dict[str, parse.NodeFacts]:
        """The state of these nodes; one that is none of the job's is missing."""
        found: dict[str, parse.NodeFacts] = {}
        for node in names:
            if node in self._nodes:
                state = "DOWN" if node in self._off else "ALLOCATED"
                health = parse.health_of(state)
                found[node] = parse.NodeFacts(node, "127.0.0.1", state, "", os.cpu_count(), health)
        return found

    def steps(self, job_id: str) -> list[str]:
        """The names of what was begun on a node and has not ended."""
        self._check(job_id)
        steps = [step for begun in self._begun.values() for step in begun]
        return [step.name for step in steps if _is_alive(step.pid)]

    def config(self) -> dict[str, str]:
        """There is nothing but a name."""
        return {"ClusterName": "local"}

    def do(self, change: client.Change) -> bool:
        """Make the change; false if there was nothing to change."""
        if not isinstance(change, client.EndWaiting):
            self._check(change.job_id)
        match change:
            case client.EndStep():
                return self._end_step(change.name, change.signal)
            case client.EndJob():
                self._ended = True
                self._kill(list(self._begun))
            case client.KeepNodes():
                given_back = [node for node in self._nodes if node not in change.nodes]
                self._nodes = [node for node in self._nodes if node in change.nodes]
                self._kill(given_back)
            case client.Comment():
                self._comment = change.text
            case client.EndWaiting():
                return False
            case client.Requeue():
                raise SlurmError("there is no queue with --site local")
            case _:
                assert_never(change)
        return True

    # ------------------------------------------------------------ what a launcher does here

    def begin_job(self, job_id: str, nodes: Sequence[str]) -> None:
        """The job's id, which ends with the token, and its nodes."""
        self.job_id, self._nodes = job_id, list(nodes)

    def take_over(self, job_id: str, nodes: Sequence[str]) -> None:
        """The job of a launcher that has ended: its processes are our parent's children now."""
        self.begin_job(job_id, nodes)
        self._token = job_id.rpartition(".")[2]
        self._root = os.getppid()

    def begin_step(self, node: str, pid: int) -> str:
        """This process is one of the node's; what it starts is as well. Its name as a step."""
        begun = self._begun.setdefault(node, [])
        begun.append(_Step(f"deadpool-{node}-{len(begun) + 1}", pid))
        self._off.discard(node)
        return begun[-1].name

    def variables_of(self, node: str) -> dict[str, str]:
        """What marks a process as belonging to the node."""
        return {_NODE_VARIABLE: f"{self._token}:{node}"}

    def switch_off(self, node: str) -> None:
        """The node is lost from now on; its processes are killed with ``killing``."""
        self._off.add(node)

    def strike(self, node: str) -> bool:
        """Kill every process of the node once; false if there was none.

        To be repeated (``killing``): new ones may have been forked between the look and the kill.
        """
        # Stopped first, so that none sees another one die and reports it.
        if processes := self.processes(node):
            for number in (signal.SIGSTOP, signal.SIGKILL):
                _signal(processes, number)
        self._reap(node)
        return bool(processes)

    def killing(self, node: str, deadline: float) -> Iterator[float]:
        """Kill every process of the node until none is left; gives the seconds to wait before each
        next look. Raises ``SlurmError`` if some are left at the ``deadline``, on the monotonic
        clock.
        """
        while self.strike(node):
            if time.monotonic() > deadline:
                raise SlurmError(f"processes of {node} do not end")
            yield _NEXT_LOOK_S

    def freeze(self, node: str) -> None:
        """Stop every process of the node."""
        stopped: set[int] = set()
        # Until a look finds no new one: what is stopped cannot fork.
        while new := [found for found in self.processes(node) if found.pid not in stopped]:
            _signal(new, signal.SIGSTOP)
            stopped |= {found.pid for found in new}

    def processes(self, node: str) -> list[psutil.Process]:
        """The living processes of the node, those that were begun there first."""
        begun = {step.pid for step in self._begun.get(node, [])}
        found: list[psutil.Process] = []
        for process in psutil.Process(self._root).children(recursive=True):
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if self._node_of(process) == node and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return sorted(found, key=lambda process: process.pid not in begun)

    # ------------------------------------------------------------

    def _check(self, job_id: str) -> None:
        if job_id != self.job_id:
            raise SlurmError(f"there is no job {job_id} on this machine")

    def _end_step(self, name: str, signal_name: str | None) -> bool:
        for node, begun in self._begun.items():
            for step in begun:
                if step.name == name and _is_alive(step.pid):
                    if signal_name in (None, "KILL"):
                        self._kill([node])
                    else:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(step.pid, signal.Signals[f"SIG{signal_name}"])
                    return True
        return False

    def _kill(self, nodes: Iterable[str]) -> None:
        deadline = time.monotonic() + KILL_TIMEOUT_S
        for node in nodes:
            for wait_s in self.killing(node, deadline):
                time.sleep(wait_s)

    def _node_of(self, process: psutil.Process) -> str | None:
        """The node of a process: by earlier sight, its step, its variable, session or parent."""
        created = process.create_time()
        seen = self._seen.get(process.pid)
        if seen is not None and seen[1] == created:
            return seen[0]
        node = self._node_of_step(process.pid) or self._node_of_variable(process)
        if node is None:
            node = self._node_of_step(os.getsid(process.pid))
        if node is None:
            parent = process.parent()
            if parent is not None and parent.pid not in (os.getpid(), self._root):
                node = self._node_of(parent)
        if node is not None:
            self._seen[process.pid] = (node, created)
        return node

    def _node_of_step(self, pid: int) -> str | None:
        for node, begun in self._begun.items():
            if any(step.pid == pid for step in begun):
                return node
        return None

    def _node_of_variable(self, process: psutil.Process) -> str | None:
        try:
            mark = process.environ().get(_NODE_VARIABLE, "")
        except (psutil.Error, OSError):
            return None
        token, _, node = mark.partition(":")
        return node if token == self._token and node in self._begun else None

    def _reap(self, node: str) -> None:
        """Collect the exit codes of the node's orphans, which are this process's children now."""
        begun = {step.pid for steps in self._begun.values() for step in steps}
        for pid, (owner, _) in list(self._seen.items()):
            if owner == node and pid not in begun:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _signal(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)
