"""The job's append-only record in its run directory, one JSON object a line.

Every line has ``at`` (seconds since the epoch, launcher's clock) and ``kind``; ``read`` gives them
back in order. The launcher's log for people (``deadpool.log``) is written beside it. Nothing is
decided from either; for what a launcher is started again from see ``statelog.py``. Kinds:

- ``job``: the plan (nodes, ranks, script, versions, ``pid`` of the launcher); first line.
- ``launcher``: the launcher was started again (``term``: which one it is, the first is 1, ``pid``,
  ``ended``: how the one before ended, ``node``: where it is, if that is another host). On another
  host it may note again what the one before noted last, as that host's death cut the copy short.
- ``say``: a line for people.
- ``rank``: a rank's process exists (``rank``, ``node``, ``pid``, ``epoch``).
- ``step``: a rank completed a step (``rank``, ``step``, ``epoch``, ``duration_s``, ``blocked_s``,
  ``loss``, ``unprotected``: steps of the process so far that had no confirmed replica before them,
  ``confirmed``: the newest step of which the rank had a confirmed replica then).
- ``node``: a node is something else to the job than before (``node``, ``role``: see
  ``controller.roles``, ``why``, ``lasting``: the next job should do without it). At the beginning
  it is what the ``job`` record says.
- ``incident``: an incident was opened (``planned``: nobody was lost), reached a phase, or was
  closed (``number``, ``phase``, ``detail``). The phase ``redundancy restored`` may come after
  ``closed``.
- ``checkpoint``: a durable checkpoint was committed (``step``, ``epoch`` of the copies,
  ``directory``, ``kept``: the steps of all that are complete now, ``commit_s``) or could not be
  (``failed``: why).
- ``fault``: a rehearsal injected a fault (``fault``, ``node`` or ``rank``).
- ``final``: digests of a rank's final state (``rank``, ``step``, ``parts``).
- ``event``: anything else the controller was told (``name`` and its fields).
- ``end``: the verdict (``verdict``, ``exit_code``, ``reason``, ``exclude``: nodes that the next job
  should do without); last line.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

JOURNAL_NAME = "journal.jsonl"
LOG_NAME = "deadpool.log"
_LONGEST_LINE_NBYTES = 64 << 20


class Journal:
    """Appends to the journal and the log; both are flushed line by line.

    A full disk or a closed terminal costs lines, never the job: writing fails silently from then
    on, and ``lost_lines`` counts what is missing.
    """

    def __init__(self, run_dir: Path, echo: Callable[[str], None]) -> None:
        #: Bytes of a last line that an earlier launcher did not come to write whole; cut off.
        self.torn_nbytes = _cut_torn_line(run_dir / JOURNAL_NAME)
        self._journal = _open_private(run_dir / JOURNAL_NAME)
        self._log = _open_private(run_dir / LOG_NAME)
        self._echo = echo
        self.lost_lines = 0

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record with the current time."""
        record = {"at": round(time.time(), 6), "kind": kind, **fields}
        self._append(self._journal, json.dumps(record, separators=(",", ":")))

    def say(self, text: str) -> None:
        """Tell the user: to the terminal, the log and the journal."""
        self.write("say", text=text)
        line = f"{time.strftime('%H:%M:%S')} {text}"
        self._append(self._log, line)
        try:
            self._echo(line)
        except OSError:
            self.lost_lines += 1

    def _append(self, fd: int, line: str) -> None:
        whole = data = (line + "\n").encode()
        try:
            while data:
                data = data[os.write(fd, data) :]
        except OSError:
            self.lost_lines += 1
            # What did get in would be the beginning of the next line.
            with contextlib.suppress(OSError):
                os.ftruncate(fd, os.fstat(fd).st_size - (len(whole) - len(data)))

    def close(self) -> None:
        """Write out everything and close both files."""
        for fd in (self._journal, self._log):
            with contextlib.suppress(OSError):
                os.fsync(fd)
            os.close(fd)


def _open_private(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _cut_torn_line(path: Path) -> int:
    """Cut off a last line without an end; returns how many bytes it had."""
    try:
        whole_nbytes = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, whole_nbytes - _LONGEST_LINE_NBYTES))
            data = file.read()
        nbytes = len(data) - (data.rfind(b"\n") + 1)
        if nbytes:
            os.truncate(path, whole_nbytes - nbytes)
    except OSError:
        return 0
    return nbytes


def read(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The journal's records so far, in order. A last line still being written is left out, and so
    is what a disk made of a line that is no record.
    """
    path = run_dir / JOURNAL_NAME
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            record = record_of(line) if line.endswith(b"\n") else None
            if record is not None:
                yield record


def record_of(line: bytes) -> dict[str, Any] | None:
    """The record that a whole line is; None if it is none."""
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        try:
            # A loss that is no number is written as no JSON has it.
            record = json.loads(line)
        except (ValueError, RecursionError):
            return None
    return record if isinstance(record, dict) else None
