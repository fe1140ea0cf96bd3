"""Writing a rank's part of the durable checkpoint, beside training.

A save is made from a sealed slot of the arena, which will be overwritten three steps later. So the
bytes are first copied, no more of them than this rank writes, and their hashes are compared with
the manifest's: a slot that was overwritten meanwhile is noticed there. Then they go to a directory
that gets its final name once everything in it is on the disk. No collective is used, and nothing is
expected from other ranks: the launcher commits when all have written (``index.commit``).
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from deadpool_runtime.durable.hashing import FileSum, first_wrong_chunk
from deadpool_runtime.durable.index import (
    COMPLETE,
    FORMAT,
    RANK_INDEX,
    RankIndex,
    rank_directory,
    seal,
    sync_directory,
    write_file,
)
from deadpool_runtime.durable.share import share, writers_of
from deadpool_runtime.encoding import tensor_bytes
from deadpool_runtime.replication.manifest import Manifest, chunk_hash, chunks_of

#: The name under which the own part lies among the tensors, as bytes.
OWN_KEY = "own"
#: How long ``Saver.close`` waits for a save that it gave up.
GIVE_UP_S = 5.0
#: A save that has not moved for so long is given up at the end. Longer than a sync of files that a
#: healthy disk or file server has not yet taken in, during which nothing can be seen to move.
STALL_S = 300.0


class SaveFailed(RuntimeError):
    """A part of a checkpoint was not written; the message is a sentence for the user."""


class _GivenUp(Exception):
    """The save is no longer wanted."""


@dataclass(frozen=True)
class Target:
    """Where a job's checkpoints go; the same for all its ranks."""

    directory: Path
    job_id: str
    world_size: int


@dataclass(frozen=True)
class Written:
    """What one save came to: bytes in files, and the time from the copy to the last sync."""

    nbytes: int
    seconds: float


def write(
    target: Target,
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor],
    own: bytes,
    before_piece: Callable[[], None] = lambda: None,
) -> Written:
    """Write the part of rank ``manifest.rank`` of the checkpoint of ``manifest.step``.

    ``tensors``: all tensors of the slot by key, on the CPU. ``before_piece`` is called again and
    again while bytes are copied and written; what it raises ends the save. Raises ``SaveFailed``.
    """
    begun = time.monotonic()
    groups = _private_copy(manifest, tensors, own, before_piece)
    nbytes = sum(tensor.nbytes for group in groups for tensor in group.values())
    part = rank_directory(target.directory, manifest.step, manifest.rank)
    # Named by epoch: a lost node may still be writing its part of an earlier one.
    scratch = part.with_name(f"{part.name}.e{manifest.epoch}.writing")
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        for leftover in part.parent.glob(f"{part.name}.*.writing"):
            shutil.rmtree(leftover, ignore_errors=True)
        _require_room(part.parent, nbytes)
        scratch.mkdir()
        files = _save(scratch, groups, before_piece)
        index = RankIndex(
            format=FORMAT,
            job_id=target.job_id,
            world_size=target.world_size,
            torch=str(torch.__version__),
            manifest=manifest,
            writers=tuple(writers_of(segment) for segment in manifest.segments),
            files=files,
        )
        write_file(scratch / RANK_INDEX, seal(index))
        sync_directory(scratch)
        _put_in_place(scratch, part)
        sync_directory(target.directory)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise SaveFailed(_sentence(error, manifest.step, part, nbytes)) from error
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return Written(sum(each.nbytes for each in files.values()), time.monotonic() - begun)


def _save(
    scratch: Path, groups: list[dict[str, torch.Tensor]], before_piece: Callable[[], None]
) -> dict[str, FileSum]:
    from deadpool_runtime.durable import dcp

    return dcp.save_part(scratch, groups, before_piece)


