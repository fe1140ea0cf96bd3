"""``deadpool-launch`` itself: a small process that runs the launcher as its child, and again from
its journal when it ends as it should not.

It imports nothing that could fail for reasons of the child. It keeps what must not end with a
launcher: the socket to which the agents come back, and the processes that lose their parent. The
child tells when there is a job that can be gone on with; before that, its end is the end.

The second half is the child's side of this.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence

#: How often a launcher may be started again within the window; then the job is ended.
MOST_RESTARTS, WINDOW_S = 3, 600.0
#: A defect (``exits.ExitCode.INTERNAL``, which is not imported here).
_DEFECT = 70
#: Time for processes of a job that could not be ended in order, to end by themselves.
_LEFT_S = 10.0
#: In the child's environment: this process, and the descriptor of the child's end of the pair.
_VARIABLE = "DEADPOOL_SUPERVISOR"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
#: ``si_code`` of a signal that comes from the terminal; the child got it as well.
_SI_KERNEL = 0x80
_WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)


def main() -> None:
    """Entry point of ``deadpool-launch``."""
    sys.exit(supervise(["-m", "deadpool_launch.cli", *sys.argv[1:]]))


def supervise(first: Sequence[str]) -> int:
    """Run the launcher that these arguments of Python start; returns the exit code."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    # Passed on to a child that is not ready for it, it must not end it. Blocked, it arrives here.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.set_inheritable(True)
    environment = {**os.environ, _VARIABLE: f"{os.getpid()}:{theirs.fileno()}"}
    arguments, stopped_by, last = list(first), 0, False
    job: tuple[str, socket.socket] | None = None
    deaths: list[float] = []
    while True:
        argv = [sys.executable, "-P", *arguments]
        child = os.posix_spawn(sys.executable, argv, environment, setsigmask=())
        code, stopped_by = _wait(child, stopped_by)
        ended_at = time.monotonic()
        job = job or _job(ours)
        if (code >= 0 and code != _DEFECT) or job is None:
            return _shell_code(code)
        if last:
            return _give_up(job[1])
        run_dir, listening = job
        deaths = [at for at in deaths if at > ended_at - WINDOW_S] + [ended_at]
        last = bool(stopped_by) or len(deaths) > MOST_RESTARTS
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        arguments = ["-m", "deadpool_launch.resume", f"--ended={how}", f"--ended-at={ended_at}"]
        arguments += [f"--listening={listening.fileno()}", run_dir]
        if last:
            arguments += [f"--give-up={len(deaths)}", f"--stopped-by={stopped_by}"]


def _wait(child: int, stopped_by: int) -> tuple[int, int]:
    """The child's exit code (negative: the signal that ended it), and the signal that asked for the
    end last. Everything else that ends is an orphan of the job.
    """
    while True:
        arrived = signal.sigwaitinfo(_WATCHED)
        if arrived.si_signo == signal.SIGUSR1:
            os.kill(child, signal.SIGUSR1)
        elif arrived.si_signo != signal.SIGCHLD:
            stopped_by = arrived.si_signo
            if arrived.si_code != _SI_KERNEL:
                os.kill(child, stopped_by)
        code = None
        for pid, status in _ended():
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
        if code is not None:
            return code, stopped_by


def _ended() -> list[tuple[int, int]]:
    """The children that have ended, with their status."""
    found: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        found.append((pid, status))


def _job(ours: socket.socket) -> tuple[str, socket.socket] | None:
    """The run directory and the listening socket of the job that the child has begun, if any."""
    try:
        data, fds, _, _ = socket.recv_fds(ours, 1 << 16, 1)
    except BlockingIOError:
        return None
    listening = socket.socket(fileno=fds[0])
    listening.set_inheritable(True)
    return os.fsdecode(data), listening


def _give_up(listening: socket.socket) -> int:
    """Not even the end of the job could be brought about. Agents that find nobody at the port end
    their ranks and themselves; those on this machine are waited for.
    """
    print(
        "deadpool-launch: the launcher could not be started again; the job is over", file=sys.stderr
    )
    listening.close()
    deadline = time.monotonic() + _LEFT_S
    while time.monotonic() < deadline:
        _ended()
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            break
        time.sleep(0.05)
    return _DEFECT


def _shell_code(code: int) -> int:
    """As a shell says it: 128 and the signal."""
    return code if code >= 0 else 128 - code


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# ---------------------------------------------------------------- in the child

_supervisor: socket.socket | None = None


def attach() -> None:
    """Find out whether this process is a supervisor's child; called once, before anything else.

    A launcher whose supervisor ends is told to stop: nobody would start it again, or take its exit
    code.
    """
    global _supervisor
    pid, _, fd = os.environ.pop(_VARIABLE, "").partition(":")
    if not fd.isdecimal() or pid != str(os.getppid()):
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _supervisor = socket.socket(fileno=int(fd))
    _supervisor.set_inheritable(False)


def supervised() -> bool:
    """Whether this process is started again if it ends by a defect."""
    return _supervisor is not None


def keep(run_dir: str, listening: socket.socket) -> None:
    """From here on the job in this run directory can be gone on with."""
    if _supervisor is not None:
        socket.send_fds(_supervisor, [os.fsencode(run_dir)], [listening.fileno()])
