"""The ranks of this node: which of their snapshots goes to the holder, and what they are told.

Pure. One snapshot of a rank is sent at a time, the oldest first. A snapshot is given up when its
slot is overwritten, when the rank begins another without sealing it, or when the holder refuses it.
A rank with several holders is several times in here, once for each.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from msgspec.structs import replace

from deadpool_runtime.protocol import Address, Holder
from deadpool_runtime.replication import messages, wire
from deadpool_runtime.replication.board import Board, Link, hash_of, parts_of
from deadpool_runtime.replication.events import (
    DropClient,
    Part,
    SlotName,
    StreamKey,
    TellRank,
    WipeCopy,
)
from deadpool_runtime.replication.manifest import OWN, Manifest
from deadpool_runtime.replication.messages import Confirmed, FromReplicator, LinkNote, Unconfirmed
from deadpool_runtime.replication.naming import members, packed
from deadpool_runtime.replication.outgoing import Outbox, Outgoing


@dataclass
class Snapshot:
    """A copy in one of the rank's slots."""

    manifest: Manifest
    slot: int
    hashes: dict[Part, bytes] = field(default_factory=dict)
    sealed: bool = False
    #: The holder has something else of this step, which others may need until all are restored.
    postponed: bool = False
    #: What the rank was told about it.
    answer: Confirmed | Unconfirmed | None = None
    damaged: bool = False


@dataclass
class Owner:
    """A rank of this node. ``client`` is None while its process is not connected."""

    rank: int
    born: int
    client: int | None
    epoch: int = -1
    holder: Holder | None = None
    #: Copies by step; at most one for each slot.
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    put: Outgoing | None = None
    told_unheld: bool = False
    #: What nodes have of the step that all go back to is still being fetched.
    restoring: bool = False


