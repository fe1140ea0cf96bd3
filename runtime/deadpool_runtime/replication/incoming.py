"""Streams that arrive at this node: what is written where, and when a copy may be sealed.

Pure. A slot has one writer at a time: a stream that wants a slot into which the driver still writes
for an older stream waits until those jobs are done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from deadpool_runtime.replication import wire
from deadpool_runtime.replication.board import Board, part_nbytes
from deadpool_runtime.replication.events import (
    ChunkReceived,
    Outcome,
    Part,
    PrepareSlot,
    ReceiveChunk,
    SealSlot,
    SlotName,
    StreamKey,
)
from deadpool_runtime.replication.manifest import OWN, Manifest
from deadpool_runtime.replication.outgoing import place_of
from deadpool_runtime.replication.wire import Verdict


@dataclass
class Incoming:
    """A stream that is written into ``slot``."""

    key: StreamKey
    epoch: int
    slot: SlotName
    #: What the sender calls the segments; the chunks of ``wanted`` are to come.
    manifest: Manifest
    wanted: tuple[int, ...]
    #: Where each of ``wanted`` goes.
    places: dict[int, int]
    #: Wipe the slot before the first chunk, and make that much room; None if that was done.
    room: int | None
    #: The hash that a chunk must have; None if the sender's word counts until the seal.
    expected: Callable[[Part], bytes] | None = None
    got: dict[Part, bytes] = field(default_factory=dict)
    again: set[Part] = field(default_factory=set)
    #: Jobs of the driver that are under way.
    busy: int = 0
    ready: bool = False
    #: Everything is there: the link is not needed any more.
    sealing: bool = False
    over: bool = False


class Inbox:
    """All incoming streams."""

    def __init__(self, board: Board) -> None:
        self._board = board
        #: Those that are over too, as long as the driver works for them.
        self._streams: dict[StreamKey, Incoming] = {}
        self._writer: dict[str, Incoming] = {}
        self._waiting: dict[str, Incoming] = {}

    def get(self, key: StreamKey) -> Incoming | None:
        """The stream, if it is not over."""
        stream = self._streams.get(key)
        return None if stream is None or stream.over else stream

    def live(self) -> list[Incoming]:
        """Every stream that is not over."""
        return [stream for stream in self._streams.values() if not stream.over]

    def busy_before(self, epoch: int) -> list[Incoming]:
        """Streams of an older epoch for which something may still be written."""
        return [s for s in self._streams.values() if s.epoch < epoch and s.busy]

    def open(self, stream: Incoming) -> None:
        """Begin a stream, as soon as nobody else writes into its slot."""
        file = stream.slot.file
        self._streams[stream.key] = stream
        writer = self._writer.get(file)
        if writer is not None and not writer.over:
            self.refuse(writer, "a newer copy goes into the same slot")
            writer = self._writer.get(file)
        if writer is None:
            self._start(stream)
            return
        waiting = self._waiting.get(file)
        if waiting is not None:
            self.refuse(waiting, "a newer copy goes into the same slot")
        self._waiting[file] = stream

    def _start(self, stream: Incoming) -> None:
        self._writer[stream.slot.file] = stream
        if stream.room is None:
            self._ready(stream)
            return
        stream.busy += 1
        self._board.do(PrepareSlot(stream.key, stream.slot, stream.room))

    def _ready(self, stream: Incoming) -> None:
        stream.ready = True
        self._board.tell(stream.key.link, wire.StreamReady(stream.key.stream))

    def refuse(self, stream: Incoming, reason: str) -> None:
        """Give the stream up and tell the sender."""
        self._board.tell(stream.key.link, wire.StreamRefused(stream.key.stream, reason))
        self.close(stream)

    def close(self, stream: Incoming) -> None:
        """The stream is over: sealed, refused or lost."""
        stream.over = True
        self._settle(stream)

    def _settle(self, stream: Incoming) -> None:
        if not stream.over or stream.busy:
            return
        file = stream.slot.file
        self._streams.pop(stream.key, None)
        if self._waiting.get(file) is stream:
            del self._waiting[file]
        if self._writer.get(file) is stream:
            del self._writer[file]
            if (following := self._waiting.pop(file, None)) is not None:
                self._start(following)

    def job_done(self, key: StreamKey) -> Incoming | None:
        """The driver finished a job; returns the stream if that is not over."""
        stream = self._streams.get(key)
        if stream is None:
            return None
        stream.busy -= 1
        self._settle(stream)
        return None if stream.over else stream

    def prepared(self, key: StreamKey, error: str) -> Incoming | None:
        """The slot is prepared; returns the stream if it failed."""
        stream = self.job_done(key)
        if stream is None:
            return None
        if error:
            self.refuse(stream, error)
            return stream
        self._ready(stream)
        return None

    def chunk(self, link: int, message: wire.Chunk) -> tuple[Incoming, str] | None:
        """A chunk can be received. Returns the stream and the reason if it was given up."""
        key = StreamKey(link, message.stream)
        part = Part(message.segment, message.chunk)
        stream = self.get(key)
        reason = ""
        if stream is not None:
            reason = self._fault(stream, part, message)
        wanted = stream is not None and not reason
        job = ReceiveChunk(
            key=key,
            part=part,
            slot=stream.slot if stream is not None and wanted else None,
            offset=place_of(stream.places, part) if stream is not None and wanted else 0,
            nbytes=message.nbytes,
            hash=message.hash,
            carrier=message.carrier,
            ticket=message.ticket,
        )
        if stream is not None and wanted:
            stream.busy += 1
        self._board.do(job)
        if stream is not None and reason:
            self.refuse(stream, reason)
            return stream, reason
        return None

    def _fault(self, stream: Incoming, part: Part, message: wire.Chunk) -> str:
        if not stream.ready or part.segment not in stream.wanted or part.chunk < 0:
            return f"chunk {part.chunk} of segment {part.segment} was not asked for"
        if part.segment != OWN and part_nbytes(stream.manifest, part) != message.nbytes:
            return f"chunk {part.chunk} of segment {part.segment} has a wrong size"
        if part.segment == OWN and part.chunk:
            return "the own part has one chunk only"
        if stream.expected is not None and stream.expected(part) != message.hash:
            return f"chunk {part.chunk} of segment {part.segment} differs from the base copy's"
        return ""

    def received(self, event: ChunkReceived) -> tuple[Incoming, str] | None:
        """``ReceiveChunk`` is done. Returns the stream and the reason if it was given up."""
        if event.outcome is Outcome.DISCARDED:
            self._answer(event, Verdict.DISCARDED)
            return None
        stream = self.job_done(event.key)
        if stream is None:
            lost = event.outcome is Outcome.LOST
            self._answer(event, Verdict.LOST if lost else Verdict.DISCARDED)
            return None
        match event.outcome:
            case Outcome.LOST:
                self._answer(event, Verdict.LOST)
            case Outcome.RIGHT:
                stream.got[event.part] = event.hash
                self._answer(event, Verdict.TAKEN)
            case Outcome.WRONG if event.part not in stream.again:
                stream.again.add(event.part)
                self._answer(event, Verdict.WANTED)
            case Outcome.WRONG | Outcome.UNWRITTEN:
                self._answer(event, Verdict.DISCARDED)
                what = "the own part" if event.part.segment == OWN else f"chunk {event.part.chunk}"
                reason = event.reason or f"{what} arrived damaged twice"
                self.refuse(stream, reason)
                return stream, reason
        return None

    def _answer(self, event: ChunkReceived, verdict: Verdict) -> None:
        self._board.tell(
            event.key.link,
            wire.ChunkDone(
                stream=event.key.stream,
                segment=event.part.segment,
                chunk=event.part.chunk,
                verdict=verdict,
                carrier=event.carrier,
                reason=event.reason,
            ),
        )

    def seal(self, stream: Incoming, manifest: Manifest, present: tuple[int, ...]) -> None:
        """Seal the slot for the stream; everything is in it."""
        stream.busy += 1
        stream.sealing = True
        self._board.do(SealSlot(stream.key, stream.slot, manifest, present))

    def link_down(self, link: int) -> list[Incoming]:
        """The streams that ended with the link."""
        lost = [s for s in self.live() if s.key.link == link and not s.sealing]
        for stream in lost:
            self.close(stream)
        return lost
