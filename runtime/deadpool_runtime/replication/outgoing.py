"""Streams that leave this node: which chunk is sent next, and what became of each.

Pure. At most ``MAX_TICKETS`` chunks of a link are on their way; the streams of a link take turns.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from deadpool_runtime.replication.board import Board, count_parts, part_nbytes
from deadpool_runtime.replication.carriers.base import MAX_TICKETS
from deadpool_runtime.replication.events import (
    DropCarrier,
    Part,
    SendChunk,
    SlotName,
    StreamKey,
)
from deadpool_runtime.replication.manifest import (
    CHUNK_NBYTES,
    OWN,
    Manifest,
    aligned,
    offsets,
)
from deadpool_runtime.replication.wire import ChunkDone, Verdict


@dataclass
class Outgoing:
    """A stream whose chunks are read from ``slot``."""

    key: StreamKey
    slot: SlotName
    manifest: Manifest
    #: Segments that lie in the slot, whether they are sent or not.
    lying: tuple[int, ...]
    #: Segments that are sent.
    sent: tuple[int, ...]
    #: Hash every chunk before it is sent.
    check: bool
    #: The other end said ``StreamReady``.
    ready: bool = False
    waiting: deque[tuple[Part, bytes, bool]] = field(default_factory=deque)
    flying: dict[Part, bytes] = field(default_factory=dict)
    #: Chunks taken so far.
    taken: set[Part] = field(default_factory=set)
    #: The last message was sent; only the answer to it is awaited.
    ended: bool = False
    #: Whether the other end may overwrite another copy of the same step.
    replaces: bool = True
    places: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.places = offsets(self.manifest.segments, self.lying)

    def offer(self, part: Part, hash: bytes) -> None:
        """The chunk is in the slot and can be sent."""
        self.waiting.append((part, hash, self.check))

    def all_taken(self) -> bool:
        """Whether the other end has every chunk, by the sizes of the manifest."""
        return len(self.taken) == count_parts(self.manifest, self.sent)


class Outbox:
    """All outgoing streams."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._streams: dict[StreamKey, Outgoing] = {}
        #: Streams of each link, the next to take its turn first.
        self._turns: dict[int, deque[Outgoing]] = {}
        #: Chunks of each link that are on their way.
        self._flying: dict[int, int] = {}

    def get(self, key: StreamKey) -> Outgoing | None:
        """The stream, if it is not over."""
        return self._streams.get(key)

    def link_up(self, link: int) -> None:
        """Chunks can go there."""
        self._turns[link] = deque()
        self._flying[link] = 0

    def link_down(self, link: int) -> list[Outgoing]:
        """The streams that ended with the link."""
        self._flying.pop(link, None)
        lost = list(self._turns.pop(link, ()))
        for stream in lost:
            self._streams.pop(stream.key, None)
        return lost

    def add(self, stream: Outgoing) -> None:
        """Begin a stream; its link is up."""
        self._streams[stream.key] = stream
        self._turns[stream.key.link].append(stream)

    def remove(self, stream: Outgoing) -> None:
        """The stream is over. Chunks on their way are still answered."""
        if self._streams.pop(stream.key, None) is not None:
            self._turns[stream.key.link].remove(stream)

    def pump(self, link: int) -> None:
        """Send what may be sent on the link."""
        turns = self._turns.get(link)
        if turns is None:
            return
        idle = 0
        while self._flying[link] < MAX_TICKETS and idle < len(turns):
            stream = turns[0]
            turns.rotate(-1)
            if not stream.ready or not stream.waiting:
                idle += 1
                continue
            idle = 0
            part, hash, check = stream.waiting.popleft()
            stream.flying[part] = hash
            self._flying[link] += 1
            self._board.do(
                SendChunk(
                    key=stream.key,
                    part=part,
                    slot=stream.slot,
                    offset=place_of(stream.places, part),
                    nbytes=part_nbytes(stream.manifest, part),
                    hash=hash,
                    check=check,
                )
            )

    def not_sent(self, key: StreamKey, part: Part) -> None:
        """``SendChunk`` sent nothing."""
        if key.link in self._flying:
            self._flying[key.link] -= 1
        stream = self._streams.get(key)
        if stream is not None:
            stream.flying.pop(part, None)

    def done(self, link: int, message: ChunkDone) -> Outgoing | None:
        """The other end answered a chunk; returns its stream if that is not over."""
        if link in self._flying:
            self._flying[link] -= 1
        if message.verdict is Verdict.LOST:
            self._board.do(DropCarrier(link, message.carrier, message.reason))
        stream = self._streams.get(StreamKey(link, message.stream))
        part = Part(message.segment, message.chunk)
        if stream is None or part not in stream.flying:
            return None
        hash = stream.flying.pop(part)
        match message.verdict:
            case Verdict.TAKEN:
                stream.taken.add(part)
            case Verdict.WANTED:
                stream.waiting.appendleft((part, hash, True))
            case Verdict.LOST:
                stream.waiting.appendleft((part, hash, stream.check))
            case Verdict.DISCARDED:
                pass
        return stream


def place_of(places: dict[int, int], part: Part) -> int:
    """Where a chunk lies in its slot."""
    return places[part.segment] + part.chunk * CHUNK_NBYTES


def room_for(manifest: Manifest, present: tuple[int, ...]) -> int:
    """Size of a slot with these parts, without the manifest at its end."""
    return offsets(manifest.segments, present)[OWN] + aligned(manifest.own_nbytes)
