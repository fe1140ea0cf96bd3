"""One open link to another replicator: its connections, carriers and threads.

Five threads: one reads the control connection, one writes it, one sends chunks, one receives them
and works on the slots they go into, and one verifies what was received. They get jobs on queues and
post events; nothing else is shared. Every job with a stream key that the core gave is answered,
even after the link ended; chunks in any order.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Queue, SimpleQueue

from deadpool_runtime import protocol
from deadpool_runtime.replication import wire
from deadpool_runtime.replication.arena import ArenaFull, SlotFile, copy_in
from deadpool_runtime.replication.carriers import tcp
from deadpool_runtime.replication.carriers.base import (
    MAX_TICKETS,
    CarrierBroken,
    Kind,
    Range,
    Receiver,
    Sender,
)
from deadpool_runtime.replication.carriers.choice import Choice
from deadpool_runtime.replication.carriers.files import Maps
from deadpool_runtime.replication.events import (
    ChunkReceived,
    CopyRead,
    Event,
    Heard,
    LinkDown,
    LinkUp,
    Noticed,
    Outcome,
    PrepareSlot,
    ReadCopy,
    ReceiveChunk,
    SealSlot,
    SendChunk,
    SlotName,
    SlotPrepared,
    SlotSealed,
    SourceDamaged,
)
from deadpool_runtime.replication.manifest import chunk_hash
from deadpool_runtime.replication.sockets import messages_on, shut

SendJob = SendChunk | ReadCopy
ReceiveJob = ReceiveChunk | PrepareSlot | SealSlot


@dataclass(frozen=True)
class Home:
    """What all links of a node share."""

    node: str
    arena: Path
    kinds: Sequence[Kind]
    maps: Maps
    post: Callable[[Event], None]

    def path_of(self, slot: SlotName) -> Path:
        """The file of a slot."""
        return self.arena / slot.file


@dataclass(frozen=True)
class Arrival:
    """A chunk that is to be received. ``receiver``: None if its carrier was gone already;
    ``target``: where that end expects the chunk, None if it is to be discarded.
    """

    job: ReceiveChunk
    receiver: Receiver | None
    target: Range | None
    #: Why there is no target though the job named one.
    reason: str = ""


class Link:
    """An authenticated link. ``address``: what this end dialled, if it did."""

    def __init__(
        self,
        number: int,
        home: Home,
        peer: str,
        address: protocol.Address | None,
        control: socket.socket,
        data: socket.socket,
    ) -> None:
        self.number = number
        self.peer = peer
        self.address = address
        self._home = home
        self._control = control
        self._data = data
        control.settimeout(None)
        data.settimeout(None)
        ends = tcp.TcpSender(data, home.maps), tcp.TcpReceiver(data, home.maps)
        self.choice = Choice(home.kinds, peer, ends, lambda text: home.post(Noticed(text)))
        self._lock = threading.Lock()
        self._ended = False
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._sends: SimpleQueue[SendJob | None] = SimpleQueue()
        self._receives: SimpleQueue[ReceiveJob | Arrival | None] = SimpleQueue()
        self._verifies: Queue[tuple[ReceiveChunk, Range] | None] = Queue(MAX_TICKETS)

    def start(self, theirs: dict[str, bytes], announced: dict[str, bytes] | None) -> None:
        """Announce the link, then let its threads run. ``announced``: the offers that the other
        end knows of; None if it dialled and waits for its welcome.
        """
        ours = self.choice.choose(theirs)
        if announced is None:
            self.tell(wire.LinkWelcome(self._home.node, ours))
        elif announced != ours:
            self.tell(wire.Offers(ours))
        self._home.post(LinkUp(self.number, self.peer, self.address))
        for run in (self._read, self._write, self._send, self._receive, self._verify):
            name = f"deadpool-link{run.__name__}"
            threading.Thread(target=run, name=name, daemon=True).start()

    # ------------------------------------------------------------ from any thread

    def tell(self, message: wire.OnLink) -> None:
        """Queue a message; lost if the link ended."""
        self._outgoing.put(protocol.frame(message))

    def do_send(self, job: SendJob) -> None:
        """Queue a job for the sending thread."""
        self._sends.put(job)

    def do_receive(self, job: ReceiveJob) -> None:
        """Queue a job for the receiving thread; answered at once if the link ended.

        Carriers hear of a chunk here, so that it comes in while earlier ones are worked on.
        """
        # Under the lock: what a carrier expects is in the queue when the link ends.
        with self._lock:
            if not self._ended:
                self._receives.put(self._expect(job) if isinstance(job, ReceiveChunk) else job)
                return
        self._fail(job)

    def drop_carrier(self, label: str, reason: str) -> None:
        """The other end could not receive by that carrier."""
        if label == tcp.NAME:
            self.end(reason)
        else:
            self.choice.drop_sender(label, reason)

    def offers_changed(self) -> None:
        """A carrier of this node came or went."""
        self.tell(wire.Offers(self.choice.choose()))

    def end(self, reason: str) -> None:
        """End the link; the first reason counts."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            # The threads work off what is queued before they leave.
            for queue in (self._outgoing, self._sends, self._receives):
                queue.put(None)
        self.choice.close()
        shut(self._control)
        shut(self._data)
        self._home.post(LinkDown(self.number, reason))

    # ------------------------------------------------------------ control connection

    def _read(self) -> None:
        reason = "the other end closed it"
        try:
            for message in messages_on(self._control, protocol.Codec(wire.OnLink)):
                if isinstance(message, wire.Offers):
                    self.choice.choose(message.offers)
                elif isinstance(message, wire.CarrierLost):
                    self.choice.drop_receiver(message.carrier)
                else:
                    self._home.post(Heard(self.number, message))
        except protocol.ProtocolError as error:
            reason = str(error)
        self.end(reason)

    def _write(self) -> None:
        while (data := self._outgoing.get()) is not None:
            try:
                self._control.sendall(data)
            except OSError as error:
                self.end(f"sending failed: {error}")
                return

    # ------------------------------------------------------------ sending

    def _send(self) -> None:
        pending: deque[tuple[str, Sender, bytes]] = deque()
        while True:
            # A carrier is asked for as much as there is before the first of it is waited for.
            if pending and (len(pending) >= MAX_TICKETS or self._sends.empty()):
                self._wait_sent(*pending.popleft())
                continue
            job = self._sends.get()
            if job is None:
                return
            if isinstance(job, ReadCopy):
                self._home.post(_read_copy(self._home, job))
            elif (ticket := self._send_chunk(job)) is not None:
                pending.append(ticket)

    def _send_chunk(self, job: SendChunk) -> tuple[str, Sender, bytes] | None:
        source = Range(str(self._home.path_of(job.slot)), job.offset, job.nbytes)
        try:
            view = self._home.maps.view(source)
            damaged = job.check and chunk_hash(view) != job.hash
        except OSError:
            damaged = True
        if damaged:
            self._home.post(SourceDamaged(job.key, job.part))
            return None
        while True:
            label, sender = self.choice.sender()
            try:
                ticket = sender.send(source)
            except CarrierBroken as error:
                if not self._sender_broke(label, str(error)):
                    return None
                continue
            key, part = job.key, job.part
            self.tell(
                wire.Chunk(
                    key.stream, part.segment, part.chunk, job.nbytes, job.hash, label, ticket
                )
            )
            return label, sender, ticket

    def _wait_sent(self, label: str, sender: Sender, ticket: bytes) -> None:
        try:
            sender.wait_sent(ticket)
        except CarrierBroken as error:
            self._sender_broke(label, str(error))

    def _sender_broke(self, label: str, reason: str) -> bool:
        """Whether the chunk can go by another carrier."""
        if label == tcp.NAME:
            self.end(reason)
            return False
        if self.choice.drop_sender(label, reason):
            self.tell(wire.CarrierLost(label, reason))
        return not self._ended

    # ------------------------------------------------------------ receiving

    def _receive(self) -> None:
        while (job := self._receives.get()) is not None:
            if self._ended:
                self._fail(job)
                continue
            match job:
                case Arrival():
                    self._receive_chunk(job)
                case PrepareSlot():
                    self._home.post(_prepare(self._home, job))
                case SealSlot():
                    self._home.post(_seal(self._home, job))
        self._verifies.put(None)

    def _fail(self, job: ReceiveJob | Arrival) -> None:
        gone = "the link ended"
        match job:
            case Arrival(job=chunk, receiver=receiver, target=target):
                # Until this call ended the carrier may still write there.
                if receiver is not None and target is not None:
                    with contextlib.suppress(CarrierBroken):
                        receiver.receive(chunk.ticket, target)
                self._home.post(_received(chunk, Outcome.LOST, b"", gone))
            case ReceiveChunk():
                self._home.post(_received(job, Outcome.LOST, b"", gone))
            case PrepareSlot():
                self._home.post(SlotPrepared(job.key, gone))
            case SealSlot():
                self._home.post(SlotSealed(job.key, gone))

    def _expect(self, job: ReceiveChunk) -> Arrival:
        receiver = self.choice.receiver(job.carrier)
        if receiver is None or job.slot is None:
            return Arrival(job, receiver, None)
        target = Range(str(self._home.path_of(job.slot)), job.offset, job.nbytes)
        try:
            _make_room(target)
        except (OSError, ArenaFull) as error:
            return Arrival(job, receiver, None, str(error))
        receiver.expect(job.ticket, target)
        return Arrival(job, receiver, target)

    def _receive_chunk(self, arrival: Arrival) -> None:
        """Answered here, or by the verifying thread."""
        job, receiver, target = arrival.job, arrival.receiver, arrival.target
        if receiver is None:
            gone = "the carrier is gone at the receiving end"
            self._home.post(_received(job, Outcome.LOST, b"", gone))
            return
        try:
            if target is not None:
                receiver.receive(job.ticket, target)
                self._verifies.put((job, target))
                return
            receiver.discard(job.ticket, job.nbytes)
        except CarrierBroken as error:
            self._lost(job, str(error))
            return
        self._home.post(_received(job, Outcome.UNWRITTEN, b"", arrival.reason))

    def _lost(self, job: ReceiveChunk, reason: str) -> None:
        if job.carrier == tcp.NAME:
            self.end(reason)
        else:
            self.choice.drop_receiver(job.carrier)
        self._home.post(_received(job, Outcome.LOST, b"", reason))

    def _verify(self) -> None:
        """The hash lets other threads run: meanwhile the next chunk is received."""
        while (received := self._verifies.get()) is not None:
            job, target = received
            try:
                got = chunk_hash(self._home.maps.view(target))
            except OSError as error:
                self._lost(job, str(error))
                continue
            outcome = Outcome.RIGHT if got == job.hash else Outcome.WRONG
            self._home.post(_received(job, outcome, got))


