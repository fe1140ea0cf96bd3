"""Mappings of arena files, shared by the threads of a process.

A mapping is made once and replaced when its file has grown or is another one; views of an older
mapping stay valid and free it with the last of them.
"""

from __future__ import annotations

import mmap
import os
import threading

from deadpool_runtime.replication.carriers.base import Range


class Maps:
    """Views of ranges of files, to be read and written."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._maps: dict[str, tuple[tuple[int, int, int], mmap.mmap]] = {}

    def view(self, place: Range) -> memoryview:
        """The bytes of the range; ``OSError`` if the file is not there or too short."""
        info = os.stat(place.path)
        now = (info.st_dev, info.st_ino, info.st_size)
        with self._lock:
            known = self._maps.get(place.path)
            if known is None or known[0] != now:
                known = self._maps[place.path] = (now, _map(place.path, info.st_size))
        end = place.offset + place.nbytes
        if place.offset < 0 or place.nbytes < 0 or end > len(known[1]):
            raise OSError(f"{place.path} has {len(known[1])} bytes, not {end}")
        return memoryview(known[1])[place.offset : end]


def _map(path: str, nbytes: int) -> mmap.mmap:
    if nbytes == 0:
        raise OSError(f"{path} is empty")
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return mmap.mmap(handle, nbytes)
    finally:
        os.close(handle)
