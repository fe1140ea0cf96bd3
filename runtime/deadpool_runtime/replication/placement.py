"""Who keeps whose replica.

Pure functions of what they are given: the same answer on every caller, and for any order of the
entries of a mapping. A *segment* is named by its ranks (see ``naming``). A *failure domain* is what
goes away together: a node, or the blade or rack it is in.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import product

from deadpool_runtime.replication.naming import Ranks, members


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes that can hold replicas."""

    #: Nodes with ranks, in the order of their ranks.
    active: tuple[str, ...]
    #: Nodes without, in the order of use.
    spares: tuple[str, ...] = ()
    #: Failure domain of each node; a node that is not named is a domain of its own.
    domains: Mapping[str, str] | None = None

    def domain(self, node: str) -> str:
        """The failure domain of ``node``."""
        return (self.domains or {}).get(node, node)


@dataclass(frozen=True, slots=True)
class Share:
    """A node that a rank's replica goes to, and which segments it gets besides the own part."""

    node: str
    segments: tuple[Ranks, ...]


@dataclass(frozen=True, slots=True)
class Holding:
    """Where a rank's replica goes, and which segments it has besides the own part.

    ``deputy``: the node that gets the own part as well; None if there is no third node, or if there
    is more than one holder. ``more``: the holders behind the first.
    """

    node: str
    segments: tuple[Ranks, ...]
    deputy: str | None = None
    more: tuple[Share, ...] = ()

    @property
    def shares(self) -> tuple[Share, ...]:
        """Every holder's."""
        return (Share(self.node, self.segments), *self.more)


def choose_holders(
    segments: Mapping[int, Mapping[Ranks, int]],
    node_of: Mapping[int, str],
    nodes: Nodes,
    factor: int = 1,
) -> dict[int, Holding | None]:
    """The holders of each rank's replica; None if there is no other node.

    ``segments``: size of each segment of each rank. The holder is the next node of the rank's ring
    that is in another failure domain. The ring are the ranks with which it has most in common,
    which are its data-parallel peers; the order is that of their numbers. If the ring has no such
    node, the next active node in another domain is taken; then a spare in another domain; then any
    other node. All ranks of a node with the same ring have the same holder, and no node serves more
    than it must.

    ``factor``: how many nodes may be lost at once. Each rank has so many holders if there are so
    many other nodes: behind the first the next one in a domain that neither the rank nor an earlier
    holder is in, if there is one, and so on. With one holder the own part goes to a deputy as well,
    the next node after it.
    """
    of_name = _Members()
    rings = _Rings(node_of, of_name)
    units: dict[tuple[str, int], list[int]] = defaultdict(list)
    for rank in sorted(segments):
        ring = _ring(rank, segments[rank], of_name)
        units[node_of[rank], rings.path_of(ring)].append(rank)
    places = {node: seat for seat, node in enumerate(nodes.active)}
    ordered = sorted(units, key=lambda unit: (places[unit[0]], units[unit]))
    others = _Round(nodes.active), _Round(nodes.spares)
    chosen: list[tuple[str, ...]] = [(node,) for node, _ in ordered]
    for _ in range(factor):
        found = _spread(
            [
                _Candidates(taken, (rings.paths[path], *others), nodes)
                for taken, (_, path) in zip(chosen, ordered, strict=True)
            ]
        )
        chosen = [
            taken if holder is None else (*taken, holder)
            for taken, holder in zip(chosen, found, strict=True)
        ]
    places_of = {
        rank: places for places, unit in zip(chosen, ordered, strict=True) for rank in units[unit]
    }
    sent = _sent(segments, places_of, nodes, factor, of_name)
    holders: dict[int, Holding | None] = {}
    for (node, *its), unit in zip(chosen, ordered, strict=True):
        if not its:
            holders.update(dict.fromkeys(units[unit]))
            continue
        after = (rings.paths[unit[1]], *others)
        deputy = _deputy(node, its[0], after, nodes) if len(its) == 1 else None
        for rank in units[unit]:
            shares = [Share(holder, tuple(sent.get((rank, holder), ()))) for holder in its]
            holders[rank] = Holding(its[0], shares[0].segments, deputy, tuple(shares[1:]))
    return dict(sorted(holders.items()))