def _received(
    job: ReceiveChunk, outcome: Outcome, hash: bytes = b"", reason: str = ""
) -> ChunkReceived:
    if job.slot is None:
        outcome = Outcome.DISCARDED
    return ChunkReceived(job.key, job.part, outcome, hash, job.carrier, reason)


def _make_room(target: Range) -> None:
    """The own part may be larger than its owner thought when the put began."""
    end = target.offset + target.nbytes
    if os.stat(target.path).st_size < end:
        with SlotFile.open(Path(target.path)) as slot:
            slot.ensure(end)


def _prepare(home: Home, job: PrepareSlot) -> SlotPrepared:
    try:
        with SlotFile.open(home.path_of(job.slot), create=True) as slot:
            slot.invalidate()
            slot.ensure(job.nbytes)
    except (OSError, ArenaFull) as error:
        return SlotPrepared(job.key, str(error))
    return SlotPrepared(job.key, "")


def _seal(home: Home, job: SealSlot) -> SlotSealed:
    try:
        with SlotFile.open(home.path_of(job.slot)) as slot:
            slot.seal(job.manifest, job.present, None)
    except (OSError, ValueError, ArenaFull) as error:
        return SlotSealed(job.key, str(error))
    return SlotSealed(job.key, "")


def _read_copy(home: Home, job: ReadCopy) -> CopyRead:
    found = copy_in(home.arena, job.replica, job.rank, job.step)
    return CopyRead(job.key, 0, None, ()) if found is None else CopyRead(job.key, *found)