class Owners:
    """All ranks of this node. ``further``: the same for each holder behind the first."""

    def __init__(self, board: Board, outbox: Outbox) -> None:
        self._board = board
        self._outbox = outbox
        self._owners: dict[int, Owner] = {}
        self.further: list[Further] = []

    # ------------------------------------------------------------ connections

    def hello(self, client: int, hello: messages.RankHello) -> None:
        """A rank connected."""
        owner = self._owners.get(hello.rank)
        if owner is not None and hello.born < owner.born:
            self._board.do(DropClient(client))
            return
        if owner is None or owner.born != hello.born:
            if owner is not None:
                self._give_up_put(owner, "the rank was started anew")
            previous = owner.client if owner is not None else None
            self._owners[hello.rank] = Owner(hello.rank, hello.born, client)
        else:
            previous, owner.client = owner.client, client
        if previous is not None:
            self._board.do(DropClient(previous))

    def rank_of(self, client: int) -> int | None:
        """The rank that talks on this connection."""
        for owner in self._owners.values():
            if owner.client == client:
                return owner.rank
        return None

    def client_gone(self, client: int) -> None:
        """The rank cannot finish what it was copying; what it sealed still goes to the holder."""
        for owner in self._owners.values():
            if owner.client == client:
                owner.client = None
                for step, snapshot in list(owner.snapshots.items()):
                    if not snapshot.sealed:
                        self._drop(owner, step, "the rank is gone")
                self._advance(owner)

    def tell(self, rank: int, message: FromReplicator) -> None:
        """Say something to a rank, if it is connected."""
        owner = self._owners.get(rank)
        if owner is not None and owner.client is not None:
            self._board.do(TellRank(owner.client, message))

    def note(self, text: str) -> None:
        """Let one rank pass a note on to the user."""
        for owner in self._owners.values():
            if owner.client is not None:
                self.tell(owner.rank, LinkNote(text))
                return

    def holders(self) -> set[Address]:
        """Where links are needed."""
        return {
            owner.holder.address
            for owner in self._owners.values()
            if owner.holder is not None and owner.epoch >= self._board.fence
        }

    # ------------------------------------------------------------ what ranks say

    def set_holder(self, rank: int, message: messages.SetHolder) -> None:
        """Copies of this rank go elsewhere from now on."""
        owner = self._owners[rank]
        if message.epoch < max(owner.epoch, self._board.fence):
            return
        over = owner.restoring and not message.restoring
        owner.restoring = message.restoring
        # What others are to have is no reason to send this one everything again.
        holder = message.holder and replace(message.holder, deputy=None, more=[])
        if message.epoch == owner.epoch and holder == owner.holder:
            if over:
                self._advance(owner)
            return
        self._give_up_put(owner, "the rank has another holder")
        if message.epoch > owner.epoch >= 0:
            for step in list(owner.snapshots):
                self._drop(owner, step, "a newer epoch began")
        for snapshot in owner.snapshots.values():
            if not snapshot.damaged:
                snapshot.answer = None
        owner.epoch = message.epoch
        owner.holder = holder
        self._advance(owner)

    def begun(self, rank: int, message: messages.SnapshotBegun) -> None:
        """The rank overwrites a slot."""
        owner = self._owners[rank]
        self._overwrite(owner, message.slot)
        owner.snapshots[message.manifest.step] = Snapshot(message.manifest, message.slot)
        self._advance(owner)

    def _overwrite(self, owner: Owner, slot: int) -> None:
        for other, snapshot in list(owner.snapshots.items()):
            if snapshot.slot == slot:
                self._drop(owner, other, "its slot was overwritten before the holder had it all")
            elif not snapshot.sealed:
                self._drop(owner, other, "the rank gave the copy up")

    def copied(self, rank: int, message: messages.ChunksCopied) -> None:
        """Chunks are in the slot."""
        owner = self._owners[rank]
        snapshot = owner.snapshots.get(message.step)
        if snapshot is None or snapshot.sealed:
            return
        for index, hash in enumerate(message.hashes, start=message.first):
            self._have(owner, message.step, Part(message.segment, index), hash)
        self._pump(owner)

    def sealed(self, rank: int, message: messages.SnapshotSealed) -> None:
        """A copy is whole; the rank may not have told of it before."""
        owner = self._owners[rank]
        step = message.manifest.step
        snapshot = owner.snapshots.get(step)
        if snapshot is not None and snapshot.sealed:
            # The rank connected anew and may have missed the answer.
            if snapshot.answer is not None:
                self._answer(rank, snapshot.answer)
            return
        if snapshot is None:
            self._overwrite(owner, message.slot)
            snapshot = owner.snapshots[step] = Snapshot(message.manifest, message.slot)
        snapshot.manifest = message.manifest
        snapshot.sealed = True
        if snapshot.damaged:
            self._damaged(owner, step)
            return
        if owner.put is not None and owner.put.slot.step == step:
            owner.put.manifest = message.manifest
        for part in parts_of(message.manifest, range(-1, len(message.manifest.segments))):
            self._have(owner, step, part, hash_of(message.manifest, part))
        self._advance(owner)

    def dropped(self, rank: int, message: messages.SnapshotDropped) -> None:
        """The rank gave a copy up."""
        owner = self._owners[rank]
        self._drop(owner, message.step, "the rank gave the copy up")
        self._advance(owner)

    # ------------------------------------------------------------ sending

    def _have(self, owner: Owner, step: int, part: Part, hash: bytes) -> None:
        snapshot = owner.snapshots[step]
        if part in snapshot.hashes:
            return
        snapshot.hashes[part] = hash
        put = owner.put
        if put is not None and put.slot.step == step and part.segment in put.sent:
            put.offer(part, hash)

    def _advance(self, owner: Owner) -> None:
        """Go on with the put under way, or begin the next."""
        if owner.epoch < self._board.fence or owner.epoch < 0:
            return
        if owner.holder is None:
            self._settle_without_holder(owner)
            return
        link = self._board.dialled.get(owner.holder.address)
        if link is None:
            return
        if owner.put is None:
            self._begin_put(owner, link, owner.holder)
        self._pump(owner)

    def _begin_put(self, owner: Owner, link: Link, holder: Holder) -> None:
        for step, snapshot in sorted(owner.snapshots.items()):
            if snapshot.answer is not None or (snapshot.postponed and owner.restoring):
                continue
            by_name = {packed(s.ranks): i for i, s in enumerate(snapshot.manifest.segments)}
            found = {name: by_name.get(name) for name in holder.segments}
            indices = sorted(index for index in found.values() if index is not None)
            # Many optimizers make their state in the first step.
            if len(indices) < len(found) and step > 0:
                missing = next(name for name, index in found.items() if index is None)
                self._unconfirmed(
                    owner, step, f"the state has no segment of ranks {members(missing)}"
                )
                continue
            link.streams += 1
            sent = (*indices, OWN)
            put = Outgoing(
                key=StreamKey(link.number, link.streams),
                slot=SlotName(False, owner.rank, step, snapshot.slot),
                manifest=snapshot.manifest,
                lying=(*range(len(snapshot.manifest.segments)), OWN),
                sent=sent,
                check=False,
                replaces=not owner.restoring,
            )
            for part, hash in snapshot.hashes.items():
                if part.segment in sent:
                    put.offer(part, hash)
            owner.put = put
            self._outbox.add(put)
            manifest = snapshot.manifest if snapshot.sealed else _without_hashes(snapshot.manifest)
            self._board.tell(
                link.number,
                wire.Put(put.key.stream, owner.epoch, manifest, sent, put.replaces),
            )
            return

    def _pump(self, owner: Owner) -> None:
        put = owner.put
        if put is None:
            return
        snapshot = owner.snapshots[put.slot.step]
        if snapshot.sealed and put.ready and not put.ended and put.all_taken():
            put.ended = True
            self._board.tell(put.key.link, wire.PutEnd(put.key.stream, snapshot.manifest))
        self._outbox.pump(put.key.link)

    def _of_put(self, put: Outgoing) -> Owner | None:
        owner = self._owners.get(put.slot.rank)
        return owner if owner is not None and owner.put is put else None

    def go_on(self, put: Outgoing) -> None:
        """Something happened to a put: send more of it, or its end."""
        owner = self._of_put(put)
        if owner is not None:
            self._pump(owner)

    def put_sealed(self, put: Outgoing) -> None:
        """The holder sealed the replica, or has a sealed one of this very copy."""
        owner = self._of_put(put)
        if owner is None or not (put.ended or owner.snapshots[put.slot.step].sealed):
            return
        self._end_put(owner)
        self._confirmed(owner, put.slot.step)
        self._advance(owner)

    def put_refused(self, put: Outgoing, reason: str) -> None:
        """The holder will not have the replica."""
        owner = self._of_put(put)
        if owner is None:
            return
        self._end_put(owner)
        if put.replaces:
            self._unconfirmed(owner, put.slot.step, f"the holder refused it: {reason}")
        else:
            owner.snapshots[put.slot.step].postponed = True
        self._advance(owner)

    def source_damaged(self, put: Outgoing) -> None:
        """The bytes in the rank's own slot are not those that were copied there."""
        owner = self._of_put(put)
        if owner is None:
            return
        self._give_up_put(owner, "the copy it comes from is damaged")
        self._damaged(owner, put.slot.step)

    def _damaged(self, owner: Owner, step: int) -> None:
        snapshot = owner.snapshots[step]
        snapshot.damaged = True
        if snapshot.sealed:
            self._board.do(WipeCopy(SlotName(False, owner.rank, step, snapshot.slot)))
        self._unconfirmed(owner, step, "the copy on this node is damaged")
        self._advance(owner)

    # ------------------------------------------------------------ ends

    def _settle_without_holder(self, owner: Owner) -> None:
        for step, snapshot in sorted(owner.snapshots.items()):
            if snapshot.sealed and snapshot.answer is None:
                self._confirmed(owner, step)
        if not owner.told_unheld and owner.snapshots:
            owner.told_unheld = True
            self.note(f"no other node keeps a copy of the state of rank {owner.rank}")

    def _confirmed(self, owner: Owner, step: int) -> None:
        answer = owner.snapshots[step].answer = Confirmed(owner.epoch, step)
        self._answer(owner.rank, answer)

    def _unconfirmed(self, owner: Owner, step: int, reason: str) -> None:
        snapshot = owner.snapshots[step]
        if snapshot.answer is None:
            snapshot.answer = Unconfirmed(owner.epoch, step, reason)
            self._answer(owner.rank, snapshot.answer)

    def _answer(self, rank: int, answer: Confirmed | Unconfirmed) -> None:
        """The holder has a replica, or will not have it."""
        self.settle(self, rank, answer)

    def settle(self, place: Owners, rank: int, answer: Confirmed | Unconfirmed) -> None:
        """Tell the rank what a holder of its answered, if that settles it for all of them: one that
        has no replica does, and the last one that has.
        """
        places = (self, *self.further)
        answers = [each.answer_to(rank, answer.step) for each in places]
        if isinstance(answer, Confirmed):
            settled = all(isinstance(each, Confirmed) for each in answers)
        else:
            before = answers[: places.index(place)]
            settled = not any(isinstance(each, Unconfirmed) for each in before)
        if settled:
            self.tell(rank, answer)

    def answer_to(self, rank: int, step: int) -> Confirmed | Unconfirmed | None:
        """What became of the replica of that step at this holder."""
        owner = self._owners.get(rank)
        snapshot = owner.snapshots.get(step) if owner is not None else None
        return None if snapshot is None else snapshot.answer

    def _drop(self, owner: Owner, step: int, reason: str) -> None:
        if step not in owner.snapshots:
            return
        if owner.put is not None and owner.put.slot.step == step:
            self._give_up_put(owner, reason)
        self._unconfirmed(owner, step, reason)
        del owner.snapshots[step]

    def _end_put(self, owner: Owner) -> None:
        if owner.put is not None:
            self._outbox.remove(owner.put)
            owner.put = None

    def _give_up_put(self, owner: Owner, reason: str) -> None:
        put = owner.put
        if put is not None:
            self._end_put(owner)
            self._board.tell(put.key.link, wire.StreamRefused(put.key.stream, reason))

    def fence(self) -> None:
        """A newer epoch was declared: send nothing of an older one."""
        for owner in self._owners.values():
            if owner.epoch < self._board.fence:
                self._give_up_put(owner, "a newer epoch began")
                for step in owner.snapshots:
                    self._unconfirmed(owner, step, "a newer epoch began")

    def link_up(self) -> None:
        """A link may be one that ranks wait for."""
        for owner in self._owners.values():
            self._advance(owner)

    def link_down(self, lost: list[Outgoing]) -> None:
        """These streams ended with their link; their puts begin anew when it is up again."""
        for stream in lost:
            owner = self._of_put(stream)
            if owner is not None:
                owner.put = None


