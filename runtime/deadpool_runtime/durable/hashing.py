"""Hashes of what is in files: of a file as a whole, and of segments by their chunks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import islice
from typing import BinaryIO

import msgspec
import xxhash

from deadpool_runtime.replication.manifest import CHUNK_NBYTES, Entry, Segment, chunks_of

#: Files are hashed and written in pieces of this size.
PIECE_NBYTES = 4 << 20


class FileSum(msgspec.Struct, frozen=True):
    """Size and hash of a whole file; ``xxh3_128`` has 32 hexadecimal digits."""

    nbytes: int
    xxh3_128: str


def sum_of(data: bytes) -> FileSum:
    """The sum of a file with this content."""
    return FileSum(len(data), xxhash.xxh3_128_hexdigest(data))


def sum_of_file(file: BinaryIO) -> FileSum:
    """The sum of a file that was just opened; leaves it at its beginning."""
    digest, nbytes = xxhash.xxh3_128(), 0
    piece = memoryview(bytearray(PIECE_NBYTES))
    while got := file.readinto(piece):  # type: ignore[attr-defined]
        digest.update(piece[:got])
        nbytes += got
    file.seek(0)
    return FileSum(nbytes, digest.hexdigest())


class SummingFile:
    """A file to write, hashed on the way: what the sum says never came back from the disk.

    ``before_piece`` is called before each piece is written; what it raises ends the writing.
    """

    def __init__(self, file: BinaryIO, before_piece: Callable[[], None]) -> None:
        self._file = file
        self._before_piece = before_piece
        self._digest = xxhash.xxh3_128()
        self._nbytes = 0

    def write(self, data: bytes | memoryview) -> int:
        """Append ``data``."""
        view = memoryview(data).cast("B")
        for at in range(0, len(view), PIECE_NBYTES):
            piece = view[at : at + PIECE_NBYTES]
            self._before_piece()
            self._digest.update(piece)
            self._file.write(piece)
        self._nbytes += len(view)
        return len(view)

    def tell(self) -> int:
        """How many bytes were written."""
        return self._nbytes

    def flush(self) -> None:
        """Hand what is buffered here to the operating system."""
        self._file.flush()

    def fileno(self) -> int:
        """The file's descriptor, with nothing left in the buffer, as ``os.fsync`` needs it."""
        self._file.flush()
        return self._file.fileno()

    def close(self) -> None:
        """Write what is in the buffer and close the file."""
        self._file.close()

    def sum(self) -> FileSum:
        """The sum of what was written so far."""
        return FileSum(self._nbytes, self._digest.hexdigest())


def first_wrong_chunk(
    segment: Segment, data: Mapping[str, memoryview], keys: Collection[str] | None = None
) -> int | None:
    """The first chunk of the segment whose bytes do not have the manifest's hash, if any.

    ``data``: the bytes of entries, by key. A chunk is checked if every entry that reaches into it
    is there, and at least one of ``keys`` if given. What lies between entries counts as zeros.
    """
    entries = sorted((each for each in segment.entries if each.nbytes), key=lambda e: e.offset)
    first = 0
    for index in range(chunks_of(segment.nbytes)):
        begin, end = index * CHUNK_NBYTES, min((index + 1) * CHUNK_NBYTES, segment.nbytes)
        while first < len(entries) and entries[first].offset + entries[first].nbytes <= begin:
            first += 1
        reaching = []
        for entry in islice(entries, first, None):
            if entry.offset >= end:
                break
            reaching.append(entry)
        known = all(entry.key in data for entry in reaching)
        wanted = keys is None or any(entry.key in keys for entry in reaching)
        if known and wanted and _digest(reaching, begin, end, data) != segment.hashes[index]:
            return index
    return None


def _digest(entries: list[Entry], begin: int, end: int, data: Mapping[str, memoryview]) -> bytes:
    """The hash of a segment from ``begin`` to ``end``, where these entries lie."""
    digest, at = xxhash.xxh3_128(), begin
    for entry in entries:
        start, stop = max(begin, entry.offset), min(end, entry.offset + entry.nbytes)
        digest.update(bytes(start - at))
        digest.update(data[entry.key][start - entry.offset : stop - entry.offset])
        at = stop
    digest.update(bytes(end - at))
    return digest.digest()
