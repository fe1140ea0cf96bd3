"""Who writes what: each tensor that several ranks have in common is written by one of them.

Pure and free of torch. Every rank of a segment comes to the same answer from that segment alone,
whatever else each of them has.
"""

from __future__ import annotations

import heapq

from deadpool_runtime.replication.manifest import Entry, Segment

#: A segment is split over at most as many ranks as it has parts of this size.
SPLIT_NBYTES = 64 << 20


def writers_of(segment: Segment) -> tuple[int, ...]:
    """For each entry of the segment, in order, the rank that writes it.

    The lowest rank writes a small segment whole. A larger one is split between the lowest ranks:
    the entries, largest first, go to whoever has the fewest bytes so far. An entry is never cut.
    """
    parts = max(1, min(len(segment.ranks), segment.nbytes // SPLIT_NBYTES))
    loads = [(0, rank) for rank in segment.ranks[:parts]]
    sizes = [entry.nbytes for entry in segment.entries]
    writers = [segment.ranks[0]] * len(sizes)
    for position in sorted(range(len(sizes)), key=lambda position: (-sizes[position], position)):
        nbytes, rank = loads[0]
        writers[position] = rank
        heapq.heapreplace(loads, (nbytes + sizes[position], rank))
    return tuple(writers)


def share(segments: tuple[Segment, ...], rank: int) -> tuple[tuple[Entry, ...], ...]:
    """The entries of each segment that ``rank`` writes."""
    return tuple(
        tuple(
            entry
            for entry, writer in zip(segment.entries, writers_of(segment), strict=True)
            if writer == rank
        )
        for segment in segments
    )


def share_nbytes(segments: tuple[Segment, ...], rank: int, own_nbytes: int) -> int:
    """How many bytes ``rank`` writes, and so how much memory its private copy of them takes."""
    return own_nbytes + sum(entry.nbytes for entries in share(segments, rank) for entry in entries)
