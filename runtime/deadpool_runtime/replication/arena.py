"""The directory in which a node keeps copies of ranks' states.

An *arena* is a directory in /dev/shm that belongs to the node's agent and outlives ranks and
replicator. Its files are slots (``slots.py``), a lock that tells others that the agent lives, and
the replicator's socket. Nothing here imports torch.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from deadpool_runtime.protocol import Copy
from deadpool_runtime.replication.manifest import OWN, Manifest
from deadpool_runtime.replication.memory import free_memory
from deadpool_runtime.replication.naming import packed
from deadpool_runtime.replication.slots import ArenaFull, SlotFile
from deadpool_runtime.replication.slotting import MOST_SLOTS, SLOTS, slot_file

__all__ = [
    "SHM",
    "SLOTS",
    "Arena",
    "ArenaFull",
    "SlotFile",
    "arena_path",
    "copies_in",
    "copy_in",
    "free_memory",
    "held_in",
    "inventory",
    "remove_stale",
]

SHM = Path("/dev/shm")
#: Directories that are being made have this in their name until their lock is held.
_UNFINISHED = ".new-"
#: An unfinished directory of this age was left by a process that died.
_UNFINISHED_AFTER_S = 60.0
_SLOT_NAME = re.compile(r"(own|held)-(\d+)-(\d+)")


def arena_path(job_id: str, node: str, epoch: int) -> Path:
    """Where the agent of ``node`` that was started in ``epoch`` keeps its arena."""
    return SHM / f"{_stem(job_id, node)}{epoch}"


def _stem(job_id: str, node: str) -> str:
    # A hyphen in the job's name would make "a-b" on "c" and "a" on "b-c" the same.
    job = quote(job_id, safe="").replace("-", "%2D")
    return f"deadpool-{job}-{quote(node, safe='')}-e"


class Arena:
    """The arena at ``path``. Only the process that made it holds its lock."""

    def __init__(self, path: Path, lock: int | None = None) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, path: Path) -> Arena:
        """Make the directory, lock held from the moment it is visible under its name."""
        scratch = path.with_name(f"{path.name}{_UNFINISHED}{os.getpid()}-{secrets.token_hex(4)}")
        scratch.mkdir(mode=0o700)
        lock = os.open(scratch / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            scratch.rename(path)
        except BaseException:
            os.close(lock)
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        return cls(path, lock)

    @classmethod
    def open(cls, path: Path) -> Arena:
        """The arena that another process made there; FileNotFoundError if there is none."""
        os.stat(path / "lock")
        return cls(path)

    @property
    def socket_path(self) -> Path:
        """Where the node's replicator listens."""
        return self.path / "replicator.sock"

    def own_path(self, rank: int, slot: int) -> Path:
        """A slot in which ``rank`` itself leaves its state."""
        return self.path / slot_file(False, rank, slot)

    def held_path(self, rank: int, slot: int) -> Path:
        """A slot for the replica of another node's ``rank``."""
        return self.path / slot_file(True, rank, slot)

    def remove(self) -> None:
        """Delete every file. Memory still mapped by a process is freed when that process ends."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_stale(job_id: str, node: str, shm: Path = SHM) -> list[Path]:
    """Delete arenas that nobody needs: those of this job and node, whoever holds them, and those of
    any job whose agent is gone. Another user's are left alone. Returns what was deleted.
    """
    removed = []
    for path in sorted(shm.glob("deadpool-*-e*")):
        try:
            info = path.lstat()
            if info.st_uid != os.geteuid() or not path.is_dir() or path.is_symlink():
                continue
            if _UNFINISHED in path.name:
                stale = time.time() - info.st_mtime > _UNFINISHED_AFTER_S
            else:
                name = path.name.removeprefix(_stem(job_id, node))
                stale = name.isdigit() or _lock_is_free(path / "lock")
        except OSError:
            continue
        if stale:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def _lock_is_free(lock: Path) -> bool:
    """Whether no living process holds ``lock``; a directory without one never was an arena."""
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


def _sealed_in(file: Path) -> tuple[Manifest, tuple[int, ...]] | None:
    """What a slot holds; None if that is nothing."""
    try:
        slot = SlotFile.open(file)
    except OSError:
        return None
    with slot:
        return slot.read()


def copies_in(
    path: Path, replica: bool, rank: int
) -> Iterator[tuple[int, tuple[Manifest, tuple[int, ...]]]]:
    """Slot, manifest and parts of each sealed copy of ``rank`` in the arena at ``path``: its own,
    or replicas.
    """
    for slot in range(MOST_SLOTS):
        found = _sealed_in(path / slot_file(replica, rank, slot))
        if found is not None and found[0].rank == rank:
            yield slot, found


def copy_in(
    path: Path, replica: bool, rank: int, step: int
) -> tuple[int, Manifest, tuple[int, ...]] | None:
    """The same of the copy of ``step``, if there is one: the newest, should there be several."""
    found = [
        (slot, manifest, present)
        for slot, (manifest, present) in copies_in(path, replica, rank)
        if manifest.step == step
    ]
    return max(found, key=lambda each: each[1].epoch, default=None)


def held_in(path: Path) -> dict[int, dict[int, int]]:
    """The step in each slot of the replicas in the arena at ``path``, by rank."""
    names = (_SLOT_NAME.fullmatch(file.name) for file in path.iterdir())
    ranks = {int(name[2]) for name in names if name is not None and name[1] == "held"}
    return {
        rank: {slot: manifest.step for slot, (manifest, _) in copies_in(path, True, rank)}
        for rank in sorted(ranks)
    }


def inventory(path: Path) -> list[Copy]:
    """Every sealed copy in the arena at ``path``, from headers and manifests alone."""
    copies = []
    for file in sorted(path.iterdir()):
        found = _sealed_in(file) if _SLOT_NAME.fullmatch(file.name) else None
        if found is None:
            continue
        manifest, present = found
        copies.append(
            Copy(
                rank=manifest.rank,
                step=manifest.step,
                epoch=manifest.epoch,
                replica=file.name.startswith("held-"),
                segments=[packed(manifest.segments[i].ranks) for i in present if i != OWN],
                missing=[
                    packed(segment.ranks)
                    for index, segment in enumerate(manifest.segments)
                    if index not in present
                ],
            )
        )
    return copies
