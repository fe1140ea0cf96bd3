"""The journal on a disk that becomes full."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from deadpool_launch import journal
from deadpool_launch.journal import Journal


def test_line_that_a_full_disk_cuts_off_does_not_spoil_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    room = 10**6

    def limited(fd: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = write(fd, data[:room])
        room -= count
        return count

    monkeypatch.setattr(os, "write", limited)
    kept = Journal(tmp_path, lambda line: None)
    kept.write("first")
    room = 20
    kept.write("second", text="longer than the room that is left")
    room = 0
    kept.write("third")
    room = 10**6
    kept.write("fourth")
    kept.close()
    assert [record["kind"] for record in journal.read(tmp_path)] == ["first", "fourth"]
    assert kept.lost_lines == 2