class _Members(dict[Ranks, tuple[int, ...]]):
    """The ranks of each segment, by its name."""

    def __missing__(self, name: Ranks) -> tuple[int, ...]:
        ranks = self[name] = members(name)
        return ranks


def _ring(rank: int, segments: Mapping[Ranks, int], of_name: _Members) -> Ranks:
    """The segment of which ``rank`` has most bytes in common with others; itself alone if there is
    none.
    """
    best: Ranks = (rank,)
    most: tuple[int, int, tuple[int, ...]] = (0, 1, best)
    for name, nbytes in segments.items():
        if len(name) > 1 and nbytes >= most[0]:
            found = nbytes, len(of_name[name]), of_name[name]
            if best == (rank,) or found > most:
                best, most = name, found
    return best


class _Round:
    """Nodes in a circle."""

    def __init__(self, order: tuple[str, ...]) -> None:
        self._order = order
        self._places = {node: place for place, node in enumerate(order)}

    def after(self, node: str) -> Iterator[str]:
        """All of them, beginning after ``node``; from the first on if it is none of them."""
        start = self._places.get(node, -1) + 1
        for place in range(start, start + len(self._order)):
            yield self._order[place % len(self._order)]


class _Rings:
    """The nodes along each ring of ranks; equal ones are one path, known by a number."""

    def __init__(self, node_of: Mapping[int, str], of_name: _Members) -> None:
        self._node_of = node_of
        self._of_name = of_name
        self._of_ring: dict[Ranks, int] = {}
        self._numbers: dict[tuple[str, ...], int] = {}
        self.paths: list[_Round] = []

    def path_of(self, ring: Ranks) -> int:
        """The number of the path along this ring."""
        number = self._of_ring.get(ring)
        if number is None:
            node_of = self._node_of
            ranks = self._of_name[ring]
            path = tuple(dict.fromkeys(node_of[each] for each in ranks if each in node_of))
            number = self._numbers.setdefault(path, len(self.paths))
            if number == len(self.paths):
                self.paths.append(_Round(path))
            self._of_ring[ring] = number
        return number


class _Candidates:
    """The nodes that are equally good beside those that are ``taken``, the rank's own and earlier
    holders; the next one after the last of these first.

    Worked out as far as they are asked for, which with thousands of nodes is rarely far.
    """

    def __init__(self, taken: Sequence[str], rounds: Sequence[_Round], nodes: Nodes) -> None:
        self._taken = taken
        self._nodes = nodes
        self._barred: Set[str] = frozenset()
        self._round: _Round | None = None
        own, every = {nodes.domain(taken[0])}, {nodes.domain(node) for node in taken}
        for barred, each in product((every, own, frozenset[str]()), rounds):
            if next(self._fit(each, barred), None) is not None:
                self._round, self._barred = each, barred
                break

    def _fit(self, each: _Round, barred: Set[str]) -> Iterator[str]:
        for other in each.after(self._taken[-1]):
            if other not in self._taken and self._nodes.domain(other) not in barred:
                yield other

    def __bool__(self) -> bool:
        return self._round is not None

    def __iter__(self) -> Iterator[str]:
        return iter(()) if self._round is None else self._fit(self._round, self._barred)


def _deputy(node: str, holder: str, rounds: Sequence[_Round], nodes: Nodes) -> str | None:
    """The next node after the holder, in a third failure domain if there is one."""
    own, taken = nodes.domain(node), nodes.domain(holder)
    good: str | None = None
    any_other: str | None = None
    for each in rounds:
        for other in each.after(holder):
            if other in (node, holder):
                continue
            domain = nodes.domain(other)
            if domain not in (own, taken):
                return other
            if good is None and domain != own:
                good = other
            if any_other is None:
                any_other = other
    return good or any_other


