"""A copy of the state as the training thread gets it back, and what its manifest says."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

import torch

from deadpool_runtime import protocol
from deadpool_runtime.replication.layout import views_of
from deadpool_runtime.replication.manifest import Manifest
from deadpool_runtime.replication.naming import packed
from deadpool_runtime.replication.slots import SlotFile

#: Threads that verify a copy.
VERIFIERS = 4


class CopyUnusable(RuntimeError):
    """A copy is damaged or cannot be had, so the plan that needs it cannot be carried out."""


@dataclass(frozen=True)
class Loaded:
    """A copy that was verified: its tensors are views of the slot, valid until the slot is used
    again. ``on_cpu``: keys of tensors that belong on the CPU whatever their parameter's device.
    """

    tensors: dict[str, torch.Tensor]
    on_cpu: set[str]
    own: bytes
    digests: list[protocol.SegmentDigest]


def verified(slot: SlotFile, step: int, rank: int) -> Loaded:
    """The copy of ``rank`` after ``step`` that the slot has, as far as it has it. ``CopyUnusable``
    if there is none, or if it is damaged, which is marked in the slot."""
    found = slot.read()
    if found is None or (found[0].step, found[0].rank) != (step, rank):
        raise CopyUnusable(f"There is no copy of step {step} of rank {rank} in {slot.path}.")
    manifest, present = found
    if slot.verify(manifest, present, threads=min(VERIFIERS, os.cpu_count() or 1)):
        slot.invalidate()
        raise CopyUnusable(
            f"The copy of step {step} in {slot.path} does not have the hash it was sealed with."
        )
    return Loaded(
        views_by_key(slot, manifest, present),
        keys_on_cpu(manifest),
        slot.own_bytes(),
        digests_of(manifest),
    )


def views_by_key(
    slot: SlotFile, manifest: Manifest, present: Collection[int] | None = None
) -> dict[str, torch.Tensor]:
    """Each tensor of the copy in the slot, in the slot's memory. ``present``: the indices of the
    segments that it has; None for all."""
    return {
        entry.key: view
        for index, segment in enumerate(manifest.segments)
        if present is None or index in present
        for entry, view in zip(
            segment.entries, views_of(slot, manifest.segments, index), strict=True
        )
    }


def keys_on_cpu(manifest: Manifest) -> set[str]:
    """The keys of tensors that belong on the CPU whatever their parameter's device."""
    return {e.key for segment in manifest.segments for e in segment.entries if e.on_cpu}


def digests_of(manifest: Manifest) -> list[protocol.SegmentDigest]:
    """What the launcher compares between ranks."""
    return [protocol.SegmentDigest(packed(each.ranks), each.digest()) for each in manifest.segments]
