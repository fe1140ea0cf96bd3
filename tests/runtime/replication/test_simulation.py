"""The rank's rule and the replicators' cores under random faults, without a clock or a process.

Each seed is a training run of ``DEADPOOL_SIM_STEPS`` steps (default 1,000) with a fault every few
steps, at a random point of the pipeline. ``DEADPOOL_SIM_SEEDS`` says how many seeds are run; a
failure names its seed and how to run it alone.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum

import pytest
from msgspec.structs import replace
from replication_sim import RANKS, Client, Node, Sim, Slot

from deadpool_runtime.protocol import Holder, Piece
from deadpool_runtime.replication import messages
from deadpool_runtime.replication.arena import SLOTS
from deadpool_runtime.replication.events import SlotName
from deadpool_runtime.replication.manifest import CHUNK_NBYTES, OWN, Manifest, Segment, offsets
from deadpool_runtime.replication.naming import Ranks
from deadpool_runtime.replication.slotting import SlotTable, newest_below

SEEDS = int(os.environ.get("DEADPOOL_SIM_SEEDS", "2"))
FIRST_SEED = int(os.environ.get("DEADPOOL_SIM_FIRST_SEED", "1"))
STEPS = int(os.environ.get("DEADPOOL_SIM_STEPS", "1000"))
#: After how many steps there is a replica, by seed.
INTERVALS = (3, 1, 7, 1, 2, 1, 3, 1)
EVERYONE = tuple(range(RANKS))
#: Where a copy may be when a fault strikes: D2H begun, a chunk in the slot, the slot about to be
#: sealed, a chunk sent, a chunk received, the replica about to be sealed, the rank told of it; and
#: the moment when the step is complete on every rank.
POINTS = ("begin", "chunk", "seal", "sent", "received", "held", "confirmed", "complete")
TURNS_PER_STEP = 3000
PRESENT = (0, 1, OWN)


class At(Enum):
    """Where a rank is."""

    BODY = "in the body, before the all-reduce"
    GUARD = "before the optimizer"
    PARKED = "parked"


def token(what: object, chunk: int, step: int, variant: int) -> bytes:
    """The bytes of a chunk of state ``step``, computed in epoch ``variant``."""
    return f"{what}/{chunk}/{step}/{variant}".encode()


class Rank:
    """Trains as the session does: slots, a copier, and the guard's rule."""

    def __init__(self, run: Run, rank: int, node: Node, born: int) -> None:
        self.run = run
        self.rank = rank
        self.move_to(node, born)
        self.at = At.PARKED
        #: The step whose body is running, and the newest state that is complete.
        self.step = 0
        self.completed = -1
        #: The copy being made: its manifest and what is still to do, and what it overwrites.
        self.copying: Manifest | None = None
        self.overwrites: int | None = None
        self.to_do: list[str] = []
        self.answers: dict[int, bool] = {}
        self.assembled: bool | None = None
        #: Whether it has the state that all go back to.
        self.restored = True

    def move_to(self, node: Node, born: int) -> None:
        """A new process on that node."""
        self.node = node
        self.table = SlotTable(self.run.interval, node.steps(False, self.rank))
        self.client = Client(node, self.rank, born, self.hear)

    def hear(self, message: messages.FromReplicator) -> None:
        match message:
            case messages.Confirmed(epoch=epoch, step=step):
                if epoch == self.run.sim.epoch:
                    self.answers[step] = True
                    self.run.reached("confirmed", self.rank)
            case messages.Unconfirmed(epoch=epoch, step=step):
                if epoch == self.run.sim.epoch:
                    self.answers.setdefault(step, False)
            case messages.Assembled():
                self.assembled = True
            case messages.AssembleFailed():
                self.assembled = False
            case messages.LinkNote():
                pass

    def has_answer(self) -> bool:
        """Whether its assembly ended."""
        return self.assembled is not None

    def number(self, step: int) -> int:
        """Which of its slots has the copy of ``step``."""
        found = self.table.find(step)
        assert found is not None
        return found

    def slot(self, step: int) -> Slot:
        return self.node.slot(SlotName(False, self.rank, step, self.number(step)))

    def go_back(self, step: int, keep: Sequence[int]) -> None:
        """All go on from ``step``."""
        self.table.go_back(step, keep, self.node.steps(False, self.rank))

    def sealed(self, step: int) -> Manifest | None:
        """The manifest of the sealed own copy of ``step``."""
        copies = self.node.copies(False, self.rank).values()
        return next((manifest for manifest, _ in copies if manifest.step == step), None)

    # ------------------------------------------------------------ training

    def can_train(self) -> bool:
        match self.at:
            case At.BODY:
                # The all-reduce needs everybody in the same body, or past it.
                return all(rank.step >= self.step for rank in self.run.ranks)
            case At.GUARD:
                # Where every step has a replica, that of the step all went back to is given time.
                late = self.run.interval == 1 and self.wanted == self.run.start
                answered = late or self.wanted in self.answers
                return self.step == 0 or (not self.to_do and answered)
            case At.PARKED:
                return False

    @property
    def wanted(self) -> int:
        """The step whose replica is to be confirmed."""
        return self.table.newest_replicated(self.step - 1)

    def train(self) -> None:
        if self.at is At.BODY:
            self.at = At.GUARD
            return
        if self.step > 0 and not self.answers.get(self.wanted, True):
            self.run.unprotected.append(self.wanted)
        variant = self.run.variants.setdefault(self.step, self.run.sim.epoch)
        assert variant == self.run.sim.epoch
        self.completed = self.step
        self.answers = {step: its for step, its in self.answers.items() if step >= self.wanted}
        self.begin_copy(self.step)
        self.step += 1
        self.at = At.BODY if self.step <= self.run.last_step else At.PARKED
        if min(rank.completed for rank in self.run.ranks) == self.completed:
            self.run.reached("complete", self.run.sim.random.choice(EVERYONE))

    # ------------------------------------------------------------ copying

    def manifest(self, step: int) -> Manifest:
        variant = self.run.variants[step]
        segments = tuple(
            Segment(
                ranks, (), CHUNK_NBYTES + 1, tuple(token(ranks, c, step, variant) for c in (0, 1))
            )
            for ranks in (EVERYONE, (self.rank,))
        )
        own = token(f"own{self.rank}", 0, step, variant)
        return Manifest(self.rank, step, self.run.sim.epoch, segments, 5, own)

    def begin_copy(self, step: int) -> None:
        self.copying = self.manifest(step)
        _, self.overwrites = self.table.take(step)
        self.to_do = ["begin", "00", "01", "tell0", "10", "11", "tell1", "own", "seal"]

    def copy(self) -> None:
        """The copier's next move."""
        manifest = self.copying
        assert manifest is not None
        slot = self.slot(manifest.step)
        replicated = self.table.replicates(manifest.step)
        places = offsets(manifest.segments, PRESENT)
        move = self.to_do.pop(0)
        self.run.reached(move if move in POINTS else "chunk", self.rank)
        match move:
            case "begin":
                slot.sealed = None
                bare = tuple(replace(s, hashes=()) for s in manifest.segments)
                bare_manifest = replace(manifest, segments=bare, own_nbytes=0, own_hash=b"")
                if replicated:
                    number = self.number(manifest.step)
                    self.client.send(messages.SnapshotBegun(bare_manifest, number))
                elif self.overwrites is not None:
                    self.client.send(messages.SnapshotDropped(self.overwrites))
            case "own":
                slot.tokens[places[OWN]] = manifest.own_hash
            case "seal":
                slot.sealed = (manifest, PRESENT)
                if replicated:
                    number = self.number(manifest.step)
                    self.client.send(messages.SnapshotSealed(manifest, number))
                self.copying = None
            case "tell0" | "tell1" as tell:
                index = int(tell[-1])
                hashes = list(manifest.segments[index].hashes)
                if replicated:
                    self.client.send(messages.ChunksCopied(manifest.step, index, 0, hashes))
            case part:
                index, chunk = int(part[0]), int(part[1])
                hash = manifest.segments[index].hashes[chunk]
                slot.tokens[places[index] + chunk * CHUNK_NBYTES] = hash

    def park(self) -> None:
        """Unwind; the copy being made is finished or given up."""
        self.at = At.PARKED
        if self.copying is None:
            return
        if self.run.sim.random.random() < 0.5:
            while self.to_do:
                self.copy()
            return
        if self.to_do[0] != "begin" and self.table.replicates(self.copying.step):
            self.client.send(messages.SnapshotDropped(self.copying.step))
        self.copying, self.to_do = None, []


