"""One launcher as a child process: shown while it runs, ended with all its nodes on a signal."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from deadpool_launch.display import Display
from deadpool_launch.exits import ExitCode
from deadpool_launch.follow import JournalTail
from deadpool_launch.view import Record, RunView

_POLL_S = 0.1
#: Ctrl-C: seconds that the launcher may take to end its nodes, then that killing may take.
_END_S = 7.0
_KILL_S = 2.0
#: Lines of the launcher's output that are kept.
_LAST_LINES = 25


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run that ended."""

    exit_code: int
    view: RunView
    run_dir: Path
    #: The last lines that the launcher wrote.
    last_lines: tuple[str, ...]


class Interrupted(Exception):
    """SIGINT or SIGTERM arrived; every process has been ended."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_code = ExitCode.INTERRUPTED if signum == signal.SIGINT else ExitCode.TERMINATED


class Interrupts:
    """Collects SIGINT and SIGTERM while entered, so that they are acted on where it is safe."""

    def __init__(self) -> None:
        self.arrived: list[int] = []

    def __enter__(self) -> Self:
        self._before = {
            signum: signal.signal(signum, lambda got, _: self.arrived.append(got))
            for signum in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)


def run_once(
    argv: Sequence[str], run_dir: Path, display: Display, interrupts: Interrupts
) -> Outcome:
    """Run the launcher ``argv``, whose run directory is ``run_dir``; show it while it lasts.

    Raises ``Interrupted`` if a signal arrived.
    """
    view, tail = RunView(), JournalTail(run_dir)
    output = run_dir.with_suffix(".out")
    with output.open("wb") as file:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process only, which passes it on once.
        )
    try:
        with display:
            while True:
                ended = _ended(process, _POLL_S)
                view.apply_all(without_run_dir(tail.records(), run_dir))
                display.show(view)
                if ended or interrupts.arrived:
                    break
    finally:
        end_process(process, interrupts)
    if interrupts.arrived:
        raise Interrupted(interrupts.arrived[0])
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    # As a shell says it: 128 + the signal that killed the launcher.
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return Outcome(code, view, run_dir, tuple(lines[-_LAST_LINES:]))


def without_run_dir(records: Iterable[Record], run_dir: Path) -> Iterator[Record]:
    """The records as they are to be shown: a rehearsal tells at its end which folders it leaves.

    So the run directory in the first lines is left out, and a line that only says where logs lie.
    """
    path = str(run_dir.resolve())
    for record in records:
        text = record.get("text", "")
        if record["kind"] != "say" or path not in text:
            yield record
        elif not text.endswith(f"{path}/logs"):
            yield {**record, "text": text.replace(f"; run directory {path}", "")}


def end_process(process: subprocess.Popen[bytes], interrupts: Interrupts) -> None:
    """End the launcher if it still runs: ask it first, then kill all that descends from it.

    A second signal of the user cuts the asking short.
    """
    if process.poll() is not None:
        return
    launcher = psutil.Process(process.pid)
    family = [launcher, *launcher.children(recursive=True)]
    process.send_signal(interrupts.arrived[0] if interrupts.arrived else signal.SIGTERM)
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline and len(interrupts.arrived) < 2:
        if _ended(process, _POLL_S):
            break
    else:
        with contextlib.suppress(psutil.NoSuchProcess):
            family += launcher.children(recursive=True)
    for member in family:
        # psutil checks the time of creation, so a reused process id is not hit.
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    psutil.wait_procs(family[1:], timeout=_KILL_S)


def _ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True