class _Beside(Owners):
    """The same for another holder beside the first."""

    def hello(self, client: int, hello: messages.RankHello) -> None:
        """A rank connected; which connections are closed is decided elsewhere."""
        owner = self._owners.get(hello.rank)
        if owner is None or hello.born > owner.born:
            if owner is not None:
                self._give_up_put(owner, "the rank was started anew")
            self._owners[hello.rank] = Owner(hello.rank, hello.born, client)
        elif hello.born == owner.born:
            owner.client = client

    def tell(self, rank: int, message: FromReplicator) -> None:
        """Nothing is said."""

    def note(self, text: str) -> None:
        """Nothing is said."""


class Deputies(_Beside):
    """The second holder of the own parts, without a word to the ranks: whether a step is confirmed
    is the first holder's matter alone.
    """

    def set_holder(self, rank: int, message: messages.SetHolder) -> None:
        """The own parts of this rank go to the holder's deputy from now on."""
        holder = message.holder
        deputy = None
        if holder is not None and holder.deputy is not None:
            deputy = Holder(holder.node, holder.deputy, [])
        super().set_holder(rank, replace(message, holder=deputy))


class Further(_Beside):
    """The holder with this number of those behind ``first``. A rank that has fewer lacks nothing
    here.
    """

    def __init__(self, board: Board, outbox: Outbox, first: Owners, number: int) -> None:
        super().__init__(board, outbox)
        self._first = first
        self._number = number

    def follow(self) -> None:
        """Learn of everything that the first knows of its ranks."""
        for owner in self._first._owners.values():
            ours = Owner(owner.rank, owner.born, owner.client, owner.epoch)
            for step, known in owner.snapshots.items():
                ours.snapshots[step] = dataclasses.replace(
                    known, hashes=dict(known.hashes), answer=None
                )
            self._owners[owner.rank] = ours
        for ours in self._owners.values():
            self._advance(ours)

    def set_holder(self, rank: int, message: messages.SetHolder) -> None:
        """The rank has so many holders now, or other ones."""
        more = [] if message.holder is None else message.holder.more
        holder = more[self._number] if self._number < len(more) else None
        super().set_holder(rank, replace(message, holder=holder))

    def _answer(self, rank: int, answer: Confirmed | Unconfirmed) -> None:
        self._first.settle(self, rank, answer)


def _without_hashes(manifest: Manifest) -> Manifest:
    bare = tuple(replace(segment, hashes=()) for segment in manifest.segments)
    return replace(manifest, segments=bare, own_hash=b"")