def _spread(candidates: Sequence[_Candidates]) -> list[str | None]:
    """Give each its first candidate, or a later one where that makes the largest load smaller."""
    load = 1
    holder: dict[int, str] = {}
    serves: dict[str, list[int]] = defaultdict(list)
    for unit in range(len(candidates)):
        while candidates[unit] and not _place(unit, candidates, holder, serves, load):
            load += 1
    return [holder.get(unit) for unit in range(len(candidates))]


def _place(
    unit: int,
    candidates: Sequence[_Candidates],
    holder: dict[int, str],
    serves: dict[str, list[int]],
    load: int,
) -> bool:
    """Find a place for ``unit`` where no node serves more than ``load``, moving others if need be.

    The shortest chain of moves is taken; False if there is none.
    """
    came_from: dict[str, int] = {}
    asking = deque([unit])
    while asking:
        asker = asking.popleft()
        for node in candidates[asker]:
            if node in came_from:
                continue
            came_from[node] = asker
            if len(serves[node]) >= load:
                asking.extend(serves[node])
                continue
            while True:
                mover = came_from[node]
                before = holder.get(mover)
                holder[mover] = node
                serves[node].append(mover)
                if before is None:
                    return True
                serves[before].remove(mover)
                node = before
    return False


def _sent(
    segments: Mapping[int, Mapping[Ranks, int]],
    places_of: Mapping[int, Sequence[str]],
    nodes: Nodes,
    factor: int,
    of_name: _Members,
) -> dict[tuple[int, str], list[Ranks]]:
    """Which segments each rank sends to each of its holders. ``places_of``: the rank's node, then
    its holders.

    A segment is to be in one domain more than may be lost at once, or on one node more if there are
    not so many domains; ranks that have it count. What is lacking is sent by one of them: the one
    that has the least to send so far, so that all send much the same. Those that only one rank can
    send come first.
    """
    sizes: dict[Ranks, int] = {}
    having: dict[Ranks, list[int]] = defaultdict(list)
    for rank in sorted(segments):
        for name, nbytes in segments[rank].items():
            sizes[name] = max(nbytes, sizes.get(name, 0))
            having[name].append(rank)
    sent: dict[tuple[int, str], list[Ranks]] = defaultdict(list)
    nbytes_of: dict[int, int] = defaultdict(int)
    for name in sorted(sizes, key=lambda name: (len(name) > 1, -sizes[name], of_name[name])):
        spread = _Spread(nodes, factor)
        for rank in having[name]:
            spread.add(places_of[rank][0])
            if spread.enough:
                break
        else:
            sender = min(having[name], key=lambda rank: (nbytes_of[rank], rank))
            for holder in spread.lacking(places_of[sender][1:]):
                sent[sender, holder].append(name)
                nbytes_of[sender] += sizes[name]
    for names in sent.values():
        names.sort(key=lambda name: of_name[name])
    return sent


class _Spread:
    """Where a segment is."""

    def __init__(self, nodes: Nodes, factor: int) -> None:
        self._nodes = nodes
        self._factor = factor
        self._on: set[str] = set()
        self._domains: set[str] = set()

    def add(self, node: str) -> None:
        self._on.add(node)
        self._domains.add(self._nodes.domain(node))

    @property
    def enough(self) -> bool:
        """Whether it is in so many domains that it need not be sent."""
        return len(self._domains) > self._factor

    def lacking(self, holders: Sequence[str]) -> list[str]:
        """To which of the holders it is to be sent."""
        found = []
        for apart in (True, False):
            for node in holders:
                full = self.enough or (not apart and len(self._on) > self._factor)
                there = self._nodes.domain(node) in self._domains if apart else node in self._on
                if not full and not there:
                    found.append(node)
                    self.add(node)
        return found
