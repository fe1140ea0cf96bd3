"""One copy of one rank's state in a file that processes share: the slot.

Its first page is the header. A copy counts only while the header is valid, so the header is wiped
before anything else of the slot changes and written when all else is in place:

    page 0                            header: magic, length, msgpack, hash of these
    offsets(segments, present)        each present segment, then the own part
    the next page after the own part  the manifest; its hash is in the header

The header also carries a random number, so that a reader who finds it unchanged after reading the
manifest knows that both belong together. Nothing here imports torch.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from deadpool_runtime.replication.manifest import (
    ALIGN_NBYTES,
    CHUNK_NBYTES,
    OWN,
    Manifest,
    Segment,
    aligned,
    chunk_hash,
    chunks_of,
    offsets,
)
from deadpool_runtime.replication.memory import free_memory

#: Files grow in steps of this, so that an own part that grows a little needs no new mapping.
GROWTH_NBYTES = 64 << 10
_MAGIC = b"DPSLOT1\0"
_PREFIX = struct.Struct("<8sI")
_HASH_NBYTES = 16
#: Room that ``prepare`` leaves for the own part, and for each tensor's entry in the manifest.
_OWN_NBYTES = 256 << 10
_ENTRY_NBYTES = 160


class ArenaFull(RuntimeError):
    """There is no room in /dev/shm for a copy of the state."""


class _Header(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    step: int
    epoch: int
    present: tuple[int, ...]
    manifest_nbytes: int
    manifest_offset: int
    manifest_hash: bytes
    nonce: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(_Header).decode
_decode_manifest = msgspec.msgpack.Decoder(Manifest).decode


class SlotFile:
    """One slot. A single process writes it at a time; any number may read its header.

    Growing makes a new mapping. Views of the older one stay valid, show the same bytes, and free it
    when the last of them is gone; ``generation`` counts the mappings.
    """

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self.generation = 0
        self._handle = handle
        self._map: mmap.mmap | None = None
        self._mapped = 0
        self._segments: tuple[Segment, ...] = ()
        self._places: dict[int, int] = {}
        self._own_nbytes = 0

    @classmethod
    def open(cls, path: Path, create: bool = False) -> SlotFile:
        """The slot at ``path``; FileNotFoundError if it is not there and may not be made."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        return cls(path, os.open(path, flags, 0o600))

    def close(self) -> None:
        """Let go of the file; views of it stay valid."""
        if self._handle >= 0:
            os.close(self._handle)
        self._handle, self._map, self._mapped = -1, None, 0

    def __enter__(self) -> SlotFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_in_place(self) -> bool:
        """Whether the path still leads to this very file."""
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            return False
        here = os.fstat(self._handle)
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)

    # ------------------------------------------------------------ memory

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return os.fstat(self._handle).st_size

    @property
    def address(self) -> int:
        """Where the file begins in this process's memory, in the present mapping."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._mapping(ALIGN_NBYTES)))

    @property
    def mapping(self) -> mmap.mmap:
        """The present mapping, to keep it alive; never close it."""
        return self._mapping(ALIGN_NBYTES)

    def ensure(self, nbytes: int) -> None:
        """Make the file and the mapping at least ``nbytes`` long; ArenaFull if there is no room."""
        present = self.nbytes
        if present < nbytes:
            target = -(-nbytes // GROWTH_NBYTES) * GROWTH_NBYTES
            try:
                # Takes the memory now. After a mere ftruncate the lack of it would be a SIGBUS.
                os.posix_fallocate(self._handle, present, target - present)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                    raise
                raise _full(self.path, target - present) from None
        self._mapping(nbytes)

    def _mapping(self, nbytes: int) -> mmap.mmap:
        """The mapping, made anew if it is shorter than ``nbytes``, never longer than the file."""
        if self._map is None or self._mapped < nbytes:
            size = self.nbytes
            if size < nbytes:
                raise ValueError(f"{self.path} has {size} bytes, not {nbytes}")
            # The older mapping is dropped, not closed: it may have views.
            self._map, self._mapped = mmap.mmap(self._handle, size), size
            self.generation += 1
        return self._map

    def view(self, offset: int, nbytes: int) -> memoryview:
        """These bytes of the file, to be read and written."""
        return memoryview(self._mapping(offset + nbytes))[offset : offset + nbytes]

    # ------------------------------------------------------------ parts

    def prepare(self, segments: tuple[Segment, ...], present: tuple[int, ...]) -> None:
        """Make the slot hold nothing, with room for these segments; ``segment_view`` and
        ``chunk_view`` then give where to write them.

        There is room for a usual own part and the manifest too, so that sealing needs no new
        mapping, which would have to be page-locked again.
        """
        self.invalidate()
        self._lay_out(segments, present, 0)
        self.ensure(room_for(segments, present, 0))

    def _lay_out(
        self, segments: tuple[Segment, ...], present: tuple[int, ...], own_nbytes: int
    ) -> None:
        self._segments, self._own_nbytes = segments, own_nbytes
        self._places = offsets(segments, present)

    def place_of(self, index: int) -> int:
        """Where a segment (or ``OWN``) of the copy that was last prepared, sealed or read begins
        in the file; KeyError if the slot does not have it.
        """
        return self._places[index]

    def segment_view(self, index: int) -> memoryview:
        """The bytes of a segment; see ``place_of``."""
        return self.view(self._places[index], self._segments[index].nbytes)

    def chunk_view(self, index: int, chunk: int) -> memoryview:
        """The bytes of a chunk of a segment; see ``place_of``."""
        start = chunk * CHUNK_NBYTES
        nbytes = min(CHUNK_NBYTES, self._segments[index].nbytes - start)
        if start < 0 or nbytes <= 0:
            raise IndexError(f"segment {index} has no chunk {chunk}")
        return self.view(self._places[index] + start, nbytes)

    def own_bytes(self) -> bytes:
        """The own part of the copy that was last sealed or read."""
        return bytes(self.view(self._places[OWN], self._own_nbytes))

    # ------------------------------------------------------------ seal

    def invalidate(self) -> None:
        """The slot holds nothing from here on."""
        if self.nbytes >= ALIGN_NBYTES:
            self.view(0, ALIGN_NBYTES)[:] = bytes(ALIGN_NBYTES)

    def seal(self, manifest: Manifest, present: tuple[int, ...], own: bytes | None) -> None:
        """Declare the copy whole: the present segments are in place already, and so is the own part
        if ``own`` is None.
        """
        self.invalidate()
        self._lay_out(manifest.segments, present, manifest.own_nbytes)
        encoded = _encode(manifest)
        own_at = self._places[OWN]
        manifest_at = own_at + aligned(manifest.own_nbytes)
        self.ensure(manifest_at + len(encoded))
        if own is not None:
            self.view(own_at, len(own))[:] = own
        self.view(manifest_at, len(encoded))[:] = encoded
        header = _encode(
            _Header(
                rank=manifest.rank,
                step=manifest.step,
                epoch=manifest.epoch,
                present=tuple(sorted(present)),
                manifest_nbytes=len(encoded),
                manifest_offset=manifest_at,
                manifest_hash=chunk_hash(encoded),
                nonce=secrets.token_bytes(8),
            )
        )
        page = _PREFIX.pack(_MAGIC, len(header)) + header
        page += chunk_hash(page)
        if len(page) > ALIGN_NBYTES:
            raise ValueError(f"{len(present)} segments are too many for the header of a slot")
        self.view(0, len(page))[:] = page

    def read(self) -> tuple[Manifest, tuple[int, ...]] | None:
        """What the slot holds, from header and manifest; None if that is nothing, or damaged.

        Reads through the file, not the mapping, so a file that is too short is no danger.
        """
        page = os.pread(self._handle, ALIGN_NBYTES, 0)
        header = _header_in(page)
        if header is None or not self._has(header):
            return None
        encoded = os.pread(self._handle, header.manifest_nbytes, header.manifest_offset)
        if chunk_hash(encoded) != header.manifest_hash:
            return None
        try:
            manifest = _decode_manifest(encoded)
        except (msgspec.MsgspecError, RecursionError):
            return None
        if not _fits(header.present, manifest):
            return None
        if os.pread(self._handle, ALIGN_NBYTES, 0) != page:
            return None
        self._lay_out(manifest.segments, header.present, manifest.own_nbytes)
        return manifest, header.present

    def _has(self, header: _Header) -> bool:
        """Whether the manifest lies in the file, so that it can be read without a second thought
        about its length.
        """
        at, nbytes = header.manifest_offset, header.manifest_nbytes
        return at >= 0 and 0 <= nbytes <= self.nbytes - at

    def verify(self, manifest: Manifest, present: tuple[int, ...], threads: int = 1) -> list[int]:
        """Hash everything again; the indices of the segments (and ``OWN``) that are damaged."""
        self._lay_out(manifest.segments, present, manifest.own_nbytes)
        if self.nbytes < self._places[OWN] + manifest.own_nbytes:
            return sorted({*present, OWN})
        damaged = {
            index
            for index in present
            if index != OWN
            and len(manifest.segments[index].hashes) != chunks_of(manifest.segments[index].nbytes)
        }
        parts = [
            (index, chunk)
            for index in present
            if index != OWN and index not in damaged
            for chunk in range(chunks_of(manifest.segments[index].nbytes))
        ]

        def is_damaged(part: tuple[int, int]) -> bool:
            index, chunk = part
            return chunk_hash(self.chunk_view(*part)) != manifest.segments[index].hashes[chunk]

        self._mapping(self.nbytes)
        for (index, _), bad in zip(parts, _each(is_damaged, parts, threads), strict=True):
            if bad:
                damaged.add(index)
        if OWN in present and chunk_hash(self.own_bytes()) != manifest.own_hash:
            damaged.add(OWN)
        return sorted(damaged)


def room_for(segments: tuple[Segment, ...], present: tuple[int, ...], own_nbytes: int) -> int:
    """The size (bytes) of a slot with which no copy of these segments makes it grow, though the own
    part becomes a little larger than ``own_nbytes``."""
    manifest_nbytes = sum(
        _ENTRY_NBYTES * len(each.entries) + 2 * _HASH_NBYTES * chunks_of(each.nbytes)
        for each in segments
    )
    return offsets(segments, present)[OWN] + own_nbytes + _OWN_NBYTES + manifest_nbytes


def _each(
    check: Callable[[tuple[int, int]], bool], parts: list[tuple[int, int]], threads: int
) -> Iterator[bool]:
    if threads <= 1:
        yield from map(check, parts)
        return
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(check, parts)


def _fits(present: tuple[int, ...], manifest: Manifest) -> bool:
    """Whether there is sense in the numbers of a header and a manifest that have their hashes."""
    sizes = (manifest.own_nbytes, *(segment.nbytes for segment in manifest.segments))
    return min(sizes) >= 0 and all(OWN <= index < len(manifest.segments) for index in present)


def _header_in(page: bytes) -> _Header | None:
    if len(page) < _PREFIX.size:
        return None
    magic, length = _PREFIX.unpack_from(page)
    end = _PREFIX.size + length
    if magic != _MAGIC or end + _HASH_NBYTES > len(page):
        return None
    if chunk_hash(page[:end]) != page[end : end + _HASH_NBYTES]:
        return None
    try:
        return _decode_header(page[_PREFIX.size : end])
    except (msgspec.MsgspecError, RecursionError):
        return None


def _full(path: Path, needed: int) -> ArenaFull:
    free, limit = free_memory(str(path.parent))
    return ArenaFull(
        f"A copy of the state needs {_mib(needed)} more in {path.parent}, and {_mib(free)} is left "
        f"by {limit}: give the node more memory or a larger /dev/shm, or run fewer ranks on it."
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB"