def _private_copy(
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor],
    own: bytes,
    before_piece: Callable[[], None],
) -> list[dict[str, torch.Tensor]]:
    """The tensors this rank writes, in groups: first what it alone has, with the own part, then
    what it shares, by with whom. So a rank that reads a shared tensor reads no file in vain.
    """
    alone = {OWN_KEY: torch.tensor(np.frombuffer(own, dtype=np.uint8))}
    groups = [alone]
    for segment, entries in zip(
        manifest.segments, share(manifest.segments, manifest.rank), strict=True
    ):
        if len(segment.hashes) != chunks_of(segment.nbytes):
            raise ValueError("a manifest without hashes cannot be saved")
        copies = {}
        for entry in entries:
            before_piece()
            copies[entry.key] = _copy(tensors[entry.key])
        # Neighbours of other ranks' shares are read in the slot, to complete chunks.
        views = {entry.key: tensors[entry.key] for entry in segment.entries} | copies
        if first_wrong_chunk(segment, _bytes(views), copies) is not None:
            raise _overwritten(manifest)
        if len(segment.ranks) == 1:
            alone |= copies
        elif copies:
            groups.append(copies)
    if chunk_hash(own) != manifest.own_hash:
        raise _overwritten(manifest)
    return groups


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that has its storage for itself; made by this thread alone, without the GIL."""
    copied = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    np.copyto(tensor_bytes(copied).numpy(), tensor_bytes(tensor).numpy())
    return copied


def _bytes(tensors: Mapping[str, torch.Tensor]) -> dict[str, memoryview]:
    return {key: tensor_bytes(each).numpy().data for key, each in tensors.items()}


def _overwritten(manifest: Manifest) -> SaveFailed:
    return SaveFailed(
        f"The durable checkpoint of step {manifest.step} was not saved: rank {manifest.rank}'s "
        f"copy of that step was overwritten or damaged before it could be saved."
    )


def _require_room(folder: Path, nbytes: int) -> None:
    """Raise what a full disk raises, before anything is written, if ``nbytes`` will not fit."""
    if shutil.disk_usage(folder).free < nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def _put_in_place(scratch: Path, part: Path) -> None:
    """Give the part its name. A checkpoint of the step that is there ceases to be one first: it is
    of another run of the step, and its parts must not be mixed with these."""
    (part.parent / COMPLETE).unlink(missing_ok=True)
    sync_directory(part.parent)
    if part.exists():
        shutil.rmtree(part)
    os.replace(scratch, part)
    sync_directory(part.parent)


def _sentence(error: OSError, step: int, part: Path, nbytes: int) -> str:
    """What happened and what to do, for the user."""
    start = f"The durable checkpoint of step {step} was not saved: "
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (
            f"{start}there is no room in {part.parent.parent} for the {_size(nbytes)} of "
            f"{part.name} ({error.strerror}); free some, or keep fewer checkpoints."
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            f"{start}this user may not write {error.filename or part} ({error.strerror}); choose "
            f"another directory, or change its permissions."
        )
    return f"{start}writing {error.filename or part} failed ({error.strerror or error})."


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.1f} KB"


@dataclass(frozen=True)
class _Order:
    """A save to be made."""

    manifest: Manifest
    tensors: Mapping[str, torch.Tensor]
    own: bytes


class Saver:
    """Makes one save at a time in a thread of its own.

    ``on_saved(epoch, step, nbytes, seconds)``, with the epoch in which the copy was made, and
    ``on_failed(step, reason)`` are called in that thread, but for a save that is skipped, where
    ``begin`` calls ``on_failed`` itself.
    """

    def __init__(
        self,
        target: Target,
        on_saved: Callable[[int, int, int, float], None],
        on_failed: Callable[[int, str], None],
    ) -> None:
        self._target = target
        self._on_saved = on_saved
        self._on_failed = on_failed
        self._changed = threading.Condition()
        #: The save to be made or being made.
        self._order: _Order | None = None
        self._closing = False
        self._given_up = threading.Event()
        #: When a save was last seen to move, by the monotonic clock.
        self._moved_at = 0.0
        self._thread = threading.Thread(target=self._run, name="deadpool-saver", daemon=True)
        self._thread.start()

    def begin(
        self,
        manifest: Manifest,
        tensors: Mapping[str, torch.Tensor],
        own: bytes,
        *,
        wait: bool = False,
    ) -> bool:
        """Save what a slot holds; return at once, and say whether it will be tried. ``wait``: one
        that is under way is waited for, rather than this one skipped.

        The slot may be overwritten at any time: if that happens before it was copied, the save
        fails.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._order is None or self._closing)
            if self._closing:
                return False
            busy = self._order
            if busy is None:
                self._order = _Order(manifest, tensors, own)
                self._changed.notify()
                return True
        self._on_failed(
            manifest.step,
            f"The durable checkpoint of step {manifest.step} was skipped: that of step "
            f"{busy.manifest.step} is still being written.",
        )
        return False

    def close(self, wait: bool, stall_s: float = STALL_S) -> int | None:
        """End the thread, after the save under way if ``wait``; else give that up, unreported.

        A save that is waited for is given up as well once it has not moved for ``stall_s``: the
        thread may be held by a disk that answers nothing. Returns the step of a save that was given
        up so. To be called before the process ends, which must not find the thread inside of torch.
        """
        with self._changed:
            self._closing = True
            if not wait:
                self._given_up.set()
            self._changed.notify()
        if not wait:
            self._thread.join(GIVE_UP_S)
            return None
        began_at = time.monotonic()
        while self._thread.is_alive():
            left_s = max(began_at, self._moved_at) + stall_s - time.monotonic()
            if left_s <= 0:
                return self._give_up()
            self._thread.join(left_s)
        return None

    def _give_up(self) -> int | None:
        """Report nothing more; returns the step that was being saved."""
        with self._changed:
            self._given_up.set()
            return None if self._order is None else self._order.manifest.step

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._order is not None or self._closing)
                order = self._order
            if order is None or self._given_up.is_set():
                return
            report = self._save(order)
            del order
            with self._changed:
                self._order = None
                self._changed.notify_all()
            if not self._given_up.is_set():
                report()

    def _save(self, order: _Order) -> Callable[[], None]:
        """Make a save; return the report to be given of it."""
        step = order.manifest.step
        try:
            written = write(
                self._target, order.manifest, order.tensors, order.own, self._require_wanted
            )
        except SaveFailed as error:
            reason = str(error)
        except Exception as error:
            reason = (
                f"The durable checkpoint of step {step} was not saved: "
                f"{type(error).__name__}: {error}"
            )
        else:
            epoch = order.manifest.epoch
            return lambda: self._on_saved(epoch, step, written.nbytes, written.seconds)
        return lambda: self._on_failed(step, reason)

    def _require_wanted(self) -> None:
        self._moved_at = time.monotonic()
        if self._given_up.is_set():
            raise _GivenUp
