"""A copy of the state as the training thread gets it back, and what its manifest says."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deadpool_runtime import protocol
from deadpool_runtime.replication.layout import views_of
from deadpool_runtime.replication.manifest import Manifest
from deadpool_runtime.replication.naming import packed
from deadpool_runtime.replication.slots import SlotFile


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


def views_by_key(slot: SlotFile, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Each tensor of the copy in the slot, in the slot's memory."""
    return {
        entry.key: view
        for index, segment in enumerate(manifest.segments)
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
