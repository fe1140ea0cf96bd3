"""Replicas that this node keeps for ranks of other nodes, and copies that it hands out.

Pure. A replica is sealed only when every chunk that was asked for arrived with the hash that the
sealed manifest of its owner has for it. It goes into a slot in which none of the two newest older
ones is: one of them is whole everywhere. One that is sealed is left as it is when its owner sends
the same copy once more, as all do in a new epoch:

1. Rank 3 is lost with its node. Its replacement fetches step 20 from the replica of rank 3 here,
   and so does rank 2, for a segment that both had on the lost node.
2. The replacement has all it needs and sends step 20 here again, while rank 2 still fetches.
3. Were the replica unsealed now, rank 2 would find nothing here; and if the replacement were lost
   before the new one is whole, nobody would have step 20 any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from deadpool_runtime.replication import wire
from deadpool_runtime.replication.board import Board, fault_in, hash_of, parts_of
from deadpool_runtime.replication.events import (
    CopyRead,
    ReadCopy,
    SlotName,
    SlotSealed,
    StreamKey,
    WipeCopy,
)
from deadpool_runtime.replication.incoming import Inbox, Incoming
from deadpool_runtime.replication.manifest import OWN, Manifest, offsets
from deadpool_runtime.replication.naming import packed
from deadpool_runtime.replication.outgoing import Outbox, Outgoing, room_for
from deadpool_runtime.replication.slotting import SLOTS, newest_below, slot_for


class Holdings:
    """Replicas being filled. ``held``: the step in each slot of each rank's replica at first."""

    def __init__(self, board: Board, inbox: Inbox, held: Mapping[int, Mapping[int, int]]) -> None:
        self._board = board
        self._inbox = inbox
        self._held = {rank: dict(there) for rank, there in held.items()}
        #: The newest epoch in which each owner's replica was put here.
        self._epochs: dict[int, int] = {}
        #: Puts of sealed copies whose slots are being looked into.
        self._looking: dict[StreamKey, wire.Put] = {}

    def put(self, link: int, message: wire.Put) -> None:
        """An owner's node wants a replica to be kept."""
        manifest = message.manifest
        floor = max(self._board.fence, self._epochs.get(manifest.rank, -1))
        reason = ""
        if message.epoch < floor:
            reason = f"epoch {message.epoch} is over, epoch {floor} runs"
        elif OWN not in message.present:
            reason = "the replica would lack the own part"
        reason = reason or fault_in(manifest, message.present, hashed=False)
        if reason:
            self._board.tell(link, wire.StreamRefused(message.stream, reason))
            return
        if message.epoch > self._epochs.get(manifest.rank, -1):
            self._go_back(manifest.rank, manifest.step)
        self._epochs[manifest.rank] = message.epoch
        newer = "a newer put of the same rank began"
        for other in self._inbox.live():
            if other.slot.replica and other.slot.rank == manifest.rank:
                self._inbox.refuse(other, newer)
        self._give_up(lambda put: put.manifest.rank == manifest.rank, newer)
        key = StreamKey(link, message.stream)
        if manifest.own_hash and not fault_in(manifest, message.present, hashed=True):
            self._looking[key] = message
            self._board.do(ReadCopy(key, True, manifest.rank, manifest.step))
        else:
            self._open(key, message)

    def read(self, event: CopyRead) -> bool:
        """The slot of a put was looked for; False if nothing here waits for that."""
        message = self._looking.pop(event.key, None)
        if message is None:
            return False
        if event.manifest is not None:
            self.have(SlotName(True, event.manifest.rank, event.manifest.step, event.slot))
        if event.manifest == message.manifest and {*message.present} <= {*event.present}:
            self._board.tell(event.key.link, wire.PutSealed(event.key.stream))
        elif event.manifest is not None and not message.replaces:
            reason = "another replica of this step stays until all ranks are restored"
            self._board.tell(event.key.link, wire.StreamRefused(event.key.stream, reason))
        else:
            self._open(event.key, message)
        return True

    def fence(self) -> None:
        """A newer epoch was declared."""
        fence = self._board.fence
        self._give_up(lambda put: put.epoch < fence, f"epoch {fence} runs")

    def link_down(self, link: int) -> None:
        """Nobody waits for the answers any more."""
        for key in [key for key in self._looking if key.link == link]:
            del self._looking[key]

    def forget(self, key: StreamKey) -> None:
        """The owner's node gave the put up."""
        self._looking.pop(key, None)

    def _give_up(self, wanted: Callable[[wire.Put], bool], reason: str) -> None:
        for key in [key for key, put in self._looking.items() if wanted(put)]:
            del self._looking[key]
            self._board.tell(key.link, wire.StreamRefused(key.stream, reason))

    def slot_for(self, rank: int, step: int) -> int:
        """The slot into which a replica of the rank's copy of ``step`` goes. What was there is gone
        then."""
        there = self._held.setdefault(rank, {})
        slot = slot_for(step, there, set(newest_below(step, there.values())), SLOTS)
        there.pop(slot, None)
        return slot

    def have(self, slot: SlotName) -> None:
        """There is a replica in this slot."""
        self._held.setdefault(slot.rank, {})[slot.slot] = slot.step

    def _go_back(self, rank: int, step: int) -> None:
        """A new epoch's first replica of a rank is of the step that all went back to: what is newer
        is of no use any more, and is not to be kept instead of what is older."""
        there = self._held.get(rank, {})
        self._held[rank] = {slot: other for slot, other in there.items() if other <= step}

    def _open(self, key: StreamKey, message: wire.Put) -> None:
        manifest = message.manifest
        slot = self.slot_for(manifest.rank, manifest.step)
        self._inbox.open(
            Incoming(
                key=key,
                epoch=message.epoch,
                slot=SlotName(True, manifest.rank, manifest.step, slot),
                manifest=manifest,
                wanted=message.present,
                places=offsets(manifest.segments, message.present),
                room=room_for(manifest, message.present),
            )
        )

    def end(self, link: int, message: wire.PutEnd) -> None:
        """The owner sealed its copy and knows that every chunk was taken here."""
        stream = self._inbox.get(StreamKey(link, message.stream))
        if stream is None:
            return
        manifest = message.manifest
        reason = fault_in(manifest, stream.wanted, hashed=True)
        if not reason and not _same_but_for_hashes(manifest, stream.manifest):
            reason = "the sealed manifest is of another copy"
        if not reason:
            for part in parts_of(manifest, stream.wanted):
                if stream.got.get(part) != hash_of(manifest, part):
                    reason = f"chunk {part.chunk} of segment {part.segment} is not the sealed one"
                    break
        if reason:
            self._inbox.refuse(stream, reason)
        else:
            self._inbox.seal(stream, manifest, stream.wanted)

    def sealed(self, stream: Incoming, event: SlotSealed) -> None:
        """The replica is sealed, or could not be."""
        if event.error:
            self._inbox.refuse(stream, event.error)
            return
        self.have(stream.slot)
        self._board.tell(stream.key.link, wire.PutSealed(stream.key.stream))
        self._inbox.close(stream)


