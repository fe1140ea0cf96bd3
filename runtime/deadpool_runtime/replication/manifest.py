"""What a copy of a rank's state consists of, and where in a slot each part lies.

State is cut into *segments*. A segment holds the tensors that the same ranks have in common: the
ranks of a data-parallel group for a plain DDP parameter, one rank alone for its share of a sharded
optimizer. So the same segment of two ranks has the same bytes and the same digest, and can be taken
from any of them. What is no tensor (random generators, data position, schedulers, the user's
values) is the *own part*: bytes that only this rank has.

Nothing here imports torch: the agents and the launcher read these too.
"""

from __future__ import annotations

import msgspec
import xxhash

#: Segments are hashed, sent and verified in chunks of this size; the last may be shorter.
CHUNK_NBYTES = 4 << 20
#: Every part of a slot begins at a multiple of this.
ALIGN_NBYTES = 4096
#: Every tensor begins at a multiple of this in its segment.
ALIGN_TENSOR_NBYTES = 64
#: Index that stands for the own part wherever segments are named by their index.
OWN = -1


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a segment: the rank's local part of it, contiguous in logical order.

    ``dtype`` is torch's name without the prefix ("bfloat16"). ``on_cpu``: it lies on the CPU
    whatever its parameter's device, as step counts do.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    on_cpu: bool = False


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Tensors that ``ranks`` (global, ascending, this rank among them) have in common.

    ``hashes``: xxh3 of 128 bits of each chunk, in order.
    """

    ranks: tuple[int, ...]
    entries: tuple[Entry, ...]
    nbytes: int
    hashes: tuple[bytes, ...] = ()

    def digest(self) -> str:
        """Hash of names, types, shapes and bytes; equal on all of ``ranks`` if they agree."""
        whole = msgspec.msgpack.encode((self.entries, self.nbytes, self.hashes))
        return xxhash.xxh3_128_hexdigest(whole)


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """A whole copy of the state of ``rank`` after ``step``, made in ``epoch``.

    The same for the rank's own slot and for a replica of it, which holds fewer segments.
    """

    rank: int
    step: int
    epoch: int
    segments: tuple[Segment, ...]
    own_nbytes: int
    own_hash: bytes


def chunk_hash(data: memoryview | bytes) -> bytes:
    """Hash of one chunk, or of the own part."""
    return xxhash.xxh3_128_digest(data)


def chunks_of(nbytes: int) -> int:
    """How many chunks a segment of that size has."""
    return -(-nbytes // CHUNK_NBYTES)


def aligned(nbytes: int) -> int:
    """The next multiple of ``ALIGN_NBYTES``."""
    return -(-nbytes // ALIGN_NBYTES) * ALIGN_NBYTES


def offsets(segments: tuple[Segment, ...], present: tuple[int, ...]) -> dict[int, int]:
    """Where each present part begins in a slot file: segment index -> offset, ``OWN`` last.

    The first page is the header's. The own part follows the segments since its size changes from
    step to step; the manifest follows the own part, at the next multiple of ``ALIGN_NBYTES``.
    """
    at = ALIGN_NBYTES
    places = {}
    for index in sorted(present):
        if index == OWN:
            continue
        places[index] = at
        at += aligned(segments[index].nbytes)
    places[OWN] = at
    return places
