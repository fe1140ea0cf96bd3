"""What ranks do together: the collective of a step, and the rebuilding of the groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deadpool_launch.sim.promises import PromiseBroken
from deadpool_launch.sim.values import contribution
from deadpool_runtime.replication.naming import members

if TYPE_CHECKING:
    from deadpool_launch.sim.cluster import Cluster
    from deadpool_launch.sim.ranks import Process

#: Of what a step may take, the part after which the agents look.
LATE = 0.5
#: How often it is seen whether ranks that cannot reach each other do again.
LOOK_S = 0.1
_MASK = (1 << 64) - 1
#: Stands for the step where state is shared out anew.
SHARING = -1


class Meeting:
    """Ranks that wait for each other; over when all have come, void when one leaves before."""

    def __init__(self) -> None:
        self.there: dict[int, Process] = {}
        self.void = False

    def leave(self, process: Process) -> None:
        """The process unwinds or is gone."""
        if self.there.get(process.rank) is process:
            self.void = True


class Training:
    """The meetings of one job."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        #: By epoch and step; the step is None for the rebuilding.
        self._meetings: dict[tuple[int, int | None], Meeting] = {}
        #: Epochs in which a peer was lost.
        self._broken: set[int] = set()
        #: Steps of an epoch that some rank has begun.
        self._begun: set[tuple[int, int]] = set()

    def begun(self, epoch: int, step: int) -> None:
        """A rank begins the step after ``step``: have the agents look after a while if it ended."""
        if (epoch, step) not in self._begun:
            self._begun.add((epoch, step))
            late_s = self._cluster.config.collective_timeout_s * LATE
            self._cluster.queue.later(late_s + LOOK_S, self._look, epoch, step)

    def _look(self, epoch: int, step: int) -> None:
        for process in self._cluster.current.values():
            standing = process.standing()
            if standing is not None and (standing.epoch, standing.step) == (epoch, step + 1):
                process.agent.look()

    def lose_message(self, process: Process) -> None:
        """A message of the collective that the process waits in is lost for good."""
        if process.meeting is not None:
            process.meeting.void = True

    def meet(self, process: Process, epoch: int, step: int | None) -> Meeting:
        """The process comes to a meeting and waits in it."""
        meeting = self._meetings.setdefault((epoch, step), Meeting())
        meeting.there[process.rank] = process
        if epoch in self._broken:
            self._may_break(process, epoch, step)
        elif meeting.void:
            pass  # it waits until it is told
        elif len(meeting.there) == self._cluster.config.world_size - len(process.aside):
            del self._meetings[epoch, step]
            self._all_there(list(meeting.there.values()), epoch, step)
        return meeting

    def _all_there(self, processes: list[Process], epoch: int, step: int | None) -> None:
        apart = self._cluster.network.apart
        nodes = {process.node for process in processes}
        if apart & nodes and len(nodes) > 1:  # within a node all reach each other
            self._wait_for_path(processes, epoch, step)
            return
        if any(process.meeting is not None and process.meeting.void for process in processes):
            return
        if step is None:
            for process in processes:
                process.when(0.05, process.rebuilt, epoch)
            return
        if step == SHARING:
            shards = self._shards(processes)
            for process in processes:
                process.when(0.05, process.shared, epoch, shards)
            return
        if len({process.state.lineage for process in processes}) != 1:
            raise PromiseBroken(f"ranks with different pasts meet in epoch {epoch}, step {step}")
        total = sum(contribution(process.state) for process in processes) & _MASK
        for process in processes:
            process.when(0.03, process.summed, epoch, step, total)

    def _shards(self, processes: list[Process]) -> dict[int, int]:
        """The shards that they bring, by rank: one of each that had one, all of one past."""
        former: set[int] = set()
        shards: dict[int, int] = {}
        for process in processes:
            if process.plan is not None:
                former.update(members(process.plan.former))
            for rank, (lineage, value) in process.brought.items():
                if rank in shards:
                    raise PromiseBroken(f"the shard of rank {rank} is brought twice")
                if lineage != processes[0].state.lineage:
                    raise PromiseBroken(f"the shard of rank {rank} is of another past")
                shards[rank] = value
        if shards.keys() != former:
            raise PromiseBroken(f"shards of {sorted(shards)} are there, not of {sorted(former)}")
        return shards

    def _wait_for_path(self, processes: list[Process], epoch: int, step: int | None) -> None:
        """They go on when they reach each other, unless one of them leaves before."""
        if all(process.waits_in(epoch) for process in processes):
            self._cluster.queue.later(LOOK_S, self._all_there, processes, epoch, step)

    def peer_lost(self, epoch: int) -> None:
        """A process is gone: some of those that wait for it notice, others hang until told."""
        if epoch < 1:
            return  # it was told nothing yet, so nobody waits for it
        self._broken.add(epoch)
        for (of, step), meeting in list(self._meetings.items()):
            if of == epoch:
                for process in list(meeting.there.values()):
                    self._may_break(process, epoch, step)
        if not self._cluster.scenario.attaches:
            for process in self._cluster.processes():
                if process.epoch == epoch and self._cluster.dice.random() < 0.5:
                    process.when(0.3, process.break_script, epoch)

    def _may_break(self, process: Process, epoch: int, step: int | None) -> None:
        if self._cluster.dice.random() < 0.5:
            process.when(0.3, process.broken, epoch, step)
