"""The arenas of the simulated nodes: copies that are sealed, damaged, fetched and counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from deadpool_launch.sim.promises import PromiseBroken
from deadpool_launch.sim.values import Layout, State, mix
from deadpool_runtime import protocol
from deadpool_runtime.replication.agreement import counts
from deadpool_runtime.replication.naming import Ranks
from deadpool_runtime.replication.slotting import SLOTS, newest_below, slot_for

#: A slot of an arena: rank, whether it is a replica, which of those.
Slot = tuple[int, bool, int]


@dataclass(slots=True)
class Kept:
    """A sealed copy. Of ``state`` it has the own part and the segments that ``copy`` names."""

    copy: protocol.Copy
    state: State
    damaged: bool = False

    def has_all_of(self, other: Kept) -> bool:
        """Whether the other is a part of the same copy, or all of it."""
        mine, theirs = self.copy, other.copy
        same = (mine.rank, mine.step, mine.epoch) == (theirs.rank, theirs.step, theirs.epoch)
        whole = {*theirs.segments} <= {*mine.segments}
        return same and whole and self.state.lineage == other.state.lineage


class Arenas:
    """What lies on each node. ``dead``: nodes that went away, with all they had."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.kept: dict[str, dict[Slot, Kept]] = {}
        self.dead: set[str] = set()
        #: The ranks that took no part, by epoch.
        self.aside_in: dict[int, frozenset[int]] = {}
        #: Nodes that lost copies in another way than that newer ones took their place.
        self.bereft: set[str] = set()
        self._ports: dict[str, int] = {}

    def address(self, node: str) -> protocol.Address:
        """Where the node's replicator listens."""
        return protocol.Address(node, self._ports.setdefault(node, 1))

    def move_replicator(self, node: str) -> None:
        """The replicator is another one now."""
        self._ports[node] = self._ports.setdefault(node, 1) + 1

    def lose(self, node: str) -> None:
        """All copies of the node are gone."""
        self.bereft.add(node)
        self.kept.pop(node, None)

    def digests(self, rank: int, state: State) -> list[protocol.SegmentDigest]:
        """What the rank reports of its segments."""
        return [
            protocol.SegmentDigest(ranks, f"{value:016x}")
            for ranks, value in zip(self.layout.segments[rank], state.values, strict=True)
        ]

    def there(self, node: str, rank: int, replica: bool) -> dict[int, int]:
        """The step in each slot of the rank, or of its replica."""
        arena = self.kept.get(node, {})
        return {
            slot: kept.copy.step
            for (of, held, slot), kept in arena.items()
            if (of, held) == (rank, replica)
        }

    def held(self, node: str, copy: protocol.Copy) -> Kept | None:
        """The sealed replica of the rank and step of ``copy`` on the node."""
        slot = self._find(node, copy.rank, True, copy.step)
        return None if slot is None else self.kept[node][slot]

    def _find(self, node: str, rank: int, replica: bool, step: int) -> Slot | None:
        there = self.there(node, rank, replica)
        return next(((rank, replica, slot) for slot, its in there.items() if its == step), None)

    def slot_for_replica(
        self, node: str, rank: int, step: int, history: Sequence[tuple[int, int]]
    ) -> Slot:
        """Where the replica of a step goes."""
        there = self.there(node, rank, True)
        good = [
            its
            for slot, its in there.items()
            if counts(self.kept[node][rank, True, slot].copy, history)
        ]
        return rank, True, slot_for(step, there, set(newest_below(step, good)), SLOTS)

    def wipe(self, node: str, slot: Slot) -> None:
        """Something is being written there."""
        if (arena := self.kept.get(node)) is not None:
            arena.pop(slot, None)

    def seal(self, node: str, slot: Slot, copy: protocol.Copy, state: State) -> Kept:
        """The copy is whole."""
        kept = self.kept.setdefault(node, {})[slot] = Kept(copy, state)
        return kept

    def copies(self, node: str) -> tuple[protocol.Copy, ...]:
        """What the agent of the node reports."""
        return tuple(kept.copy for _, kept in sorted(self.kept.get(node, {}).items()))

    def newest_whole(
        self,
        nodes: Set[str],
        history: Sequence[tuple[int, int]],
        refused: Set[int],
        present: Mapping[int, int],
    ) -> int:
        """The newest step that the copies on these nodes are enough for; -1 if none is.

        ``present``: the ranks that take part, and until which step a peer's copy will do for each.

        Found in the simplest way: a rank can have a step if there is a copy of it with a certain
        past, and each segment is in one with the same past.
        """
        kept = [
            each
            for node, arena in self.kept.items()
            if node in nodes
            for each in arena.values()
            if counts(each.copy, history)
        ]
        found = -1
        for step, lineage in {(each.state.step, each.state.lineage) for each in kept}:
            if step in refused or step <= found:
                continue
            same = [each.copy for each in kept if each.state.lineage == lineage]
            if any(self._is_whole(of, step, present) for of in self._as_shared_out(same)):
                found = step
        return found

    def _as_shared_out(self, same: list[protocol.Copy]) -> Iterator[list[protocol.Copy]]:
        """The copies of one state that go together, for each way in which it was shared out, if
        all shards are there."""
        if not self.layout.shares:
            yield same
            return
        everyone = frozenset(range(self.layout.world_size))
        among = {
            copy.epoch: everyone - self.aside_in.get(copy.epoch, everyone - everyone)
            for copy in same
        }
        for former in set(among.values()):
            of = [copy for copy in same if copy.rank not in former or among[copy.epoch] == former]
            if former <= {copy.rank for copy in of if (copy.rank,) not in copy.missing}:
                yield of

    def _is_whole(self, same: list[protocol.Copy], step: int, present: Mapping[int, int]) -> bool:
        there = {ranks for copy in same for ranks in copy.segments}
        having = {copy.rank for copy in same if there.issuperset(copy.missing)}
        whole = {copy.rank for copy in same if not copy.replica and not copy.missing}
        return all(
            rank in having
            or (step <= until and any(self.layout.alike(rank, peer) for peer in whole & {*present}))
            for rank, until in present.items()
        )

    def fetched(
        self, rank: int, where: str, plan: protocol.Plan, own_slot: Slot, cut: Set[str]
    ) -> Kept | str:
        """The rank's copy on its node, made whole from the pieces in this slot; or why that cannot
        be done.

        ``cut``: nodes that do not reach each other.
        """
        if not plan.pieces:
            kept = self._read(where, rank, False, plan.step)
            if isinstance(kept, Kept) and kept.copy.missing:
                raise PromiseBroken(f"rank {rank} is to take a copy that is not whole")
            return kept
        if [piece.base for piece in plan.pieces].index(True) or sum(
            piece.base for piece in plan.pieces
        ) != 1:
            raise PromiseBroken(f"rank {rank} is sent pieces of which the base is not the first")
        parts: list[Kept] = []
        values: dict[Ranks, int] = {}
        for piece in plan.pieces:
            node = piece.source.host
            which = piece.rank, piece.replica, plan.step
            kept = self._fetch(where, piece.source, which, cut)
            if isinstance(kept, str):
                return kept
            parts.append(kept)
            for ranks in piece.segments:
                if ranks not in kept.copy.segments:
                    raise PromiseBroken(f"rank {rank} is sent to {node} for what is not there")
                place = self.layout.segments[kept.copy.rank].index(ranks)
                mine = (rank,) if self.layout.shares and ranks == (kept.copy.rank,) else ranks
                values[mine] = kept.state.values[place]
        base = parts[0]
        adopted = plan.pieces[0].adopted and base.copy.rank != rank
        if adopted and not self.layout.alike(rank, base.copy.rank):
            raise PromiseBroken(f"rank {rank} is to take over a state that is not like its own")
        if base.copy.rank != rank and not adopted:
            raise PromiseBroken(f"rank {rank} is sent the state of rank {base.copy.rank}")
        if {part.state.lineage for part in parts} != {base.state.lineage}:
            raise PromiseBroken(f"rank {rank} is sent pieces of different pasts")
        segments = self.layout.segments[rank]
        if values.keys() != set(segments):
            raise PromiseBroken(f"rank {rank} is not sent all there is of its state")
        state = State(
            plan.step,
            base.state.lineage,
            tuple(values[ranks] for ranks in segments),
            mix(base.state.own, rank) if adopted else base.state.own,
        )
        copy = protocol.Copy(rank, plan.step, base.copy.epoch, False, list(segments), [])
        if adopted and plan.former:
            return Kept(copy, state)  # it has a shard of another rank until it is made once more
        return self.seal(where, own_slot, copy, state)

    def lent(
        self, where: str, step: int, shard: protocol.Shard, held_slot: Slot, cut: Set[str]
    ) -> Kept | str:
        """The copy of another rank that has its shard, on this node then, in that slot if it is
        fetched; or why that is not."""
        which = shard.rank, shard.replica, step
        if shard.source is None:
            return self._read(where, *which)
        kept = self._fetch(where, shard.source, which, cut)
        if isinstance(kept, str):
            return kept
        missing = [ranks for ranks in self.layout.segments[shard.rank] if ranks != (shard.rank,)]
        copy = protocol.Copy(shard.rank, step, kept.copy.epoch, True, shard.segments, missing)
        return self.seal(where, held_slot, copy, kept.state)

    def _fetch(
        self,
        where: str,
        source: protocol.Address,
        which: tuple[int, bool, int],
        cut: Set[str],
    ) -> Kept | str:
        """A copy that lies elsewhere: of which rank, whether a replica, of which step."""
        node = source.host
        if node in self.dead or source != self.address(node):
            return f"{node} does not answer"
        if node != where and (node in cut or where in cut):
            return f"{node} cannot be reached"
        return self._read(node, *which)

    def _read(self, node: str, rank: int, replica: bool, step: int) -> Kept | str:
        """Check a copy as its reader does; a damaged one loses its seal."""
        slot = self._find(node, rank, replica, step)
        if slot is None:
            if node not in self.bereft:
                raise PromiseBroken(
                    f"the copy of step {step} of rank {rank} on {node} is needed and gone"
                )
            return f"there is no copy of step {step} of rank {rank} on {node}"
        kept = self.kept[node][slot]
        if not kept.damaged:
            return kept
        self.wipe(node, slot)
        self.bereft.add(node)
        return f"a hash of the copy of rank {rank} on {node} differs"
