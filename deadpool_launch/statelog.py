"""The file from which a launcher that ended is started again: ``launcher.state`` in the run
directory.

It begins with all that was known at one time (``persist.Kept``), then has every event since, each
written before it is answered. When the events take more room than they should, a new file with what
is known then takes its place; so it stays small however long the job runs.

What is written is with the system at once, so that it outlives the launcher, however that ends. It
is not forced to the disk event by event: a host that loses power may lose the last of it, and its
launcher with it. Only the beginning of a file is.

Each record is a letter, the length and the checksum of its body and a checksum of these three, then
the body. A last one that is not whole was being written when the launcher ended: nothing had been
done about it.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deadpool_launch.controller import persist
from deadpool_launch.controller.events import Event

STATE_NAME = "launcher.state"
#: Room that events may take before a new file is begun, as multiples of its beginning, and at
#: least.
_TIMES_BEGINNING = 4
_LEAST_NBYTES = 1 << 20
_HEAD = struct.Struct("!cII")
_CHECK = struct.Struct("!I")
_HEAD_NBYTES = _HEAD.size + _CHECK.size


class NoStateLog(Exception):
    """There is no file to start again from, or it cannot be read; the text says why."""


@dataclass(frozen=True, slots=True)
class Read:
    """What a file of a launcher that ended has in it."""

    #: What the launcher's caller put there.
    job: bytes
    kept: persist.Kept
    entries: list[persist.Entry] = field(default_factory=list)
    #: Bytes at the end that were no whole record.
    torn_nbytes: int = 0


class StateLog:
    """Writes the file. ``job``: goes into each one unchanged, for those who start the launcher
    again.

    ``on_record(data, fresh)`` gets each record for copies elsewhere; a fresh one begins a new file.

    A disk that takes no more costs the possibility to start again, never the job: the file is
    removed, since what lacks events would be wrong, and ``on_lost`` is told why, once.
    """

    def __init__(self, path: Path, job: bytes, on_lost: Callable[[str], None]) -> None:
        self._path = path
        self._job = job
        self._on_lost = on_lost
        self.on_record: Callable[[bytes, bool], None] = lambda data, fresh: None
        self._fd: int | None = None
        self._beginning_nbytes = 0
        self._events_nbytes = 0
        self._lost = False

    @property
    def full(self) -> bool:
        """It is time for ``begin``."""
        most = max(_LEAST_NBYTES, _TIMES_BEGINNING * self._beginning_nbytes)
        return self._events_nbytes > most

    def begin(self, kept: persist.Kept) -> None:
        """Put a new file in the place of the one before, or of none."""
        data = _record(b"J", self._job) + _record(b"K", persist.encode_kept(kept))
        self._beginning_nbytes, self._events_nbytes = len(data), 0
        self.on_record(data, True)
        if self._lost:
            return
        fresh = self._path.with_name(f".{self._path.name}")
        try:
            fresh.unlink(missing_ok=True)
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            old, self._fd = self._fd, fd
            if old is not None:
                os.close(old)
            _write(fd, data)
            os.fsync(fd)
            fresh.rename(self._path)
        except OSError as error:
            self._lose(error)

    def event(self, event: Event, number: int) -> None:
        """Add an event that is about to be answered."""
        self._append(_record(b"E", persist.encode_event(event, number)))

    def started(self, node: str, handle: dict[str, Any]) -> None:
        """Add that an agent was started."""
        self._append(_record(b"S", persist.encode_started(node, handle)))

    def remove(self) -> None:
        """The job has its verdict: nothing is to be started again."""
        self._lost = True
        self._drop()

    def _append(self, data: bytes) -> None:
        self._events_nbytes += len(data)
        self.on_record(data, False)
        if self._fd is None:
            return
        try:
            _write(self._fd, data)
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        self._lost = True
        self._drop()
        self._on_lost(error.strerror or str(error))

    def _drop(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
            self._path.with_name(f".{self._path.name}").unlink(missing_ok=True)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def read(path: Path) -> Read:
    """What the file has in it; raises ``NoStateLog``."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise NoStateLog(f"{path} cannot be read ({error.strerror})") from error
    records, end = _records(data)
    if end is None:
        raise NoStateLog(f"{path} is damaged behind its record number {len(records)}")
    try:
        if len(records) < 2 or [kind for kind, _ in records[:2]] != [b"J", b"K"]:
            raise NoStateLog(f"{path} is damaged: its beginning is not whole")
        kept = persist.decode_kept(records[1][1])
        entries: list[persist.Entry] = [
            persist.decode_event(body) if kind == b"E" else persist.decode_started(body)
            for kind, body in records[2:]
        ]
    except persist.NotReadable as error:
        raise NoStateLog(f"{path} cannot be used: {error}") from error
    return Read(records[0][1], kept, entries, len(data) - end)


def _records(data: bytes) -> tuple[list[tuple[bytes, bytes]], int | None]:
    """The whole records, and where they end; None if what follows is not the beginning of one."""
    records: list[tuple[bytes, bytes]] = []
    end = 0
    while len(data) - end >= _HEAD_NBYTES:
        head = data[end : end + _HEAD.size]
        kind, nbytes, checksum = _HEAD.unpack(head)
        if _CHECK.pack(zlib.crc32(head)) != data[end + _HEAD.size : end + _HEAD_NBYTES]:
            return records, None
        body = data[end + _HEAD_NBYTES : end + _HEAD_NBYTES + nbytes]
        if len(body) < nbytes:
            break
        if zlib.crc32(body) != checksum:
            return records, None
        records.append((kind, body))
        end += _HEAD_NBYTES + nbytes
    return records, end


def _record(kind: bytes, body: bytes) -> bytes:
    head = _HEAD.pack(kind, len(body), zlib.crc32(body))
    return head + _CHECK.pack(zlib.crc32(head)) + body


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
