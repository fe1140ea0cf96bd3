"""Which checkpoints there are: how one becomes complete, which are listed, which are removed.

    <directory>/step-00000040/rank-00003/     what rank 3 wrote: files of
                                              torch.distributed.checkpoint and deadpool.json
    <directory>/step-00000040/complete.json   written last; without it there is no checkpoint

complete.json holds the hash of each deadpool.json, which holds the hash of each file beside it. A
kill at any moment leaves every checkpoint either listed and whole, or not listed.

Nothing here imports torch: the launcher commits and lists checkpoints, ranks write and load them.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import xxhash

from deadpool_runtime.durable.hashing import FileSum, sum_of
from deadpool_runtime.replication.manifest import Manifest, chunks_of

#: Grows when a reader of the older format would misread the files.
FORMAT = 1
RANK_INDEX = "deadpool.json"
COMPLETE = "complete.json"
_STEP = re.compile(r"step-(\d{8,})")
_T = TypeVar("_T")


class CheckpointIncomplete(RuntimeError):
    """What the ranks wrote for a step does not make up one checkpoint, so it is not committed."""


class CheckpointDamaged(RuntimeError):
    """A committed checkpoint cannot be used: a file of it is missing or is not what was written."""

    def __init__(self, path: Path, step: int, what: str) -> None:
        super().__init__(
            f"The durable checkpoint of step {step} cannot be used because {path} {what}: take an "
            f"older checkpoint, or bring that file back from a backup."
        )


class RankIndex(msgspec.Struct, frozen=True):
    """Content of deadpool.json: what one rank wrote, and what belongs to its state.

    ``writers``: for each segment of the manifest, the rank that wrote each of its entries.
    ``files``: every other file in the rank's directory.
    """

    format: int
    job_id: str
    world_size: int
    torch: str
    manifest: Manifest
    writers: tuple[tuple[int, ...], ...]
    files: dict[str, FileSum]


class Complete(msgspec.Struct, frozen=True):
    """Content of complete.json. ``ranks``: the sum of each rank's deadpool.json, by rank."""

    format: int
    job_id: str
    world_size: int
    step: int
    epoch: int
    ranks: tuple[FileSum, ...]


class _Sealed(msgspec.Struct, frozen=True):
    """How both files lie on the disk: the content, and the xxh3 of exactly its bytes."""

    body: msgspec.Raw
    xxh3_128: str


class _Versioned(msgspec.Struct, frozen=True):
    """What the contents of all versions have."""

    format: Any = None


# ---------------------------------------------------------------- places and files


def step_directory(directory: Path, step: int) -> Path:
    """Where everything of one step lies."""
    return directory / f"step-{step:08d}"


def rank_directory(directory: Path, step: int, rank: int) -> Path:
    """Where one rank's part of a step lies."""
    return step_directory(directory, step) / f"rank-{rank:05d}"


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal(content: RankIndex | Complete) -> bytes:
    """The bytes of deadpool.json or complete.json."""
    body = msgspec.json.encode(content)
    return msgspec.json.encode(_Sealed(msgspec.Raw(body), xxhash.xxh3_128_hexdigest(body)))


def unseal(data: bytes, kind: type[_T]) -> _T:
    """The content of deadpool.json or complete.json; ``ValueError`` or ``MsgspecError`` says what
    is wrong with it.
    """
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
        if xxhash.xxh3_128_hexdigest(bytes(sealed.body)) != sealed.xxh3_128:
            raise ValueError("does not have the hash it was written with")
        version = msgspec.json.decode(sealed.body, type=_Versioned).format
        if version != FORMAT:
            raise ValueError(f"has format {version!r}, and this version reads {FORMAT} only")
        return msgspec.json.decode(sealed.body, type=kind)
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


