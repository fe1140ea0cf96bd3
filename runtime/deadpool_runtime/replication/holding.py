"""Replicas that this node keeps for ranks of other nodes, and copies that it hands out.

Pure. A replica is sealed only when every chunk that was asked for arrived with the hash that the
sealed manifest of its owner has for it. It goes into a slot in which none of the two newest older
ones is: one of them is whole everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping

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
        self._epochs[manifest.rank] = message.epoch
        for other in self._inbox.live():
            if other.slot.replica and other.slot.rank == manifest.rank:
                self._inbox.refuse(other, "a newer put of the same rank began")
        there = self._held.setdefault(manifest.rank, {})
        keep = set(newest_below(manifest.step, there.values()))
        slot = slot_for(manifest.step, there, keep, SLOTS)
        there.pop(slot, None)
        self._inbox.open(
            Incoming(
                key=StreamKey(link, message.stream),
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
        self._held[stream.slot.rank][stream.slot.slot] = stream.slot.step
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
