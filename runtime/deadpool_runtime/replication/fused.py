"""Copying and hashing in one pass, in a small library built from ``fused.cpp``.

It is compiled once like the shim of ``groups.native``, and takes the hash from the xxhash package
that is installed. Where either fails, ``load`` says why and copies are made without it: the bytes
and the hashes are the same, they take about twice the time.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import os
import platform
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from deadpool_runtime.groups import native
from deadpool_runtime.groups.errors import ShimUnavailable
from deadpool_runtime.replication.manifest import CHUNK_NBYTES, chunk_hash

_SOURCE = Path(__file__).with_name("fused.cpp")
_FLAGS = ("-std=c++17", "-O2", "-g0", "-w", "-fPIC", "-shared", "-fvisibility=hidden")
_HASH_NBYTES = 16

#: One unsigned 64-bit number for each entry of a segment.
Words = npt.NDArray[np.uint64]


class _Hasher(ctypes.Structure):
    _fields_ = (
        ("reset", ctypes.c_void_p),
        ("update", ctypes.c_void_p),
        ("digest", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
    )


class Fused:
    """Copies chunks and hashes them. From any thread."""

    def __init__(self, library: ctypes.CDLL, hashes: ctypes.CDLL) -> None:
        self._copy = library.deadpool_copy_chunks
        u64, pointer = ctypes.c_uint64, ctypes.c_void_p
        self._copy.argtypes = [
            *(pointer, pointer, u64, u64, u64, u64),
            *(pointer, pointer, pointer, u64, u64, pointer),
        ]
        self._copy.restype = None
        hashes.XXH3_createState.restype = ctypes.c_void_p
        update = "XXH3_128bits_update"
        # Chosen for the processor when the wheel has it; else the library's own choice.
        best = getattr(hashes, f"{update}_dispatch", None) or getattr(hashes, update)
        self._functions = [
            ctypes.cast(each, ctypes.c_void_p).value
            for each in (hashes.XXH3_128bits_reset, best, hashes.XXH3_128bits_digest)
        ]
        self._new_state = hashes.XXH3_createState
        #: Each thread hashes in a state of its own.
        self._of_thread = threading.local()

    def copy_chunks(
        self,
        base: int,
        nbytes: int,
        first: int,
        last: int,
        sources: Words,
        offsets: Words,
        sizes: Words,
        entry: int,
    ) -> list[bytes]:
        """Fill the chunks ``[first, last)`` of the segment that begins at address ``base`` and
        return their hashes.

        ``sources``: the address of each entry, 0 for those that are in place already. ``entry``:
        the first that reaches into the chunks.
        """
        hasher = getattr(self._of_thread, "hasher", None)
        if hasher is None:
            hasher = self._of_thread.hasher = _Hasher(*self._functions, self._new_state())
        hashes = ctypes.create_string_buffer(_HASH_NBYTES * (last - first))
        self._copy(
            *(ctypes.addressof(hasher), base, nbytes, CHUNK_NBYTES, first, last),
            *(sources.ctypes.data, offsets.ctypes.data, sizes.ctypes.data, len(sizes), entry),
            ctypes.addressof(hashes),
        )
        raw = hashes.raw
        return [raw[at : at + _HASH_NBYTES] for at in range(0, len(raw), _HASH_NBYTES)]


@cache
def load() -> tuple[Fused | None, str]:
    """The library, or None and why there is none."""
    try:
        hashes = importlib.import_module("xxhash._xxhash").__file__
        fused = Fused(ctypes.CDLL(str(_ensure_built())), ctypes.CDLL(hashes))
        _check(fused)
    except (ShimUnavailable, ImportError, OSError, AttributeError) as error:
        return None, f"Copies of the state take more processor time than they need: {error}"
    return fused, ""


def _check(fused: Fused) -> None:
    """Compare with the hash that everyone else uses, so that a foreign xxhash is found out."""
    source = np.arange(5000, dtype=np.uint8)
    target = np.full(6000, 255, np.uint8)
    hashes = fused.copy_chunks(
        *(target.ctypes.data, len(target), 0, 1),
        np.array([source.ctypes.data], np.uint64),
        np.array([64], np.uint64),
        np.array([len(source)], np.uint64),
        0,
    )
    expected = bytes(64) + source.tobytes() + bytes(936)
    if target.tobytes() != expected or hashes != [chunk_hash(expected)]:
        raise ShimUnavailable("the installed xxhash does not give the hashes it should.")


def _ensure_built() -> Path:
    digest = hashlib.sha256(_SOURCE.read_bytes() + " ".join(_FLAGS).encode()).hexdigest()[:16]
    folder = native.cache_directory()
    library = folder / f"deadpool_fused-{platform.machine()}-{digest}.so"
    if not library.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        native.require_private(folder)
        with native.build_lock(library.with_suffix(".lock")):
            if not library.exists():
                _compile(library)
    native.require_private(folder)
    return library


def _compile(library: Path) -> None:
    compiler = native.find_compiler()
    handle, scratch = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    try:
        command = [*compiler, *_FLAGS, str(_SOURCE), "-o", scratch]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            reason = result.stderr.strip().splitlines() or ["no message"]
            raise ShimUnavailable(f"{compiler[0]} could not compile {_SOURCE.name}: {reason[0]}")
        os.chmod(scratch, 0o700)
        os.replace(scratch, library)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(scratch)
