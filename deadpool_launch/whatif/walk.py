"""One run of a job under one strategy, from fault to fault. Pure.

Two places keep the state: copies in the memory of the nodes, which go with the nodes, and durable
checkpoints. ``Rules`` say how often each is written and what each kind of recovery takes; the
strategies differ in nothing else. Between two faults nothing is walked through: how far the job
comes follows from the time.

1. A fault strikes nodes that train. All work since the newest state that is left is lost.
2. Lost nodes are replaced by spares. Without one the job goes on with fewer nodes, if the strategy
   can; otherwise a new allocation is waited for, and nothing but the checkpoint is left.
3. A fault during a recovery begins the recovery again, with what was lost so far.

The replica of a node's state is with its holders, nodes of other failure domains, which the
runtime's own function chooses. If a node and all of them are lost in one incident the checkpoint is
all that is left. A spare that holds one is taken to be there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from deadpool_launch.whatif.faults import Fault
from deadpool_launch.whatif.job import Account, Job
from deadpool_runtime.replication.naming import Ranks
from deadpool_runtime.replication.placement import Nodes, choose_holders


@dataclass(frozen=True, slots=True)
class Rules:
    """What a strategy does and what that takes, in steps and seconds."""

    #: What protection adds to a step, as a share of it.
    overhead: float
    #: A copy in memory after so many steps; None without any.
    copy_every: int | None
    copy_s: float
    #: A durable checkpoint after so many steps; the time that training stands still for it.
    save_every: int
    save_s: float
    #: From a fault to the first step: every node stays; a spare takes a place; from the checkpoint.
    transient_s: float
    permanent_s: float
    reload_s: float
    #: The same when the job goes on with fewer nodes; None if it cannot.
    exclude_s: float | None = None
    #: Other nodes get what a node copied after so many steps, counted from where all went on: its
    #: loss goes back to that. So long after the end of the step they have it.
    replicate_every: int = 1
    replicate_s: float = 0.0
    #: So many other nodes.
    holders: int = 1


def walk(job: Job, rules: Rules, faults: Iterator[Fault], limit_s: float) -> Account:
    """Run the job to its last step. One that takes longer than ``limit_s`` is given up."""
    return _Walk(job, rules, faults, limit_s).run()


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Steps that were completed in a row: those after ``begin``, up to and including ``end``."""

    begin: int
    end: int
    #: Nodes that trained, as a share of all.
    speed: float


