"""Segments are named by their ranks; with thousands of ranks a name must not list them all.

Every message about a copy names its segments, and every rank sends such messages: lists of all
ranks would make the launcher's traffic grow with the square of their number. Groups of a mesh are
rows of equal distance, so a name writes a row of four or more as its first rank, its last one and
the distance with a minus sign: ``(0, 4, 8, 12, 16, 20, 24, 28, 32)`` is ``(0, 32, -4)``. Short
groups are written as they are. Manifests always list the ranks.
"""

from __future__ import annotations

#: The name of a segment: its ranks, ascending, with rows shortened.
Ranks = tuple[int, ...]

#: Up to so many ranks are listed.
_LISTED = 8
_LEAST_ROW = 4
#: A name of more ranks than this is none: nothing is to be allocated for it.
MOST_RANKS = 1 << 20


def packed(ranks: tuple[int, ...]) -> Ranks:
    """The name of the segment of these ranks, which ascend."""
    if len(ranks) <= _LISTED:
        return ranks
    name: list[int] = []
    at, count = 0, len(ranks)
    while at < count:
        end = at + 1
        if end < count:
            distance = ranks[end] - ranks[at]
            while end + 1 < count and ranks[end + 1] - ranks[end] == distance:
                end += 1
            if end - at + 1 >= _LEAST_ROW:
                name += (ranks[at], ranks[end], -distance)
                at = end + 1
                continue
        name.append(ranks[at])
        at += 1
    return tuple(name)


def members(name: Ranks) -> tuple[int, ...]:
    """The ranks of a segment; raises ``ValueError`` for what is no name."""
    if not name or min(name) >= 0:
        return name
    ranks: list[int] = []
    for number in name:
        if number >= 0:
            ranks.append(number)
            continue
        if len(ranks) < 2 or ranks[-1] <= ranks[-2]:
            raise ValueError(f"{name} is no name of a segment")
        last, first = ranks.pop(), ranks.pop()
        row = range(first, last + 1, -number)
        if len(ranks) + len(row) > MOST_RANKS:
            raise ValueError(f"{name} is no name of a segment: it has too many ranks")
        ranks += row
    return tuple(ranks)
