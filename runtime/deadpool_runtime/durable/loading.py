"""Reading a rank's state back from a durable checkpoint.

A rank reads its own part from its own directory, and what it has in common with others from the
directory of whoever wrote it. Nothing of a file is used before its hash was verified, along a chain
that begins in complete.json; and what was read is compared with the manifest once more.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import torch

from deadpool_runtime.durable import index
from deadpool_runtime.durable.hashing import first_wrong_chunk
from deadpool_runtime.durable.index import CheckpointDamaged, RankIndex
from deadpool_runtime.durable.saving import OWN_KEY
from deadpool_runtime.encoding import tensor_bytes
from deadpool_runtime.errors import Misuse
from deadpool_runtime.replication.manifest import Entry, Manifest, chunk_hash


class Loaded(NamedTuple):
    """A rank's state: tensors by key, on the CPU, the encoded own part, and the manifest."""

    tensors: dict[str, torch.Tensor]
    own: bytes
    manifest: Manifest


def load(directory: Path, step: int, rank: int, keys: Collection[str] | None = None) -> Loaded:
    """The state of ``rank`` after ``step``, or of its tensors only those of ``keys``.

    Raises ``CheckpointDamaged`` if a file it needs is missing or damaged, and ``Misuse`` if the
    checkpoint is of another job: it has no such rank or tensor.
    """
    from deadpool_runtime.durable import dcp

    complete = index.read_complete(directory, step)
    if rank >= complete.world_size:
        raise Misuse(
            f"The durable checkpoint of step {step} in {directory} is of {complete.world_size} "
            f"ranks, so rank {rank} cannot start from it."
        )
    mine = index.read_rank_index(directory, complete, rank)
    sources = {rank: mine}
    tensors: dict[str, torch.Tensor] = {}
    own = torch.empty(mine.manifest.own_nbytes, dtype=torch.uint8)
    for writer, entries in _by_writer(mine, step, keys).items():
        if writer not in sources:
            sources[writer] = index.read_rank_index(directory, complete, writer)
        folder = index.rank_directory(directory, step, writer)
        into = {entry.key: _room_for(entry, folder, step) for entry in entries}
        tensors |= into
        if writer == rank:
            into = into | {OWN_KEY: own}
        dcp.load_part(folder, step, sources[writer].files, into)
    loaded = Loaded(tensors, tensor_bytes(own).numpy().tobytes(), mine.manifest)
    _verify(loaded, index.rank_directory(directory, step, rank), step)
    return loaded


def _by_writer(mine: RankIndex, step: int, keys: Collection[str] | None) -> dict[int, list[Entry]]:
    """What to read from whom; the rank itself first, who wrote the own part."""
    found: dict[int, list[Entry]] = {mine.manifest.rank: []}
    known = set()
    for segment, writers in zip(mine.manifest.segments, mine.writers, strict=True):
        for entry, writer in zip(segment.entries, writers, strict=True):
            known.add(entry.key)
            if keys is None or entry.key in keys:
                found.setdefault(writer, []).append(entry)
    if keys is not None and (unknown := sorted(set(keys) - known)):
        raise Misuse(
            f"The durable checkpoint of step {step} has no tensor {unknown[0]}: the model or "
            f"optimizer of this process differs from the one that was saved."
        )
    return found


def _room_for(entry: Entry, folder: Path, step: int) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointDamaged(
            folder, step, f"has {entry.key} of type {entry.dtype}, which this torch does not know"
        )
    return torch.empty(entry.shape, dtype=dtype)


def _verify(loaded: Loaded, folder: Path, step: int) -> None:
    """Raise ``CheckpointDamaged`` unless the bytes are those that the manifest speaks of."""
    data = {key: tensor_bytes(each).numpy().data for key, each in loaded.tensors.items()}
    for segment in loaded.manifest.segments:
        if first_wrong_chunk(segment, data) is not None:
            who = ", ".join(map(str, segment.ranks))
            raise CheckpointDamaged(
                folder.parent, step, f"has other bytes for the tensors of rank {who} than it says"
            )
    if chunk_hash(loaded.own) != loaded.manifest.own_hash:
        raise CheckpointDamaged(folder, step, "has another own part than it says")
