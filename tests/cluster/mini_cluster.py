"""A real Slurm cluster on one machine, for tests and for trying things out.

    with MiniCluster(nodes=4) as cluster:
        job = cluster.submit("#!/bin/bash\nsrun hostname\n", nodes=4)
        print(cluster.wait_job(job, timeout_s=60).state)

Each node has its own network, host name, process table, /tmp, /run and /dev/shm, its own munged and
its own slurmd; `head` runs slurmctld. Directories that all see at the same path: `cluster.base`
(stands for the shared file system), this checkout and the Python environment. A test's `tmp_path`
is *not* among them. Nothing of the cluster is in the host's network or in its /etc, and nothing
stays behind however the process that holds the cluster ends.

Below Slurm the work is done in :mod:`mini_cluster_nodes`; Slurm's output is read in
:mod:`mini_cluster_records`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from mini_cluster_nodes import (
    NodeProcess,
    Nodes,
    ProcessMark,
    inner_program,
    merged_environment,
    node_environment,
    wait_until,
)
from mini_cluster_records import (
    QUEUE_FORMAT,
    JobRecord,
    QueuedJob,
    fields_of,
    job_record,
    queued_jobs,
)
from mini_cluster_settings import (
    HEAD,
    cgroup_conf_text,
    check_machine,
    hosts_text,
    slurm_conf_text,
    slurm_variables,
)

CHECKOUT = Path(__file__).resolve().parents[2]
#: From SIGTERM to SIGKILL at the end of a job, in seconds.
KILL_WAIT_S = 2


class MiniCluster:
    """A cluster of `nodes` compute nodes n1, n2, ... and a `head`.

    `slurmd_timeout_s` is how long Slurm waits for a silent node before it marks it DOWN; the
    default is Slurm's own, and so is that of `requeue_wait_s`, how long a requeued job waits at
    least. `directory` is where the cluster's directory is made, `visible` names further directories
    under /tmp, /run or /dev/shm that every node must see. `prefix` is where another Slurm than
    Debian's is installed.
    """

    def __init__(
        self,
        nodes: int = 4,
        *,
        slurmd_timeout_s: int = 300,
        kill_wait_s: int = KILL_WAIT_S,
        message_timeout_s: int = 10,
        requeue_wait_s: int = 120,
        cpus: int = 8,
        memory_mb: int = 4000,
        directory: Path | None = None,
        visible: Sequence[Path] = (),
        state_file: Path | None = None,
        prefix: Path | None = None,
    ) -> None:
        self.node_names = tuple(f"n{number}" for number in range(1, nodes + 1))
        self._conf: dict[str, int] = {
            "slurmd_timeout_s": slurmd_timeout_s,
            "kill_wait_s": kill_wait_s,
            "message_timeout_s": message_timeout_s,
            "requeue_wait_s": requeue_wait_s,
            "cpus": cpus,
            "memory_mb": memory_mb,
        }
        self._directory = directory or Path(tempfile.gettempdir())
        self._visible = [CHECKOUT, Path(sys.prefix), Path(sys.base_prefix), *visible]
        self._state_file = state_file
        self._prefix = prefix
        self._guardian: subprocess.Popen[bytes] | None = None
        self._root = Path()
        self._maybe_nodes: Nodes | None = None
        self._scripts = 0

    # --- life -----------------------------------------------------------------------------------

    def up(self, timeout_s: float = 180) -> None:
        """Start everything; returns when every node is idle."""
        check_machine(self._prefix)
        try:
            outer = self._start_guardian()
            self._write_files(outer)
            path = node_environment()["PATH"]
            variables = slurm_variables(self._prefix, self._root, path)
            self._maybe_nodes = Nodes(self._root, outer, [self._root, *self._visible], variables)
            self._nodes.start([HEAD, *self.node_names], timeout_s)
            self.wait_all_idle(timeout_s)
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """End everything and remove the cluster's directory; harmless when it is down already."""
        guardian, self._guardian = self._guardian, None
        if guardian is None:
            return
        assert guardian.stdin is not None
        assert guardian.stdout is not None
        guardian.stdin.close()
        guardian.wait()
        guardian.stdout.close()
        if self._maybe_nodes is not None:
            self._maybe_nodes.forget()
            self._maybe_nodes = None

    def __enter__(self) -> MiniCluster:
        self.up()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()

    @classmethod
    def attach(cls, state_file: Path) -> MiniCluster:
        """The running cluster that wrote `state_file`, to act on it from another process."""
        state = json.loads(state_file.read_text())
        cluster = cls(len(state["nodes"]))
        cluster._conf = state["conf"]
        cluster._root = Path(state["root"])
        outer = ProcessMark(*state["outer"])
        if not outer.is_alive():
            raise RuntimeError(f"the cluster of {state_file} is not running any more")
        cluster._visible = [Path(path) for path in state["visible"]]
        cluster._maybe_nodes = Nodes(cluster._root, outer, [cluster._root, *cluster._visible])
        return cluster

    @property
    def base(self) -> Path:
        """The shared directory: the same path on every node and on the host."""
        return self._root / "shared"

    @property
    def logs(self) -> Path:
        """Where the logs of slurmctld, of each slurmd and of each node's start are."""
        return self._root / "logs"

    @property
    def _nodes(self) -> Nodes:
        if self._maybe_nodes is None:
            raise RuntimeError("the cluster is down")
        return self._maybe_nodes

    def _start_guardian(self) -> ProcessMark:
        self._guardian = subprocess.Popen(
            inner_program(
                "guardian", str(os.getpid()), str(self._directory), str(self._state_file or "")
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            start_new_session=True,
        )
        assert self._guardian.stdout is not None
        line = self._guardian.stdout.readline()
        if not line:
            raise RuntimeError("the cluster's guardian did not start; its message is on stderr")
        said = json.loads(line)
        self._root = Path(said["root"])
        return ProcessMark.of(said["pid"])

    def _write_files(self, outer: ProcessMark) -> None:
        for name in ("shared", "logs", "state", "run", "scripts", "etc/slurm", "etc/munge"):
            (self._root / name).mkdir(parents=True)
        etc = self._root / "etc"
        (etc / "hosts").write_text(hosts_text(self.node_names))
        (etc / "resolv.conf").write_text("")  # Unknown names fail at once, without a time-out.
        (etc / "slurm" / "cgroup.conf").write_text(cgroup_conf_text(self._prefix))
        self._write_slurm_conf()
        key = etc / "munge" / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        for path, mode in ((etc / "munge", 0o700), (key, 0o400)):
            path.chmod(mode)
            shutil.chown(path, "munge", "munge")
        if self._state_file is not None:
            state = {
                "owner": [*_as_list(ProcessMark.of(os.getpid()))],
                "outer": [*_as_list(outer)],
                "root": str(self._root),
                "nodes": self.node_names,
                "visible": [str(path) for path in self._visible],
                "conf": self._conf,
            }
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with os.fdopen(os.open(self._state_file, flags, 0o600), "w") as file:
                json.dump(state, file)

    def _write_slurm_conf(self) -> None:
        text = slurm_conf_text(self._root, self.node_names, **self._conf)
        (self._root / "etc" / "slurm" / "slurm.conf").write_text(text)

    # --- faults ---------------------------------------------------------------------------------

    def power_off(self, node: str) -> None:
        """Kill all processes of the node at once; the kernel closes their sockets (FIN or RST)."""
        self._check_compute(node)
        self._nodes.kill(node)

    def vanish(self, node: str) -> None:
        """Take the node away without a sound: link down first, so no peer hears of closed sockets.

        This is what a power failure or a dead switch port looks like from outside.
        """
        self._check_compute(node)
        self._nodes.set_link(node, up=False)
        self._nodes.kill(node)

    def power_on(self, node: str, timeout_s: float = 120) -> None:
        """Boot a node that is off; returns when its slurmd runs, before Slurm has noticed."""
        self._check_compute(node)
        if self._nodes.is_on(node):
            raise RuntimeError(f"node {node} is on already")
        self._nodes.start([node], timeout_s)

    def is_on(self, node: str) -> bool:
        return self._nodes.is_on(node)

    def freeze(self, node: str) -> None:
        """Stop every process of the node (SIGSTOP); its kernel still answers the network."""
        self._check_compute(node)
        self._nodes.freeze(node)

    def thaw(self, node: str) -> None:
        """Let a frozen node go on."""
        self._check_compute(node)
        self._nodes.thaw(node)

    def partition(self, node: str) -> None:
        """Pull the node's network cable; its processes go on."""
        self._check_compute(node)
        self._nodes.set_link(node, up=False)

    def heal(self, node: str) -> None:
        """Plug the node's network cable in again."""
        self._check_compute(node)
        self._nodes.set_link(node, up=True)

    def part(self, node: str, others: Sequence[str]) -> None:
        """From now on nothing that the node sends arrives at the others; it hears them, and reaches
        the rest of the cluster.
        """
        for name in (node, *others):
            self._check_compute(name)
        self._nodes.misdirect(node, others)

    def drain(self, node: str, reason: str = "mini cluster") -> None:
        """Tell Slurm to start nothing more on the node; what runs there goes on."""
        self._scontrol("update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}")

    def mark_down(self, node: str, reason: str = "mini cluster") -> None:
        """Tell Slurm that the node is DOWN, without touching the node itself."""
        self._scontrol("update", f"NodeName={node}", "State=DOWN", f"Reason={reason}")

    def resume(self, node: str) -> None:
        """Tell Slurm that a drained or down node is fit for work again."""
        self._scontrol("update", f"NodeName={node}", "State=RESUME")

    def set_slurmd_timeout(self, timeout_s: int, *, message_timeout_s: int = 10) -> None:
        """Change, in the running cluster, how long a node may be silent before it is DOWN.

        A round of questions to the nodes must end before the next begins, and a dead node holds it
        up for `message_timeout_s` or more; so with the default a node is DOWN half a minute after
        its death at the earliest, with 5 after about ten seconds.
        """
        self._reconfigure(slurmd_timeout_s=timeout_s, message_timeout_s=message_timeout_s)

    def set_kill_wait(self, kill_wait_s: int) -> None:
        """Change, in the running cluster, how long after SIGTERM a job's processes are killed."""
        self._reconfigure(kill_wait_s=kill_wait_s)

    def _reconfigure(self, **wanted: int) -> None:
        if not wanted.items() <= self._conf.items():
            self._conf.update(wanted)
            self._write_slurm_conf()
            self._scontrol("reconfigure")

    def stop_controller(self, *, kill: bool = False) -> None:
        """End slurmctld: in good order, or with SIGKILL.

        It writes its state a few seconds late: a SIGKILL loses jobs submitted just before.
        """
        for process in self._controllers():
            os.kill(process.pid, signal.SIGKILL if kill else signal.SIGTERM)
        wait_until(self._controllers, lambda p: not p, what="slurmctld ends", timeout_s=60)

    def start_controller(self, timeout_s: float = 60) -> None:
        """Start slurmctld again; returns when it answers."""
        self._must("slurmctld")

        def answers() -> bool:
            return self.run_on(HEAD, ["scontrol", "ping"]).returncode == 0

        wait_until(answers, bool, what="slurmctld answers", timeout_s=timeout_s)

    def _controllers(self) -> list[NodeProcess]:
        return [p for p in self.node_pids(HEAD) if p.name in ("slurmctld", "slurmscriptd")]

    def _check_compute(self, node: str) -> None:
        if node not in self.node_names:
            raise ValueError(f"no compute node {node!r}; there are {', '.join(self.node_names)}")

    # --- processes and files --------------------------------------------------------------------

    def run_on(
        self,
        node: str,
        argv: Sequence[str],
        *,
        timeout_s: float = 120,
        text_in: str = "",
        env: Mapping[str, str] | None = None,
        chdir: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside a node to its end; never raises for its exit code."""
        return subprocess.run(
            self._nodes.command(node, argv, chdir or self.base),
            input=text_in,
            text=True,
            capture_output=True,
            timeout=timeout_s,
            env=merged_environment({**self._nodes.variables, **(env or {})}),
        )

    def popen_on(
        self,
        node: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        chdir: Path | None = None,
        **popen: Any,
    ) -> subprocess.Popen[str]:
        """Start a command inside a node. Killing the returned process kills the command too.

        Its `pid` is that of a helper on the host; `find_processes` gives that of the command.
        """
        return subprocess.Popen(
            self._nodes.command(node, argv, chdir or self.base),
            text=True,
            env=merged_environment({**self._nodes.variables, **(env or {})}),
            start_new_session=True,
            **popen,
        )

    def shell_command(self, node: str, argv: Sequence[str]) -> list[str]:
        """The host command line that runs `argv` in the node, to be given a terminal."""
        return self._nodes.command(node, argv, self.base, tie=False)

    def node_pids(self, node: str) -> list[NodeProcess]:
        """All processes of the node but its first, Slurm's own ones included."""
        return self._nodes.processes(node)

    def find_processes(self, node: str, needle: str) -> list[NodeProcess]:
        """The processes of the node whose command line contains `needle`."""
        return [p for p in self._nodes.processes(node) if needle in p.cmdline]

    def private_files(self, node: str) -> list[Path]:
        """What lies in the node's own /dev/shm and /tmp, as paths that work on the host."""
        return self._nodes.private_files(node)

    def leftovers(self) -> list[str]:
        """What ended jobs left behind: one sentence for each process or file on any node.

        Processes of jobs that are still in the queue are not counted; files in a node's /dev/shm
        and /tmp always are, as nothing tells whose they are. The empty cache folder is not that
        any program leaves which is ended while it imports torch.
        """
        queued = {job.job_id for job in self.squeue()}
        return [text for text, _ in self._leftovers(queued)]

    def sweep(self) -> None:
        """Kill and delete whatever `leftovers` names."""
        for _, remove in self._leftovers({job.job_id for job in self.squeue()}):
            remove()

    def _leftovers(self, queued: set[int]) -> list[tuple[str, Callable[[], None]]]:
        found: list[tuple[str, Callable[[], None]]] = []
        for node in (HEAD, *self.node_names):
            for process in self.node_pids(node):
                is_step = process.name.startswith("slurmstepd") and process.job_id is not None
                if process.job_id in queued or (not is_step and self._nodes.is_own_daemon(process)):
                    continue
                text = f"{node}: process {process.pid} is still there: {process.cmdline}"
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # It just ended.
                    found.append((text, _killer(process.pid)))
            for path in self._nodes.private_files(node):
                if _is_torchs_empty_cache(path):
                    continue
                seen_there = "/" + str(path).split("/root/", 1)[1]
                text = f"{node}: file {seen_there} is still there"
                with contextlib.suppress(OSError):  # It is no folder, or has just gone.
                    text += f", in it: {' '.join(sorted(each.name for each in path.iterdir()))}"
                found.append((text, _remover(path)))
        return found

    # --- jobs -----------------------------------------------------------------------------------

    def submit(
        self,
        script: str | Path,
        *,
        nodes: int,
        no_kill: bool = True,
        job_name: str | None = None,
        extra_args: Sequence[str] = (),
        script_args: Sequence[str] = (),
        chdir: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> int:
        """Submit a batch script, given as text or as a path, from the head; returns the job's id.

        The job's directory is `chdir`, else `base`, and its output goes there unless the script or
        `extra_args` say otherwise.
        """
        options = [f"--nodes={nodes}", f"--chdir={chdir or self.base}", *extra_args]
        if no_kill:
            options.insert(0, "--no-kill")
        if job_name is not None:
            options.append(f"--job-name={job_name}")
        path = self._visible_script(script)
        said = self._must("sbatch", "--parsable", *options, str(path), *script_args, env=env)
        return int(said.strip().partition(";")[0])

    def cancel(self, job: int) -> None:
        """Ask Slurm to end the job."""
        self._must("scancel", str(job))

    def squeue(self) -> list[QueuedJob]:
        """The jobs that wait, run or are completing."""
        return queued_jobs(self._must("squeue", "--noheader", f"--format={QUEUE_FORMAT}"))

    def job_info(self, job: int) -> JobRecord:
        """The record of a job, ended or not."""
        return job_record(self._scontrol("--oneliner", "show", "job", str(job)))

    def job_state(self, job: int) -> str:
        return self.job_info(job).state

    def wait_job(self, job: int, timeout_s: float, *, accept_completing: bool = False) -> JobRecord:
        """Wait until the job has ended; its final record, exit code included.

        A job that holds a dead node stays COMPLETING until that node is back or is marked DOWN;
        with `accept_completing` that state, in which the exit code is known, is enough.
        """

        def probe() -> JobRecord:
            return self.job_info(job)

        def is_over(record: JobRecord) -> bool:
            return record.has_ended or (accept_completing and record.state == "COMPLETING")

        return wait_until(probe, is_over, what=f"job {job} ends", timeout_s=timeout_s)

    def wait_job_state(self, job: int, state: str, timeout_s: float) -> JobRecord:
        """Wait until the job is in a certain state, for example RUNNING."""

        def probe() -> JobRecord:
            return self.job_info(job)

        what = f"job {job} becomes {state}"
        return wait_until(probe, lambda r: r.state == state, what=what, timeout_s=timeout_s)

    def _visible_script(self, script: str | Path) -> Path:
        if isinstance(script, Path) and script.is_relative_to(self._root):
            return script
        text = script.read_text() if isinstance(script, Path) else script
        self._scripts += 1
        name = script.name if isinstance(script, Path) else "job.sh"
        copy = self._root / "scripts" / f"{os.getpid()}-{self._scripts}" / name
        copy.parent.mkdir()
        copy.write_text(text)
        return copy

    # --- Slurm's view of the nodes --------------------------------------------------------------

    def node_state(self, node: str) -> str:
        """What Slurm thinks of the node: IDLE, ALLOCATED, DOWN+NOT_RESPONDING, IDLE+DRAIN ..."""
        return self._states(node)[node]

    def node_states(self) -> dict[str, str]:
        return self._states("")

    def wait_node_state(self, node: str, is_right: Callable[[str], bool], timeout_s: float) -> str:
        """Wait until `is_right` accepts the node's state; returns that state."""

        def probe() -> str:
            return self.node_state(node)

        what = f"the state of {node} is as expected"
        return wait_until(probe, is_right, what=what, timeout_s=timeout_s)

    def wait_all_idle(self, timeout_s: float) -> None:
        """Wait until every node is up, idle and answering."""

        def not_idle() -> dict[str, str]:
            done = self._try("scontrol", "--oneliner", "show", "node")
            if done.returncode != 0:
                return {HEAD: done.stderr.strip()}
            states = _node_states(done.stdout)
            return {node: state for node, state in states.items() if state != "IDLE"}

        wait_until(not_idle, lambda d: not d, what="all nodes are idle", timeout_s=timeout_s)

    def reset(self, timeout_s: float = 180) -> None:
        """Undo all faults, end all jobs, and wait until every node is idle.

        What ended jobs left on the nodes stays there, for `leftovers` to find.
        """
        if not self._controllers():
            self.start_controller()
        for node in self.node_names:
            if self._nodes.is_on(node):
                self._nodes.set_link(node, up=True)
                self._nodes.direct(node)
                self._nodes.thaw(node)
        for job in self.squeue():
            self._try("scancel", str(job.job_id))
        off = [node for node in self.node_names if not self._nodes.is_on(node)]
        if off:
            self._nodes.start(off, timeout_s)
        self._bring_back(timeout_s)

    def _bring_back(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            queue = self.squeue()
            states = self.node_states()
            if not queue and all(state == "IDLE" for state in states.values()):
                return
            for node, state in states.items():
                if ("DOWN" in state and "NOT_RESPONDING" not in state) or "DRAIN" in state:
                    self._try("scontrol", "update", f"NodeName={node}", "State=RESUME")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all idle within {timeout_s:g} s: {states}, jobs {queue}")
            time.sleep(0.1)

    def _states(self, node: str) -> dict[str, str]:
        return _node_states(self._scontrol("--oneliner", "show", "node", *([node] if node else [])))

    def _scontrol(self, *arguments: str) -> str:
        return self._must("scontrol", *arguments)

    def _try(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return self.run_on(HEAD, argv)

    def _must(self, *argv: str, env: Mapping[str, str] | None = None) -> str:
        done = self.run_on(HEAD, argv, env=env)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(argv)} failed: {done.stderr.strip() or done.stdout}")
        return done.stdout


def _node_states(text: str) -> dict[str, str]:
    records = [fields_of(line) for line in text.splitlines() if line.strip()]
    return {record["NodeName"]: record["State"] for record in records}


def _as_list(mark: ProcessMark) -> list[int]:
    return [mark.pid, mark.started]


def _killer(pid: int) -> Callable[[], None]:
    mark = ProcessMark.of(pid)

    def kill() -> None:
        if mark.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    return kill


def _is_torchs_empty_cache(path: Path) -> bool:
    """Whether it is the folder that importing torch's compiler makes, never used."""
    if not path.name.startswith("torchinductor_"):
        return False
    with contextlib.suppress(OSError):  # It has just gone, or is no folder.
        return not any(path.iterdir())
    return False


def _remover(path: Path) -> Callable[[], None]:
    def remove() -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    return remove


if __name__ == "__main__":
    from mini_cluster_cli import main

    main()
