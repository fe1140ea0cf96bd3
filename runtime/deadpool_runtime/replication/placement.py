"""Who keeps whose replica, how much memory that takes, and which step can be made whole.

Pure functions of what they are given: the same answer on every caller, and for any order of the
entries of a mapping. A *segment* is named by its ranks (see ``naming``). A *failure domain* is
what goes away together: a node, or the blade or rack it is in.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import product

from deadpool_runtime.protocol import Copy
from deadpool_runtime.replication.manifest import ALIGN_NBYTES, aligned
from deadpool_runtime.replication.naming import Ranks, members
from deadpool_runtime.replication.slotting import SLOTS, newest_below, own_slots

#: Allowed for the manifest of each copy and for growth of the own part.
SPARE_NBYTES = 256 << 10


# ---------------------------------------------------------------- holders


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


# ---------------------------------------------------------------- memory


@dataclass(frozen=True, slots=True)
class Need:
    """Host memory that the copies on one node take, in bytes."""

    #: Ranks of the node, and the size of one copy of all of them.
    ranks: Ranks
    copy_nbytes: int
    #: Ranks whose replicas it holds, and the size of one replica of all of them.
    held: Ranks
    held_nbytes: int
    #: Copies and replicas of each rank.
    copies: int = SLOTS
    replicas: int = SLOTS

    @property
    def nbytes(self) -> int:
        """All slots of both."""
        return self.copies * self.copy_nbytes + self.replicas * self.held_nbytes


def needs(
    segments: Mapping[int, Mapping[Ranks, int]],
    own_nbytes: Mapping[int, int],
    node_of: Mapping[int, str],
    holders: Mapping[int, Holding | None],
    interval: int = 1,
) -> dict[str, Need]:
    """What each node needs that has ranks or holds replicas, by name."""
    copies = own_slots(interval)
    ranks: dict[str, list[int]] = defaultdict(list)
    held: dict[str, list[int]] = defaultdict(list)
    own_sum: dict[str, int] = defaultdict(int)
    held_sum: dict[str, int] = defaultdict(int)
    for rank in sorted(segments):
        node = node_of[rank]
        ranks[node].append(rank)
        own_sum[node] += _slot_nbytes(segments[rank].values(), own_nbytes[rank])
        holder = holders.get(rank)
        if holder is not None:
            deputies = () if holder.deputy is None else (Share(holder.deputy, ()),)
            for share in (*holder.shares, *deputies):
                sizes = [segments[rank][each] for each in share.segments]
                held[share.node].append(rank)
                held_sum[share.node] += _slot_nbytes(sizes, own_nbytes[rank])
    return {
        node: Need(tuple(ranks[node]), own_sum[node], tuple(held[node]), held_sum[node], copies)
        for node in sorted({*ranks, *held})
    }


def _slot_nbytes(segments: Iterable[int], own_nbytes: int) -> int:
    return ALIGN_NBYTES + sum(map(aligned, segments)) + aligned(own_nbytes) + SPARE_NBYTES


# ---------------------------------------------------------------- the step to go back to


@dataclass(frozen=True, slots=True)
class Fetch:
    """A part of a copy of ``rank`` that is taken from ``node``; see ``protocol.Piece``."""

    node: str
    rank: int
    replica: bool
    segments: tuple[Ranks, ...]
    base: bool


@dataclass(frozen=True, slots=True)
class Adoption:
    """Whose copies a rank that took no part for a while may take over, of steps up to ``until``."""

    until: int
    peers: Ranks


@dataclass(frozen=True, slots=True)
class Lent:
    """The shard of ``rank``, which takes no part, for a rank that brings it; see ``shards``.

    It is in a copy on ``node``, or on the bringer's own node if that is None.
    """

    rank: int
    replica: bool
    segments: tuple[Ranks, ...]
    node: str | None


@dataclass(frozen=True, slots=True)
class Agreement:
    """The newest step that can be made whole on every rank, or None.

    ``fetches``: what each rank fetches, the base first; nothing for one whose node has it all.
    ``lacking``: for each newer step of which there is a copy, the ranks that cannot have it.
    ``former`` and ``lent``: if not empty, over which ranks state was shared out in the copies, and
    whose shards each rank brings besides its own; see ``shards``.
    """

    step: int | None
    fetches: Mapping[int, tuple[Fetch, ...]]
    lacking: Mapping[int, Ranks]
    former: Ranks = ()
    lent: Mapping[int, tuple[Lent, ...]] = field(default_factory=dict)


def counts(copy: Copy, history: Sequence[tuple[int, int]]) -> bool:
    """Whether the copy is of the history that the job went on from.

    ``history``: epoch and step of every resume. A copy made in an older epoch counts only if no
    later resume went back to before its step:

    1. Rank 0 completes step 21 in epoch 1 and its copy is sealed; rank 1 dies in step 21.
    2. All resume in epoch 2 from step 20. The copy of 21 is still in its slot.
    3. Rank 1 dies again before anybody has completed step 21 in epoch 2. Rank 0's old copy of 21 is
       of a step that never was, as far as the others know.
    """
    return all(copy.step <= step for epoch, step in history if epoch > copy.epoch)


def agree(
    copies: Mapping[str, Sequence[Copy]],
    history: Sequence[tuple[int, int]],
    node_of: Mapping[int, str],
    refused: Set[int] = frozenset(),
    adopts: Mapping[int, Adoption] | None = None,
) -> Agreement:
    """The newest step that every rank of ``node_of`` can have, from the ``copies`` on each node.

    Steps in ``refused`` are not taken. ``adopts``: ranks that need no copy of their own.
    """
    by_step: dict[int, _Stock] = defaultdict(_Stock)
    for node in sorted(copies):
        for copy in copies[node]:
            if copy.step not in refused and copy.rank in node_of and counts(copy, history):
                by_step[copy.step].add(node, copy)
    lacking: dict[int, Ranks] = {}
    for step in sorted(by_step, reverse=True):
        stock = by_step[step]
        fetches: dict[int, tuple[Fetch, ...]] = {}
        for rank in sorted(node_of):
            found = stock.fetches(rank, node_of[rank])
            adoption = (adopts or {}).get(rank)
            if found is None and adoption is not None and step <= adoption.until:
                found = stock.adopted(adoption.peers)
            if found is not None:
                fetches[rank] = found
        if len(fetches) == len(node_of):
            return Agreement(step, fetches, lacking)
        lacking[step] = tuple(rank for rank in sorted(node_of) if rank not in fetches)
    return Agreement(None, {}, lacking)


def replicated_before(
    step: int, copies: Mapping[str, Sequence[Copy]], history: Sequence[tuple[int, int]]
) -> tuple[int, ...]:
    """The newest steps before this one that may have to be gone back to until a replica of it is
    whole everywhere: those of which there are replicas.
    """
    replicas = {
        copy.step
        for its in copies.values()
        for copy in its
        if copy.replica and counts(copy, history)
    }
    return tuple(sorted(newest_below(step, replicas)))


class _Stock:
    """The copies of one step, and how often each node gives from them."""

    def __init__(self) -> None:
        self._of_rank: dict[int, list[tuple[str, Copy]]] = defaultdict(list)
        self._having: dict[Ranks, _Donors] = {}
        self._given: dict[str, int] = defaultdict(int)

    def add(self, node: str, copy: Copy) -> None:
        self._of_rank[copy.rank].append((node, copy))
        for name in copy.segments:
            if (donors := self._having.get(name)) is None:
                donors = self._having[name] = _Donors()
            donors.add(node, copy)

    def fetches(self, rank: int, node: str) -> tuple[Fetch, ...] | None:
        """What ``rank`` fetches to its ``node``; None if it cannot have this step."""
        # A full copy on its own node, a full copy elsewhere, a replica on its node, one elsewhere.
        bases = sorted(
            self._of_rank[rank],
            key=lambda found: (found[1].replica, found[0] != node, found[0], -found[1].epoch),
        )
        for where, base in bases:
            if not base.replica and not base.missing and where == node:
                return ()
            donors = [self._donor(ranks, node) for ranks in base.missing]
            if all(donor is not None for donor in donors):
                parts: dict[tuple[str, int, bool], list[Ranks]] = defaultdict(list)
                for ranks, donor in zip(base.missing, donors, strict=True):
                    assert donor is not None
                    parts[donor[0], donor[1].rank, donor[1].replica].append(ranks)
                for giver in (where, *(key[0] for key in parts)):
                    self._given[giver] += 1
                return (
                    Fetch(where, rank, base.replica, tuple(base.segments), True),
                    *(Fetch(*key, tuple(groups), False) for key, groups in parts.items()),
                )
        return None

    def adopted(self, peers: Ranks) -> tuple[Fetch, ...] | None:
        """The whole copy of a peer, from where the least was taken; None if there is none."""
        whole = [
            (where, copy)
            for peer in peers
            for where, copy in self._of_rank[peer]
            if not copy.replica and not copy.missing
        ]
        found = min(whole, key=lambda each: (self._given[each[0]], each[1].rank), default=None)
        if found is None:
            return None
        where, copy = found
        self._given[where] += 1
        return (Fetch(where, copy.rank, False, tuple(copy.segments), True),)

    def _donor(self, name: Ranks, node: str) -> tuple[str, Copy] | None:
        """Who gives a segment: a copy on the same node, else on the one that gave least so far."""
        donors = self._having.get(name)
        return None if donors is None else donors.best(node, self._given)


class _Donors:
    """The copies that have one segment.

    Own slots go before replicas, then what comes from the node that gave least so far, then the
    first by name of the node and number of the rank.
    """

    def __init__(self) -> None:
        #: The best copy on each node.
        self._on_node: dict[str, Copy] = {}
        #: The same in order, from the first question on. What a node has given only grows: a place
        #: that is out of date is too far in front, and is put right when it comes to the front.
        self._order: list[tuple[bool, int, str]] | None = None

    def add(self, node: str, copy: Copy) -> None:
        other = self._on_node.get(node)
        if other is None or (copy.replica, copy.rank) < (other.replica, other.rank):
            self._on_node[node] = copy
        self._order = None

    def best(self, node: str, given: Mapping[str, int]) -> tuple[str, Copy]:
        if node in self._on_node:
            return node, self._on_node[node]
        if self._order is None:
            self._order = [
                (copy.replica, given.get(where, 0), where) for where, copy in self._on_node.items()
            ]
            heapq.heapify(self._order)
        while True:
            replica, known, where = self._order[0]
            if known == given.get(where, 0):
                return where, self._on_node[where]
            heapq.heapreplace(self._order, (replica, given.get(where, 0), where))