class Run:
    """One seed."""

    def __init__(self, seed: int, steps: int, interval: int) -> None:
        self.sim = Sim(seed)
        self.interval = interval
        self.last_step = steps
        self.sim.check_sealed = self.check_sealed
        self.sim.reached = self.reached
        #: The point at which the next fault strikes, and how soon after; then whom.
        self.trap = ""
        self.delay = 0
        self.victim: int | None = None
        #: Per step, the epoch in which the state that counts was computed.
        self.variants: dict[int, int] = {}
        #: The step that all went back to last, which needs no answer.
        self.start = -1
        #: (epoch, step): that epoch went on after that step.
        self.resumed: list[tuple[int, int]] = []
        self.unprotected: list[int] = []
        self.counts: Counter[str] = Counter()
        self.ranks: list[Rank] = []
        for number in EVERYONE:
            self.ranks.append(Rank(self, number, self.sim.node(), 0))
        for rank in self.ranks:
            self.watch(rank)
        #: What the holder of each rank keeps of it.
        self.held = {rank: self.draw_held(rank) for rank in EVERYONE}
        self.protect_all()
        for rank in self.ranks:
            rank.at = At.BODY

    def draw_held(self, rank: int) -> list[Ranks]:
        return [(rank,)] if self.sim.random.random() < 0.6 else [EVERYONE, (rank,)]

    def watch(self, rank: Rank) -> None:
        self.sim.others.append((rank.can_train, rank.train))
        self.sim.others.append((lambda: bool(rank.to_do), rank.copy))

    def holder_of(self, rank: int) -> Node:
        return self.ranks[(rank + 1) % RANKS].node

    def protect(self, rank: Rank, *, restoring: bool = False) -> None:
        there = self.holder_of(rank.rank)
        holder = Holder(there.name, there.address, self.held[rank.rank])
        rank.client.send(messages.SetHolder(self.sim.epoch, holder, restoring))

    def protect_all(self) -> None:
        for rank in self.ranks:
            self.protect(rank)

    def check_sealed(self, node: Node, name: SlotName) -> None:
        """No replicator ever seals bytes that came wrong. A bit that flipped in its memory after
        it was verified is found when the copy is used.
        """
        slot = node.slot(name)
        assert slot.sealed is not None
        as_received = Slot({at: token.rstrip(b"~") for at, token in slot.tokens.items()})
        assert self.is_right(as_received, *slot.sealed), f"wrong bytes under a seal: {name}"

    def is_right(self, slot: Slot, manifest: Manifest, present: tuple[int, ...]) -> bool:
        places = offsets(manifest.segments, present)
        for index in present:
            own = (manifest.own_hash,)
            hashes = own if index == OWN else manifest.segments[index].hashes
            for chunk, hash in enumerate(hashes):
                if slot.tokens.get(places[index] + chunk * CHUNK_NBYTES) != hash:
                    return False
        return True

    # ------------------------------------------------------------ the run

    def train(self) -> None:
        turns = until_trap = 0
        while any(rank.completed < self.last_step for rank in self.ranks):
            assert self.sim.turn(), f"nothing can happen: {self.where()}"
            turns += 1
            assert turns < TURNS_PER_STEP * (self.last_step + 1), f"no end: {self.where()}"
            until_trap -= 1
            if self.victim is not None:
                self.delay -= 1
                if self.delay < 0:
                    self.fault(self.ranks[self.victim])
                    self.victim = None
                    until_trap = self.sim.random.randrange(1, 5000 // self.interval)
            elif until_trap <= 0 and not self.trap:
                self.trap = self.sim.random.choice(POINTS)
                self.delay = self.sim.random.choice((0, 0, 3, 20, 100))

    def reached(self, point: str, rank: int) -> None:
        """A copy of the rank came to that point."""
        if point == self.trap:
            self.trap = ""
            self.victim = rank

    def where(self) -> str:
        return "; ".join(f"rank {r.rank}: {r.at}, step {r.step}, {r.answers}" for r in self.ranks)

    def fault(self, victim: Rank) -> None:
        random = self.sim.random
        kind = random.choice(
            ("node", "node", "rank", "replicator", "link", "flip-way", "flip-own", "flip-held")
        )
        self.counts[kind] += 1
        match kind:
            case "node":
                victim.node.die()
                self.recover({victim.rank}, node_lost=True)
            case "rank":
                victim.client.disconnect()
                self.recover({victim.rank}, node_lost=False)
            case "replicator":
                victim.node.restart()
                self.protect_all()
            case "link":
                ends = [end for end in victim.node.links.values() if end.open]
                if ends:
                    random.choice(ends).close("cut")
            case "flip-way":
                self.sim.flips += random.choice((1, 1, 6))
            case _:
                prefix = "own" if kind == "flip-own" else "held"
                for file, slot in sorted(victim.node.slots.items()):
                    if file.startswith(prefix) and slot.tokens and random.random() < 0.5:
                        place = random.choice(sorted(slot.tokens))
                        slot.tokens[place] += b"~"
                        self.flipped = True

    #: A copy may be damaged.
    flipped = False

    def is_damaged(self) -> bool:
        """Whether a sealed copy is not what its manifest says."""
        slots = [slot for node in self.sim.living() for slot in node.slots.values()]
        return any(s.sealed is not None and not self.is_right(s, *s.sealed) for s in slots)

    def counts_for(self, manifest: Manifest) -> bool:
        """Whether a copy is of the history that counts."""
        return all(manifest.step <= step for epoch, step in self.resumed if epoch > manifest.epoch)

    def recover(self, lost: set[int], node_lost: bool) -> None:
        complete = min(rank.completed for rank in self.ranks)
        protected = (
            not self.flipped
            and all(step < complete - SLOTS * self.interval for step in self.unprotected)
            and all(rank.answers for rank in self.ranks)
        )
        before = dict(self.variants)
        #: The step that an earlier attempt went back to, and how many are run again at most.
        planned = -1
        most = self.interval if node_lost else 1
        while True:
            self.sim.epoch += 1
            for rank in self.ranks:
                rank.answers = {}
                if rank.rank in lost:
                    rank.at, rank.copying, rank.to_do = At.PARKED, None, []
                else:
                    rank.park()
            if lost:
                for number in lost:
                    rank = self.ranks[number]
                    rank.move_to(self.sim.node() if node_lost else rank.node, self.sim.epoch)
            self.held = {rank: self.draw_held(rank) for rank in EVERYONE}
            for node in self.sim.living():
                node.want_fence(self.sim.epoch)
            self.until(
                lambda: all(node.fenced >= node.fence_wanted for node in self.sim.living()),
                "fence",
            )
            sound = not self.flipped and not self.sim.flips
            step, plan, keep = self.agree()
            assert not sound or planned < 0 or step == planned, f"{planned} was whole, now {step}"
            if step is None:
                assert not protected, f"no step is whole, complete everywhere was {complete}"
                self.counts["durable"] += 1
                self.start_from_durable(complete)
                return
            if protected:
                assert step >= complete - most, f"step {step} is whole, {complete} was complete"
            planned = step
            lost = self.carry_out(step, plan, keep, sound)
            node_lost = self.sim.random.random() < 0.5
            for number in lost:
                self.counts["lost again"] += 1
                if node_lost:
                    self.ranks[number].node.die()
                    most = self.interval
                else:
                    self.ranks[number].client.disconnect()
            if all(rank.restored for rank in self.ranks):
                break
        self.counts[f"replayed {max(0, complete - step)}"] += 1
        self.variants = {k: v for k, v in before.items() if k <= step}
        self.resume(step)

    def until(self, true: Callable[[], bool], what: str) -> None:
        turns = 0
        while not true():
            assert self.sim.turn(), f"{what}: nothing can happen"
            turns += 1
            assert turns < 100_000, f"{what} does not end"

    def agree(self) -> tuple[int | None, dict[int, list[Piece]], list[int]]:
        """The newest step that can be made whole, what each rank fetches for it, and which older
        ones have replicas.
        """
        copies: dict[int, list[tuple[Node, bool, Manifest, tuple[int, ...]]]] = {}
        for node in self.sim.living():
            for file, slot in node.slots.items():
                if slot.sealed is not None and self.counts_for(slot.sealed[0]):
                    manifest, present = slot.sealed
                    found = (node, file.startswith("held"), manifest, present)
                    copies.setdefault(manifest.step, []).append(found)
        for step in sorted(copies, reverse=True):
            plan = self.plan(copies[step])
            if plan is not None:
                replicas = {
                    each for each in copies if any(replica for _, replica, _, _ in copies[each])
                }
                return step, plan, newest_below(step, replicas)
        return None, {}, []

    def plan(
        self, copies: list[tuple[Node, bool, Manifest, tuple[int, ...]]]
    ) -> dict[int, list[Piece]] | None:
        donors = [
            (n, replica, m)
            for n, replica, m, present in copies
            if m.segments[0].ranks == EVERYONE and 0 in present
        ]
        plan: dict[int, list[Piece]] = {}
        for rank in self.ranks:
            if any(n is rank.node and not r and m.rank == rank.rank for n, r, m in donors):
                plan[rank.rank] = []
                continue
            bases = [n for n, replica, m, _ in copies if replica and m.rank == rank.rank]
            if not bases or not donors:
                return None
            base = self.sim.random.choice(bases)
            donor, replica, theirs = self.sim.random.choice(donors)
            plan[rank.rank] = [
                Piece(base.address, rank.rank, True, [(rank.rank,)], True),
                Piece(donor.address, theirs.rank, replica, [EVERYONE], False),
            ]
        return plan

    def carry_out(
        self, step: int, plan: dict[int, list[Piece]], keep: list[int], sound: bool
    ) -> set[int]:
        """Assemble and restore, rank by rank as each has what it needs; replicas are made anew
        meanwhile. Stops when a copy turns out to be damaged, which none is if all is ``sound``.
        Returns which ranks are lost again.
        """
        for rank in self.ranks:
            rank.assembled = None
            rank.restored = False
            rank.go_back(step, keep)
            if plan[rank.rank]:
                pieces, (number, _) = plan[rank.rank], rank.table.take(step)
                rank.client.send(messages.Assemble(self.sim.epoch, step, pieces, number))
        if self.sim.random.random() < 0.1:
            # A replicator dies while copies are put together.
            self.sim.random.choice(self.ranks).node.restart()
            self.counts["replicator in recovery"] += 1
            sound = False
        waiting = list(self.ranks)
        while waiting:
            self.until(lambda: any(r.has_answer() or not plan[r.rank] for r in waiting), "assembly")
            rank = next(r for r in waiting if r.has_answer() or not plan[r.rank])
            waiting.remove(rank)
            if not self.restore(rank, step):
                assert not sound, f"rank {rank.rank} cannot have step {step}"
                return set()
            for _ in range(self.sim.random.choice((0, 0, 30, 300))):
                self.sim.turn()
            if plan[rank.rank] and self.sim.random.random() < 0.2:
                rank.restored = False
                return {rank.rank}
        return set()

    def restore(self, rank: Rank, step: int) -> bool:
        """The rank goes back to ``step`` and lets its replica be made; False if it cannot."""
        manifest = rank.sealed(step)
        if rank.assembled is False or manifest is None:
            return False
        slot = rank.slot(step)
        if not self.is_right(slot, manifest, PRESENT):
            # The rank hashes what it restores.
            slot.sealed = None
            return False
        now = self.variants[step]
        for segment in manifest.segments:
            hashes = tuple(token(segment.ranks, c, step, now) for c in (0, 1))
            assert segment.hashes == hashes, "bytes of another history"
        rank.restored = True
        self.protect(rank, restoring=True)
        rank.client.send(messages.SnapshotSealed(manifest, rank.number(step)))
        return True

    def resume(self, step: int) -> None:
        self.resumed.append((self.sim.epoch, step))
        self.start = step
        self.flipped = self.is_damaged()
        self.protect_all()
        for rank in self.ranks:
            rank.completed, rank.step = step, step + 1
            rank.at = At.BODY if rank.step <= self.last_step else At.PARKED

    def start_from_durable(self, step: int) -> None:
        """Everything anew from a checkpoint of ``step``, which the simulation does not model."""
        step = max(step, 0)
        self.resumed.append((self.sim.epoch, -1))
        self.start = -1
        self.flipped = False
        self.unprotected.clear()
        for rank in self.ranks:
            rank.client.disconnect()
        for node in self.sim.living():
            node.die()
        self.variants = {step: self.sim.epoch}
        for rank in self.ranks:
            rank.move_to(self.sim.node(), self.sim.epoch)
            rank.answers = {}
        self.protect_all()
        for rank in self.ranks:
            rank.go_back(step, ())
            rank.begin_copy(step)
            rank.completed, rank.step = step, step + 1
            rank.at = At.BODY if rank.step <= self.last_step else At.PARKED


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + SEEDS))
def test_no_fault_costs_more_than_promised_or_a_byte(seed: int) -> None:
    run = Run(seed, STEPS, INTERVALS[seed % len(INTERVALS)])
    try:
        run.train()
    except BaseException:
        print(
            f"seed {seed} failed after {dict(run.counts)}; run it again with "
            f"DEADPOOL_SIM_FIRST_SEED={seed} DEADPOOL_SIM_SEEDS=1 DEADPOOL_SIM_STEPS={STEPS} "
            f"pytest {__file__}"
        )
        raise
    print(f"seed {seed}: {dict(run.counts)}, {len(run.unprotected)} unprotected")
    assert run.counts["node"] or STEPS < 100