def _same_but_for_hashes(one: Manifest, other: Manifest) -> bool:
    if (one.rank, one.step, one.epoch) != (other.rank, other.step, other.epoch):
        return False
    return [(s.ranks, s.entries, s.nbytes) for s in one.segments] == [
        (s.ranks, s.entries, s.nbytes) for s in other.segments
    ]


class Sources:
    """Copies of this node that other nodes fetch."""

    def __init__(self, board: Board, outbox: Outbox) -> None:
        self._board = board
        self._outbox = outbox
        self._asked: dict[StreamKey, wire.Fetch] = {}

    def fetch(self, link: int, message: wire.Fetch) -> None:
        """Another node wants a copy, or a part of it."""
        if message.epoch < self._board.fence:
            reason = f"epoch {message.epoch} is over, epoch {self._board.fence} runs"
            self._board.tell(link, wire.StreamRefused(message.stream, reason))
            return
        key = StreamKey(link, message.stream)
        self._asked[key] = message
        self._board.do(ReadCopy(key, message.replica, message.rank, message.step))

    def read(self, event: CopyRead) -> None:
        """The slot's seal and manifest were read."""
        asked = self._asked.pop(event.key, None)
        if asked is None or event.key.link not in self._board.links:
            return
        kind = "replica" if asked.replica else "copy"
        name = f"{kind} of rank {asked.rank} after step {asked.step} on {self._board.node}"
        reason = ""
        sent: list[int] = []
        manifest = event.manifest
        if manifest is None:
            reason = f"there is no {name}"
        else:
            reason = fault_in(manifest, event.present, hashed=True)
            by_name = {packed(manifest.segments[i].ranks): i for i in event.present if i != OWN}
            for asked_name in asked.segments:
                if asked_name not in by_name:
                    reason = reason or f"the {name} lacks the segment {list(asked_name)}"
                else:
                    sent.append(by_name[asked_name])
            if asked.base:
                sent.append(OWN)
            if asked.base and OWN not in event.present:
                reason = reason or f"the {name} lacks its own part"
        if reason or manifest is None:
            self._board.tell(event.key.link, wire.StreamRefused(event.key.stream, reason))
            return
        stream = Outgoing(
            key=event.key,
            slot=SlotName(asked.replica, asked.rank, asked.step, event.slot),
            manifest=manifest,
            lying=event.present,
            sent=tuple(sent),
            check=True,
        )
        for part in parts_of(manifest, sent):
            stream.offer(part, hash_of(manifest, part))
        self._outbox.add(stream)
        self._board.tell(event.key.link, wire.FetchBegun(event.key.stream, manifest, tuple(sent)))

    def go_on(self, stream: Outgoing) -> None:
        """Send more, or the end."""
        if stream.ready and stream.all_taken():
            self._board.tell(stream.key.link, wire.FetchEnd(stream.key.stream))
            self._outbox.remove(stream)
        self._outbox.pump(stream.key.link)

    def damaged(self, stream: Outgoing) -> None:
        """The copy is not what its manifest says: nobody shall have it."""
        self._outbox.remove(stream)
        self._board.do(WipeCopy(stream.slot))
        kind = "replica" if stream.slot.replica else "copy"
        reason = (
            f"the {kind} of rank {stream.slot.rank} after step {stream.slot.step} "
            f"on {self._board.node} is damaged"
        )
        self._board.tell(stream.key.link, wire.StreamRefused(stream.key.stream, reason))
        self._outbox.pump(stream.key.link)

    def link_down(self, link: int) -> None:
        """Nobody waits for the answers any more."""
        for key in [key for key in self._asked if key.link == link]:
            del self._asked[key]