def write_file(path: Path, data: bytes) -> None:
    """Write a file that did not exist, and have it on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _replace_file(path: Path, data: bytes) -> None:
    """Write a file such that at every moment either the old content or the new one is there."""
    scratch = path.with_name(f".{path.name}.new")
    write_file(scratch, data)
    os.replace(scratch, path)
    sync_directory(path.parent)


# ---------------------------------------------------------------- reading


def read_complete(directory: Path, step: int) -> Complete:
    """What complete.json of a step says; ``CheckpointDamaged`` if it cannot be relied upon."""
    path = step_directory(directory, step) / COMPLETE
    complete = _read(path, step, Complete)
    if complete.step != step or len(complete.ranks) != complete.world_size:
        raise CheckpointDamaged(path, step, "belongs to another checkpoint")
    return complete


def read_rank_index(directory: Path, complete: Complete, rank: int) -> RankIndex:
    """What deadpool.json of a rank says, once it proved to be the one that was committed."""
    path = rank_directory(directory, complete.step, rank) / RANK_INDEX
    return _read(path, complete.step, RankIndex, complete.ranks[rank])


def _read(path: Path, step: int, kind: type[_T], expected: FileSum | None = None) -> _T:
    try:
        data = path.read_bytes()
        if expected is not None and sum_of(data) != expected:
            raise ValueError("is not the file that was committed")
        return unseal(data, kind)
    except FileNotFoundError as error:
        raise CheckpointDamaged(path, step, "is missing") from error
    except OSError as error:
        raise CheckpointDamaged(path, step, f"cannot be read ({error.strerror})") from error
    except msgspec.MsgspecError as error:
        raise CheckpointDamaged(path, step, f"is not what was written ({error})") from error
    except ValueError as error:
        raise CheckpointDamaged(path, step, str(error)) from error


# ---------------------------------------------------------------- commit, list, prune


def commit(directory: Path, step: int, world_size: int) -> Complete:
    """Make a checkpoint of what the ranks wrote for ``step``; on return it will survive a crash.

    Raises ``CheckpointIncomplete`` if something is missing or the parts do not fit together, for
    example because one of them is left from an earlier epoch.
    """
    folder = step_directory(directory, step)
    parts: list[RankIndex] = []
    sums: list[FileSum] = []
    for rank in range(world_size):
        path = rank_directory(directory, step, rank) / RANK_INDEX
        try:
            data = path.read_bytes()
            parts.append(unseal(data, RankIndex))
            sums.append(sum_of(data))
            _require_part(path.parent, parts[rank], step, rank, world_size)
        except FileNotFoundError as error:
            raise CheckpointIncomplete(f"{error.filename} is missing.") from error
        except (msgspec.MsgspecError, ValueError) as error:
            raise CheckpointIncomplete(f"{path} {error}.") from error
    _require_fitting(folder, parts)
    complete = Complete(
        format=FORMAT,
        job_id=parts[0].job_id,
        world_size=world_size,
        step=step,
        epoch=parts[0].manifest.epoch,
        ranks=tuple(sums),
    )
    _replace_file(folder / COMPLETE, seal(complete))
    sync_directory(directory)
    return complete


def _require_part(folder: Path, part: RankIndex, step: int, rank: int, world_size: int) -> None:
    """Raise ``ValueError`` unless the part is this rank's and its files have their sizes."""
    manifest = part.manifest
    if (manifest.step, manifest.rank, part.world_size) != (step, rank, world_size):
        raise ValueError(
            f"belongs to rank {manifest.rank} of {part.world_size} at step {manifest.step}"
        )
    for segment, writers in zip(manifest.segments, part.writers, strict=True):
        if len(segment.hashes) != chunks_of(segment.nbytes):
            raise ValueError("lacks hashes of a segment")
        if len(writers) != len(segment.entries) or not set(writers) <= set(segment.ranks):
            raise ValueError("does not say who wrote each tensor")
    for name, expected in part.files.items():
        if (folder / name).stat().st_size != expected.nbytes:
            raise ValueError(f"gives {expected.nbytes} bytes as the size of {name}, which differs")


def _require_fitting(folder: Path, parts: list[RankIndex]) -> None:
    """Raise ``CheckpointIncomplete`` unless all parts are of one run of the step, and ranks agree
    on the bytes of what they have in common and on who wrote it."""
    first = parts[0]
    for rank, part in enumerate(parts):
        if (part.job_id, part.manifest.epoch) != (first.job_id, first.manifest.epoch):
            raise CheckpointIncomplete(
                f"In {folder} the part of rank {rank} was written by job {part.job_id} in epoch "
                f"{part.manifest.epoch}, that of rank 0 by job {first.job_id} in epoch "
                f"{first.manifest.epoch}."
            )
    said: dict[tuple[int, ...], dict[int, Any]] = {}
    for rank, part in enumerate(parts):
        for segment, writers in zip(part.manifest.segments, part.writers, strict=True):
            said.setdefault(segment.ranks, {})[rank] = (segment.digest(), writers)
    for ranks, by_rank in said.items():
        if tuple(by_rank) != ranks or len(set(by_rank.values())) != 1:
            raise CheckpointIncomplete(
                f"In {folder} the ranks {', '.join(map(str, ranks))} do not agree on the tensors "
                f"that they have in common."
            )


def list_complete(directory: Path) -> list[int]:
    """The steps that have a checkpoint, newest first. Files of ranks are not looked at."""
    return [step for step in _steps(directory) if _is_complete(directory, step)]


def _steps(directory: Path) -> list[int]:
    """The steps of which there is anything, newest first."""
    if not directory.is_dir():
        return []
    found = [_STEP.fullmatch(entry.name) for entry in directory.iterdir()]
    return sorted((int(match.group(1)) for match in found if match), reverse=True)


def _is_complete(directory: Path, step: int) -> bool:
    try:
        read_complete(directory, step)
    except CheckpointDamaged:
        return False
    return True


def prune(directory: Path, keep: int = 2, earlier: Collection[int] = ()) -> list[int]:
    """Remove all but the newest ``keep`` checkpoints, and what is older than the newest one and
    never became complete; return the steps that were removed. ``earlier``: steps of another count
    of steps, which are older than all others.

    What is newer than the newest checkpoint may be in the making and is left alone. A rank writes
    one checkpoint at a time, so nothing older is still being written.
    """
    if keep < 1:
        raise ValueError(f"At least one checkpoint must be kept, not {keep}.")
    complete = list_complete(directory)
    if not complete:
        return []
    by_age = sorted(complete, key=lambda step: step in earlier)
    stale = set(_steps(directory)) - set(by_age[:keep])
    removed = sorted(step for step in stale if step < by_age[0] or step in earlier)
    for step in removed:
        folder = step_directory(directory, step)
        (folder / COMPLETE).unlink(missing_ok=True)
        sync_directory(folder)
        shutil.rmtree(folder)
    if removed:
        sync_directory(directory)
    return removed