class _Walk:
    def __init__(self, job: Job, rules: Rules, faults: Iterator[Fault], limit_s: float) -> None:
        self.job, self.rules, self._faults, self._limit_s = job, rules, faults, limit_s
        self._ahead: Fault | None = next(faults, None)
        self.at = 0.0
        self.step = 0
        #: Where the last start or recovery went on from; every node has copied that at once.
        self.base = 0
        #: From the end of the newest step to the fault that struck.
        self.into_s = 0.0
        self.vacant: set[int] = set()
        self.spares = set(range(job.nodes, job.seats))
        self.stretches: list[_Stretch] = []
        self.lost_s = self.recovering_s = self.queued_s = 0.0
        self.faults = self.incidents = self.replayed = 0
        self.used = self.spoiled = self.requeues = 0

    def run(self) -> Account:
        job = self.job
        while self.at <= self._limit_s:
            end = self.at + self._takes(self.step, job.steps, self._speed)
            fault = self._take(end)
            if fault is None:
                self._advance(job.steps)
                self.at = end
                return self._account(finished=True)
            if self._struck(fault):
                reached = self._reach(fault.at - self.at)
                passed_s = self._takes(self.step, reached, self._speed)
                self.into_s = fault.at - self.at - passed_s
                self.lost_s += self.into_s
                self._advance(reached)
                self.at = fault.at
                self._recover(fault)
        return self._account(finished=False)

    # ------------------------------------------------------------ training

    @property
    def _speed(self) -> float:
        return 1 - len(self.vacant) / self.job.nodes

    def _takes(self, begin: int, end: int, speed: float) -> float:
        """The steps after ``begin`` up to ``end``, with what is written behind them."""
        rules = self.rules
        steps_s = (end - begin) * self.job.step_s * (1 + rules.overhead) / speed
        return steps_s + self._writing(begin, end)

    def _writing(self, begin: int, end: int) -> float:
        rules = self.rules
        saves_s = (end // rules.save_every - begin // rules.save_every) * rules.save_s
        if rules.copy_every is None:
            return saves_s
        return saves_s + (end // rules.copy_every - begin // rules.copy_every) * rules.copy_s

    def _reach(self, time_s: float) -> int:
        """The last step that is completed, and written where it is to be, within ``time_s``."""
        low, high = self.step, self.job.steps
        while low < high:
            middle = (low + high + 1) // 2
            if self._takes(self.step, middle, self._speed) <= time_s:
                low = middle
            else:
                high = middle - 1
        return low

    def _advance(self, step: int) -> None:
        if step > self.step:
            self.stretches.append(_Stretch(self.step, step, self._speed))
            self.step = step

    def _roll_back(self, step: int) -> None:
        self.replayed += self.step - step
        while self.stretches and self.stretches[-1].end > step:
            last = self.stretches.pop()
            kept = max(step, last.begin)
            self.lost_s += self._takes(kept, last.end, last.speed)
            if kept > last.begin:
                self.stretches.append(_Stretch(last.begin, kept, last.speed))
        self.step = self.base = step

    # ------------------------------------------------------------ faults

    def _take(self, before: float) -> Fault | None:
        """The next fault, if it is earlier than that."""
        fault = self._ahead
        if fault is None or fault.at >= before:
            return None
        self._ahead = next(self._faults, None)
        return fault

    def _struck(self, fault: Fault) -> list[int]:
        """The seats of training nodes that the fault strikes; spares that it strikes are lost."""
        if fault.permanent:
            gone = self.spares.intersection(fault.seats)
            self.spares -= gone
            self.spoiled += len(gone)
        struck = self._seated(fault)
        self.faults += bool(struck)
        return struck

    def _seated(self, fault: Fault) -> list[int]:
        return [s for s in fault.seats if s < self.job.nodes and s not in self.vacant]

    def _recover(self, fault: Fault) -> None:
        """Find the state to go on from, replace what is lost, and come back to training."""
        self.incidents += 1
        gone: set[int] = set()
        from_disk = self.rules.copy_every is None
        # What was gone back to for a process is replicated only when training goes on.
        replicated = self._newest_replica()
        while True:
            if fault.permanent:
                struck = self._seated(fault)
                gone.update(struck)
                filled = self._fill(struck)
                from_disk = from_disk or not filled or self._copies_gone(gone)
                if not filled:
                    gone.clear()
            if from_disk:
                self._roll_back(self._newest_checkpoint())
            else:
                self._roll_back(replicated if gone else self._newest_copy())
            end = self.at + self._pause(gone, from_disk)
            again = self._fault_that_strikes(end)
            until = end if again is None else again.at
            self.recovering_s += until - self.at
            self.at = until
            if again is None or self.at > self._limit_s:
                return
            fault = again

    def _fault_that_strikes(self, before: float) -> Fault | None:
        """The next fault before that which strikes nodes that train."""
        while (fault := self._take(before)) is not None:
            if self._struck(fault):
                return fault
        return None

    def _fill(self, struck: list[int]) -> bool:
        """Put spares into these seats, or leave them empty; False after a new allocation."""
        for seat in struck:
            if self.spares:
                self.spares.remove(min(self.spares))
                self.used += 1
            else:
                self.vacant.add(seat)
        left = self.job.nodes - len(self.vacant)
        enough = left >= max(1, self.job.least_nodes)
        if not self.vacant or (self.rules.exclude_s is not None and enough):
            return True
        self._requeue()
        return False

    def _requeue(self) -> None:
        self.requeues += 1
        self.queued_s += self.job.queue_s
        self.at += self.job.queue_s
        while self._ahead is not None and self._ahead.at < self.at:
            self._ahead = next(self._faults, None)
        self.vacant.clear()
        self.spares = set(range(self.job.nodes, self.job.seats))

    def _pause(self, gone: set[int], from_disk: bool) -> float:
        rules = self.rules
        if from_disk:
            return rules.reload_s
        if gone & self.vacant and rules.exclude_s is not None:
            return rules.exclude_s
        return rules.permanent_s if gone else rules.transient_s

    # ------------------------------------------------------------ what is left

    def _newest_checkpoint(self) -> int:
        return self.step // self.rules.save_every * self.rules.save_every

    def _newest_copy(self) -> int:
        every = self.rules.copy_every or 1
        return max(self.base, self.step // every * every)

    def _newest_replica(self) -> int:
        """The newest step that the holders of every node have."""
        newest, every = self._newest_copy(), self.rules.copy_every or 1
        if self.rules.replicate_every > every:
            every = self.rules.replicate_every
            newest = self.base + (self.step - self.base) // every * every
        under_way = newest == self.step and self.into_s < self.rules.replicate_s
        return max(self.base, newest - every) if under_way else newest

    def _copies_gone(self, gone: set[int]) -> bool:
        job, count = self.job, self.rules.holders
        if len(gone) <= min(count, job.seats - 1):
            return False
        holders = _holders(job.nodes, job.spares, job.domain, count)
        return any(gone.issuperset(holders[seat]) for seat in gone)

    # ------------------------------------------------------------ the account

    def _account(self, *, finished: bool) -> Account:
        job, step_s, overhead = self.job, self.job.step_s, self.rules.overhead
        steps = sum(each.end - each.begin for each in self.stretches)
        slow_s = sum(
            (each.end - each.begin) * step_s * (1 + overhead) * (1 / each.speed - 1)
            for each in self.stretches
        )
        held_node_s = (self.at - self.queued_s) * job.seats
        return Account(
            useful_s=steps * step_s,
            overhead_s=steps * step_s * overhead,
            saving_s=sum(self._writing(each.begin, each.end) for each in self.stretches),
            slow_s=slow_s,
            lost_s=self.lost_s,
            recovering_s=self.recovering_s,
            queued_s=self.queued_s,
            total_s=self.at,
            faults=self.faults,
            incidents=self.incidents,
            replayed_steps=self.replayed,
            spares_used=self.used,
            spares_lost=self.spoiled,
            requeues=self.requeues,
            held_node_s=held_node_s,
            wasted_node_s=held_node_s - steps * step_s * job.nodes,
            finished=finished,
        )


@lru_cache(maxsize=64)
def _holders(nodes: int, spares: int, domain: int, count: int) -> tuple[tuple[int, ...], ...]:
    """The seats that keep the replica of each seat that trains, none where there is no other."""
    seats = {str(seat): seat for seat in range(nodes + spares)}
    names = tuple(seats)
    among = Nodes(
        active=names[:nodes],
        spares=names[nodes:],
        domains={name: str(seat // domain) for name, seat in seats.items()},
    )
    own: dict[int, dict[Ranks, int]] = {seat: {(seat,): 1} for seat in range(nodes)}
    found = choose_holders(own, dict(enumerate(names[:nodes])), among, count)
    return tuple(
        () if each is None else tuple(seats[share.node] for share in each.shares)
        for each in found.values()
    )
