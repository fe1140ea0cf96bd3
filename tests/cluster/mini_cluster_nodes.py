"""The nodes of a mini cluster below Slurm: start, kill, unplug, freeze them, run something there.

All state is in files under the cluster's directory and in the kernel, so that several processes
(the owner, a shell command of the user) can work on one cluster. A node's process ids are those
of the host throughout; every signal goes to one of them, never to a name.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

import psutil
from mini_cluster_settings import HEAD, address_of, hardware_address_of

_T = TypeVar("_T")
_INNER = Path(__file__).with_name("mini_cluster_inner.py")
_OWN_PROGRAMS = ("slurmd", "slurmctld", "slurmstepd", "munged")


def inner_program(*arguments: str) -> list[str]:
    """The command that runs one of the programs of `mini_cluster_inner.py`."""
    return [sys.executable, "-I", "-S", str(_INNER), *arguments]


def wait_until(
    probe: Callable[[], _T],
    is_right: Callable[[_T], bool],
    *,
    what: str,
    timeout_s: float,
    interval_s: float = 0.1,
) -> _T:
    """Call `probe` until `is_right` accepts what it returns, and return that."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = probe()
        if is_right(value):
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}; last seen: {value!r}")
        time.sleep(interval_s)


@dataclass(frozen=True)
class ProcessMark:
    """A process id together with its start time, so that a reused id is never mistaken for it."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> ProcessMark:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return cls(pid, int(fields[19]))

    def is_alive(self) -> bool:
        """Whether this very process is there and not merely waiting to be collected."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return int(fields[19]) == self.started and fields[0] not in "ZX"


@dataclass(frozen=True)
class NodeProcess:
    """A process inside a node, seen from the host."""

    pid: int  #: On the host: what `os.kill` of a test takes.
    pid_in_node: int  #: What the process itself sees as its id.
    name: str
    cmdline: str
    #: The Slurm job it belongs to, by its environment or, for slurmstepd, its title.
    job_id: int | None


