"""How copies of a rank's state come about and where they go: its node, its holder, the deputy, the
disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deadpool_launch.sim.arenas import Kept, Slot
from deadpool_launch.sim.values import State
from deadpool_runtime import protocol
from deadpool_runtime.replication.naming import members

if TYPE_CHECKING:
    from deadpool_launch.sim.cluster import Cluster
    from deadpool_launch.sim.ranks import Process

#: Steps whose digests are compared between ranks.
_COMPARED_STEP = 1


@dataclass(frozen=True, slots=True)
class Put:
    """A replica on its way from one replicator to another. Of those of one rank at one node only
    the newest is taken in."""

    number: int
    process: Process
    kept: Kept
    epoch: int
    source: protocol.Address
    to: protocol.Address
    #: What is done in the process when it is there.
    confirm: Callable[[], None] | None
    #: Whether another replica of the same step may be overwritten.
    replaces: bool


class Copying:
    """The copies of all ranks. What it does for a process stops with it; a transfer between two
    replicators does not.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._arenas = cluster.arenas
        self._network = cluster.network
        self._sent = 0
        #: The newest that began to arrive, by node and rank.
        self._newest: dict[tuple[str, int], int] = {}

    # ------------------------------------------------------------ on the rank's node

    def begin(self, process: Process) -> None:
        """Begin to copy the present state of the process."""
        if process.unsealed is not None:
            # The optimizer changed nothing before the copy of the step before was whole.
            self._seal(process, process.unsealed, process.epoch)
        state = process.state
        self._arenas.wipe(process.node, self._take(process, state.step))
        process.unsealed = state
        process.when(0.1, self._seal, process, state, process.epoch)

    def _take(self, process: Process, step: int) -> Slot:
        """The slot for a new copy of the step."""
        return process.rank, False, process.slots.take(step)[0]

    def _own_slot(self, process: Process, step: int) -> Slot:
        slot = process.slots.find(step)
        assert slot is not None, "the copy was begun"
        return process.rank, False, slot

    def go_back(self, process: Process, plan: protocol.Plan) -> None:
        """All ranks go on from the plan's step."""
        there = self._arenas.there(process.node, process.rank, False)
        process.slots.go_back(plan.step, plan.keep, there)

    def settle(self, process: Process) -> None:
        """No copy is under way any more: the one that is becomes whole at once, or never."""
        state, process.unsealed = process.unsealed, None
        if state is not None and (process.at_rest or self._cluster.dice.random() < 0.5):
            process.unsealed = state
            self._seal(process, state, process.epoch)

    def _seal(self, process: Process, state: State, epoch: int) -> None:
        if process.unsealed is not state:
            return
        process.unsealed = None
        segments = list(self._cluster.layout.segments[process.rank])
        copy = protocol.Copy(process.rank, state.step, epoch, False, segments, [])
        self._arenas.seal(process.node, self._own_slot(process, state.step), copy, state)
        process.sealed, process.sealed_state = copy, state
        if state.step <= _COMPARED_STEP:
            digests = self._arenas.digests(process.rank, state)
            process.say(protocol.Snapshotted(epoch, state.step, digests))
        if process.slots.replicates(state.step):
            process.offered = copy, state
            if process.chosen:
                self._replicate(process)
        if self._cluster.disk.wants(state.step) and not process.aside:
            process.when(0.5, self._save, process, copy, state)

    def save(self, process: Process) -> None:
        """The process stands at a boundary: write its state, unless it is its turn anyway."""
        state = process.unsealed
        if state is not None:
            self._seal(process, state, process.epoch)
        copy = process.sealed
        if copy is not None and not self._cluster.disk.wants(copy.step):
            process.when(0.5, self._save, process, copy, process.sealed_state)

    def _save(self, process: Process, copy: protocol.Copy, state: State) -> None:
        self._cluster.disk.write(process.rank, copy.epoch, state)
        process.say(protocol.Saved(copy.epoch, copy.step, 100, 0.1))

    # ------------------------------------------------------------ to other nodes

    def choose(
        self,
        process: Process,
        epoch: int,
        holder: protocol.Holder | None,
        *,
        restoring: bool = False,
    ) -> None:
        """From now on replicas go to ``holder``, first that of the newest copy. ``restoring``:
        other ranks still fetch what they need; ``resumed`` is to follow."""
        if epoch >= process.chosen:
            process.chosen, process.holder = epoch, holder
            process.restoring, process.postponed = restoring, False
            self._replicate(process)

    def resumed(self, process: Process) -> None:
        """All ranks are restored."""
        process.restoring = False
        if process.postponed:
            process.postponed = False
            self._replicate(process)

    def _postpone(self, process: Process, epoch: int) -> None:
        """The holder has something else of this step that others may need."""
        if process.chosen == epoch:
            process.postponed = True
            if not process.restoring:
                self.resumed(process)

    def again(self, process: Process) -> None:
        """The replicator of the node is another one: it is told of the newest copy."""
        if process.chosen:
            self._replicate(process)

    def _replicate(self, process: Process) -> None:
        holder, epoch = process.holder, process.chosen
        if process.offered is None:
            return
        copy, state = process.offered
        if holder is None:
            process.confirm(epoch, copy.step)
            return
        lacking = {each.node for each in (holder, *holder.more)}
        for each in (holder, *holder.more):

            def confirm(node: str = each.node) -> None:
                lacking.discard(node)
                if not lacking:
                    process.confirm(epoch, copy.step)

            self._send(process, (copy, state), epoch, each.address, each.segments, confirm)
        if holder.deputy is not None:
            self._send(process, (copy, state), epoch, holder.deputy, [], None)

    def _send(
        self,
        process: Process,
        offered: tuple[protocol.Copy, State],
        epoch: int,
        to: protocol.Address,
        segments: list[tuple[int, ...]],
        confirm: Callable[[], None] | None,
    ) -> None:
        """``confirm``: what is done in the process when it is there."""
        copy, state = offered
        missing = [ranks for ranks in copy.segments if ranks not in segments]
        replica = protocol.Copy(copy.rank, copy.step, copy.epoch, True, list(segments), missing)
        source = self._arenas.address(process.node)
        self._sent += 1
        self._network.between(
            process.node,
            to.host,
            self._cluster.queue.delay(0.05),
            self._arriving,
            Put(
                self._sent,
                process,
                Kept(replica, state),
                epoch,
                source,
                to,
                confirm,
                not process.restoring,
            ),
        )

    def _arriving(self, put: Put) -> None:
        """The first of it arrives: what was in the slot is gone, but for a replica of this very
        copy, or one of the same step that others may need."""
        place = put.to.host, put.kept.copy.rank
        if not self._can_arrive(put) or put.number < self._newest.get(place, 0):
            return
        self._newest[place] = put.number
        there = self._arenas.held(put.to.host, put.kept.copy)
        if there is not None and there.has_all_of(put.kept):
            self._confirm(put)
            return
        if there is not None and not put.replaces:
            put.process.when(0.02, self._postpone, put.process, put.epoch)
            return
        slot = self._slot_for_replica(*place, put.kept.copy.step)
        self._arenas.wipe(put.to.host, slot)
        delay_s = self._cluster.queue.delay(0.05)
        self._network.between(put.source.host, put.to.host, delay_s, self._arrived, put, slot)

    def _slot_for_replica(self, node: str, rank: int, step: int) -> Slot:
        history = self._cluster.launcher.state.history
        return self._arenas.slot_for_replica(node, rank, step, history)

    def _arrived(self, put: Put, slot: Slot) -> None:
        newest = self._newest[put.to.host, put.kept.copy.rank]
        if self._can_arrive(put) and put.number == newest:
            self._arenas.seal(put.to.host, slot, put.kept.copy, put.kept.state)
            self._confirm(put)

    def _confirm(self, put: Put) -> None:
        if put.confirm is not None:
            put.process.when(0.02, put.confirm)

    def _can_arrive(self, put: Put) -> bool:
        """Whether both replicators are still who they were, and the epoch is not fenced off."""
        for each in (put.source, put.to):
            if each.host in self._arenas.dead or self._arenas.address(each.host) != each:
                return False
        return self._cluster.fenced.get(put.to.host, 0) <= put.epoch

    # ------------------------------------------------------------ and back

    def fetched(self, process: Process, plan: protocol.Plan) -> Kept | str:
        """The state that the plan names, of which there is a copy on the node then."""
        rank, node = process.rank, process.node
        self.go_back(process, plan)
        slot = (
            self._take(process, plan.step) if plan.pieces or plan.checkpoint else (rank, False, 0)
        )
        if not plan.checkpoint:
            return self._arenas.fetched(rank, node, plan, slot, self._network.apart)
        part = self._cluster.disk.read(rank, plan.step)
        if isinstance(part, str):
            return part
        segments = list(self._cluster.layout.segments[rank])
        copy = protocol.Copy(rank, plan.step, plan.epoch, False, segments, [])
        return self._arenas.seal(node, slot, copy, part.state)

    def shards(
        self, process: Process, plan: protocol.Plan, found: Kept
    ) -> dict[int, tuple[int, int]] | str:
        """The past and value of each shard that the process brings, by rank; or why one cannot be
        had."""
        layout, brought = self._cluster.layout, {}
        node, step = process.node, plan.step
        if process.rank in members(plan.former):
            brought[process.rank] = found.state.lineage, layout.shard_of(process.rank, found.state)
        for shard in plan.shards:
            if plan.checkpoint:
                part = self._cluster.disk.read(shard.rank, step)
                state = part if isinstance(part, str) else part.state
            else:
                slot = self._slot_for_replica(node, shard.rank, step)
                kept = self._arenas.lent(node, step, shard, slot, self._network.apart)
                state = kept if isinstance(kept, str) else kept.state
            if isinstance(state, str):
                return state
            brought[shard.rank] = state.lineage, layout.shard_of(shard.rank, state)
        return brought

    def anew(self, process: Process, epoch: int) -> protocol.Copy:
        """A copy of the state that the process has now, which is none of those that it fetched."""
        segments = list(self._cluster.layout.segments[process.rank])
        step = process.state.step
        copy = protocol.Copy(process.rank, step, epoch, False, segments, [])
        slot = self._take(process, step)
        return self._arenas.seal(process.node, slot, copy, process.state).copy