class Nodes:
    """The nodes of one cluster, by name; the head is one of them."""

    def __init__(
        self,
        root: Path,
        outer: ProcessMark,
        visible: Sequence[Path],
        variables: Mapping[str, str] | None = None,
    ) -> None:
        #: What the environment of every node has besides.
        self.variables = dict(variables or {})
        self._root = root
        self._outer = outer
        self._visible = [str(path) for path in visible]
        self._starters: dict[str, subprocess.Popen[bytes]] = {}

    # --- life -----------------------------------------------------------------------------------

    def start(self, names: Sequence[str], timeout_s: float) -> None:
        """Switch the nodes on, all at once; returns when the slurmd of each runs."""
        deadline = time.monotonic() + timeout_s
        for name in names:
            self._starters[name] = self._spawn(name)
        for name in names:
            starter = self._starters[name]
            self._expect(name, b"ready", deadline)
            first = _only_child(_only_child(starter.pid))
            self._write_mark(name, ProcessMark.of(first))
        self._plug_in([name for name in names if name != HEAD])
        for name in names:
            stdin = self._starters[name].stdin
            assert stdin is not None
            stdin.write(b"go\n")
            stdin.close()
        for name in names:
            self._expect(name, b"up", deadline)
            stdout = self._starters[name].stdout
            assert stdout is not None
            stdout.close()

    def kill(self, name: str) -> None:
        """Kill every process of the node at once; returns when all are gone."""
        mark = self._read_mark(name)
        if mark is not None and mark.is_alive():
            with contextlib.suppress(ProcessLookupError):
                _kill_and_wait(mark.pid)
        starter = self._starters.pop(name, None)
        if starter is not None:
            starter.wait()
        self._mark_file(name).unlink(missing_ok=True)
        self._unplug(name)

    def is_on(self, name: str) -> bool:
        mark = self._read_mark(name)
        return mark is not None and mark.is_alive()

    def first_pid(self, name: str) -> int:
        """The host's id of the node's first process."""
        mark = self._read_mark(name)
        if mark is None or not mark.is_alive():
            raise RuntimeError(f"node {name} is off")
        return mark.pid

    def forget(self) -> None:
        """Collect what is left of the starters after the guardian has killed all nodes."""
        for starter in self._starters.values():
            starter.wait()
            for pipe in (starter.stdin, starter.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        self._starters.clear()

    def _spawn(self, name: str) -> subprocess.Popen[bytes]:
        addresses = (address_of(name), hardware_address_of(name))
        node = inner_program("node", name, *addresses, str(self._root / "etc"), *self._visible)
        with open(self._root / "logs" / f"{name}.log", "ab") as log:
            return subprocess.Popen(
                ["nsenter", "-p", "-t", str(self._outer.pid), "--", *node],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd="/",
                env=merged_environment(self.variables),
                start_new_session=True,
            )

    def _expect(self, name: str, word: bytes, deadline: float) -> None:
        stdout = self._starters[name].stdout
        assert stdout is not None
        line = _read_line(stdout, deadline)
        if line.strip() != word:
            log = (self._root / "logs" / f"{name}.log").read_text()[-2000:]
            raise RuntimeError(
                f"node {name} did not start ({word!r} expected, {line!r} got): {log}"
            )

    def _mark_file(self, name: str) -> Path:
        return self._root / "run" / f"{name}.json"

    def _write_mark(self, name: str, mark: ProcessMark) -> None:
        self._mark_file(name).write_text(json.dumps([mark.pid, mark.started]))

    def _read_mark(self, name: str) -> ProcessMark | None:
        try:
            return ProcessMark(*json.loads(self._mark_file(name).read_text()))
        except FileNotFoundError:
            return None

    # --- network --------------------------------------------------------------------------------

    def set_link(self, name: str, up: bool) -> None:
        """Plug or pull the node's network cable, at the switch's end."""
        self._ip(f"link set {_port(name)} {'up' if up else 'down'}")

    def misdirect(self, name: str, others: Iterable[str]) -> None:
        """Let the node send what is for the others to a hardware address that nobody has."""
        nowhere = ["lladdr", "02:de:ad:00:ff:ff", "nud", "permanent", "dev", "eth0"]
        for other in others:
            self._neighbours(name, "replace", address_of(other), *nowhere)

    def direct(self, name: str) -> None:
        """Undo ``misdirect``: the node asks again who has which address."""
        self._neighbours(name, "flush", "dev", "eth0", "nud", "permanent")

    def _neighbours(self, name: str, *words: str) -> None:
        enter = ["nsenter", "-n", "-t", str(self.first_pid(name)), "--"]
        subprocess.run([*enter, "ip", "neigh", *words], check=True, env=node_environment())

    def link_is_up(self, name: str) -> bool:
        done = self._ip_command("-o", "link", "show", _port(name))
        return ",UP" in done.stdout or "<UP" in done.stdout

    def _plug_in(self, names: Iterable[str]) -> None:
        lines = []
        for name in names:
            first = self.first_pid(name)
            lines += [
                f"link add {_port(name)} type veth peer name eth0"
                f" address {hardware_address_of(name)} netns {first}",
                f"link set {_port(name)} addrgenmode none",
                f"link set {_port(name)} master br0 up",
            ]
        if lines:
            self._ip(*lines)

    def _unplug(self, name: str) -> None:
        """Remove the cable of a dead node: its kernel must not answer for closed sockets."""

        def try_to_remove() -> bool:
            if _port(name) in Path(f"/proc/{self.first_pid(HEAD)}/net/dev").read_text():
                self._ip_command("link", "del", _port(name))
                return False
            return True

        if name != HEAD and self.is_on(HEAD):
            what = f"the link of {name} goes away"
            wait_until(try_to_remove, bool, what=what, timeout_s=60, interval_s=0.02)

    def _ip(self, *lines: str) -> None:
        done = self._ip_command("-batch", "-", text="\n".join(lines))
        if done.returncode != 0:
            raise RuntimeError(f"ip failed on {lines}: {done.stderr}")

    def _ip_command(self, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        command = ["nsenter", "-n", "-t", str(self.first_pid(HEAD)), "--", "ip", *arguments]
        environment = node_environment()
        return subprocess.run(command, input=text, text=True, capture_output=True, env=environment)

    # --- processes ------------------------------------------------------------------------------

    def command(self, name: str, argv: Sequence[str], cwd: Path, *, tie: bool = True) -> list[str]:
        """The host command line that runs `argv` inside the node.

        With `tie`, killing the host's process kills the one inside as well.
        """
        enter = ["nsenter", "-n", "-u", "-i", "-m", "-p", "-t", str(self.first_pid(name)), "--"]
        tied = ["setpriv", "--pdeathsig", "KILL"] if tie else []
        return [*enter, *tied, "env", f"--chdir={cwd}", *argv]

    def processes(self, name: str) -> list[NodeProcess]:
        """Every process of the node but its first; an empty list when it is off."""
        if not self.is_on(name):
            return []
        first = self.first_pid(name)
        try:
            namespace = os.readlink(f"/proc/{first}/ns/pid")
        except OSError:
            return []
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.Error):
                if pid != first and os.readlink(f"/proc/{pid}/ns/pid") == namespace:
                    found.append(_describe(pid))
        return found

    def freeze(self, name: str) -> None:
        """Stop every process of the node but its first one."""

        def stop_one_more_time() -> int:
            running = [p.pid for p in self.processes(name) if not _is_stopped(p.pid)]
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            return len(running)

        what = f"all processes of {name} stop"
        wait_until(stop_one_more_time, lambda n: n == 0, what=what, timeout_s=60, interval_s=0.01)

    def thaw(self, name: str) -> None:
        """Let every process of the node go on."""
        for process in self.processes(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)

    def is_own_daemon(self, process: NodeProcess) -> bool:
        """Whether it is one of Slurm's or munge's own programs, by its executable."""
        try:
            program = os.path.basename(os.readlink(f"/proc/{process.pid}/exe"))
        except OSError:
            return process.name.startswith(_OWN_PROGRAMS)
        return program.startswith(_OWN_PROGRAMS)

    def private_files(self, name: str) -> list[Path]:
        """What lies in the node's own /dev/shm and /tmp, as paths that work on the host."""
        if not self.is_on(name):
            return []
        inside = Path(f"/proc/{self.first_pid(name)}/root")
        found: list[Path] = []
        for top in ("dev/shm", "tmp"):
            with contextlib.suppress(FileNotFoundError):
                found += [
                    path for path in (inside / top).iterdir() if not self._is_shared(top, path)
                ]
        return found

    def _is_shared(self, top: str, path: Path) -> bool:
        seen_inside = f"/{top}/{path.name}"
        return any(v == seen_inside or v.startswith(seen_inside + "/") for v in self._visible)


def node_environment() -> dict[str, str]:
    """A clean environment: only what a fresh login has, with this interpreter's folder first, and
    the Python path by which a checkout other than the installed one is tested.
    """
    own = os.path.dirname(sys.executable)
    path = os.environ.get("PYTHONPATH")
    return {
        **({"PYTHONPATH": path} if path else {}),
        "PATH": f"{own}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": os.environ.get("HOME", "/root"),
        "USER": "root",
        "LANG": "C.UTF-8",
        "TERM": os.environ.get("TERM", "dumb"),
    }


def merged_environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    return {**node_environment(), **(extra or {})}


def _port(name: str) -> str:
    """The switch's end of a node's cable."""
    return f"port-{name}"


def _only_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _kill_and_wait(pid: int) -> None:
    descriptor = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        if not poller.poll(60_000):
            raise TimeoutError(f"process {pid} does not end after SIGKILL")
    finally:
        os.close(descriptor)


def _read_line(stream: IO[bytes], deadline: float) -> bytes:
    """One short line, or what came of it before the end of the stream or the deadline."""
    line = b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([stream], [], [], left)[0]:
            break
        piece = os.read(stream.fileno(), 1)
        if not piece:
            break
        line += piece
    return line


def _is_stopped(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status in "TtZX"


def _describe(pid: int) -> NodeProcess:
    process = psutil.Process(pid)
    cmdline = " ".join(process.cmdline()) or f"[{process.name()}]"
    in_node = 0
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            in_node = int(line.split()[-1])
    job = process.environ().get("SLURM_JOB_ID", "")
    if cmdline.startswith("slurmstepd: ["):
        job = cmdline.removeprefix("slurmstepd: [").partition(".")[0]
    return NodeProcess(pid, in_node, process.name(), cmdline, int(job) if job.isdigit() else None)
