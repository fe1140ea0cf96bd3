"""The decisions of a replicator: ``Core.step(event) -> actions``.

Pure: no threads, sockets, files or clock. ``replicator.py`` performs the actions and tells what
came of them by further events. The story of a replica, and where each part is told:

1. A rank copies its state and tells of each chunk (``owners.py``).
2. Chunks go out in turns, a bounded number at a time (``outgoing.py``).
3. The holder's replicator writes and verifies them (``incoming.py``), and seals the replica when
   all of them are those of the owner's sealed copy (``holding.py``).
4. The owner's rank is told ``Confirmed`` (``owners.py``).
5. A rank that lost its slots has one put together from the copies elsewhere (``assembling.py``),
   which their nodes check once more before they hand them out (``holding.Sources``).

Epochs: the agent declares a *fence*; what belongs to an older epoch is given up, refused, and never
written again. The fence is answered when the driver's last job for an older epoch is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from deadpool_runtime.replication import messages, wire
from deadpool_runtime.replication.assembling import Assemblies
from deadpool_runtime.replication.board import Board, Link
from deadpool_runtime.replication.events import (
    Action,
    ChunkReceived,
    ClientGone,
    CloseLink,
    CopyRead,
    DialFailed,
    DropClient,
    Event,
    FenceOverdue,
    FenceWanted,
    Heard,
    LinkDown,
    LinkUp,
    Noticed,
    RankSaid,
    SlotPrepared,
    SlotSealed,
    SourceDamaged,
    StreamKey,
    TellAgent,
    WatchFence,
)
from deadpool_runtime.replication.holding import Holdings, Sources
from deadpool_runtime.replication.incoming import Inbox
from deadpool_runtime.replication.outgoing import Outbox, Outgoing
from deadpool_runtime.replication.owners import Deputies, Further, Owners


class Core:
    """The state of one replicator. ``held``: replicas that were there before it; the step in each
    slot, by rank.
    """

    def __init__(self, node: str, held: Mapping[int, Mapping[int, int]] | None = None) -> None:
        self._board = Board(node)
        self._outbox = Outbox(self._board)
        self._inbox = Inbox(self._board)
        self._owners = Owners(self._board, self._outbox)
        #: Each knows the streams that are its own.
        self._senders: list[Owners] = [self._owners, Deputies(self._board, self._outbox)]
        self._holdings = Holdings(self._board, self._inbox, held or {})
        self._sources = Sources(self._board, self._outbox)
        self._assemblies = Assemblies(self._board, self._inbox, self._holdings, self._owners.tell)
        #: Epochs of fences that wait for jobs of older epochs.
        self._fencing: list[int] = []

    def step(self, event: Event) -> list[Action]:
        """What to do about ``event``."""
        self._handle(event)
        wanted = {address for each in self._senders for address in each.holders()}
        self._board.keep_links(wanted | self._assemblies.sources())
        self._answer_fences()
        actions, self._board.actions = self._board.actions, []
        return actions

    def _handle(self, event: Event) -> None:
        match event:
            case RankSaid():
                self._rank_said(event)
            case ClientGone(client=client):
                rank = self._owners.rank_of(client)
                if rank is not None:
                    self._assemblies.rank_gone(rank)
                for each in self._senders:
                    each.client_gone(client)
            case LinkUp():
                self._link_up(event)
            case LinkDown(link=link, reason=reason):
                self._link_down(link, reason)
            case DialFailed(address=address, reason=reason):
                if address in self._board.dialling:
                    self._assemblies.dial_failed(address, reason)
            case Heard(link=link, message=message):
                if link in self._board.links:
                    self._heard(link, message)
            case SlotPrepared(key=key, error=error):
                if self._inbox.prepared(key, error) is not None:
                    self._assemblies.refused(key, error)
            case ChunkReceived():
                given_up = self._inbox.received(event)
                if given_up is not None:
                    self._assemblies.refused(event.key, given_up[1])
            case SlotSealed():
                self._slot_sealed(event)
            case CopyRead():
                if not self._holdings.read(event):
                    self._sources.read(event)
            case SourceDamaged():
                self._source_damaged(event)
            case FenceWanted(epoch=epoch):
                self._fence(epoch)
            case FenceOverdue(epoch=epoch):
                for stream in self._inbox.busy_before(epoch):
                    self._board.do(CloseLink(stream.key.link, "a newer epoch was declared"))
            case Noticed(text=text):
                self._owners.note(text)
            case _:
                assert_never(event)

    # ------------------------------------------------------------ ranks

    def _rank_said(self, event: RankSaid) -> None:
        message = event.message
        if isinstance(message, messages.RankHello):
            for each in self._senders:
                each.hello(event.client, message)
            return
        rank = self._owners.rank_of(event.client)
        if rank is None:
            self._board.do(DropClient(event.client))
            return
        if isinstance(message, messages.Assemble):
            self._assemblies.begin(rank, message)
            return
        for each in self._senders:
            match message:
                case messages.SetHolder(holder=holder):
                    each.set_holder(rank, message)
                    if each is self._owners and holder is not None:
                        # Those that are new take their turn in this loop.
                        self._have_further(len(holder.more))
                case messages.SnapshotBegun():
                    each.begun(rank, message)
                case messages.ChunksCopied():
                    each.copied(rank, message)
                case messages.SnapshotSealed():
                    each.sealed(rank, message)
                case messages.SnapshotDropped():
                    each.dropped(rank, message)
                case _:
                    assert_never(message)

    def _have_further(self, count: int) -> None:
        """So many holders behind the first: none, usually."""
        further = self._owners.further
        while len(further) < count:
            further.append(Further(self._board, self._outbox, self._owners, len(further)))
            self._senders.append(further[-1])
            further[-1].follow()

    # ------------------------------------------------------------ links

    def _link_up(self, event: LinkUp) -> None:
        link = Link(event.link, event.node, event.address)
        self._board.links[event.link] = link
        self._outbox.link_up(event.link)
        if event.address is not None:
            self._board.dialling.discard(event.address)
            self._board.dialled[event.address] = link
            for each in self._senders:
                each.link_up()
            self._assemblies.link_up()

    def _link_down(self, number: int, reason: str) -> None:
        link = self._board.links.pop(number, None)
        if link is None:
            return
        if link.address is not None and self._board.dialled.get(link.address) is link:
            del self._board.dialled[link.address]
        lost = self._outbox.link_down(number)
        for each in self._senders:
            each.link_down(lost)
        self._sources.link_down(number)
        self._holdings.link_down(number)
        self._inbox.link_down(number)
        self._assemblies.link_down(number, reason)

    def _heard(self, link: int, message: wire.OnLink) -> None:
        match message:
            case wire.Put():
                self._holdings.put(link, message)
            case wire.PutEnd():
                self._holdings.end(link, message)
            case wire.Fetch():
                self._sources.fetch(link, message)
            case wire.FetchBegun():
                self._assemblies.begun(link, message)
            case wire.FetchEnd():
                self._assemblies.ended(link, message)
            case wire.StreamReady(stream=number):
                stream = self._outbox.get(StreamKey(link, number))
                if stream is not None:
                    stream.ready = True
                    self._go_on(stream)
            case wire.Chunk():
                given_up = self._inbox.chunk(link, message)
                if given_up is not None:
                    self._assemblies.refused(given_up[0].key, given_up[1])
            case wire.ChunkDone():
                stream = self._outbox.done(link, message)
                if stream is not None:
                    self._go_on(stream)
                self._outbox.pump(link)
            case wire.PutSealed(stream=number):
                stream = self._outbox.get(StreamKey(link, number))
                if stream is not None:
                    for each in self._senders:
                        each.put_sealed(stream)
            case wire.StreamRefused(stream=number, reason=reason):
                self._refused(StreamKey(link, number), reason)
            case (
                wire.LinkHello()
                | wire.LinkWelcome()
                | wire.DataHello()
                | wire.Offers()
                | wire.CarrierLost()
            ):
                # The driver keeps what is about carriers to itself.
                self._board.do(CloseLink(link, "the other end repeats its greeting"))
            case _:
                assert_never(message)

    def _go_on(self, stream: Outgoing) -> None:
        if stream.check:
            self._sources.go_on(stream)
        else:
            for each in self._senders:
                each.go_on(stream)

    def _refused(self, key: StreamKey, reason: str) -> None:
        """The other end gave a stream up."""
        outgoing = self._outbox.get(key)
        if outgoing is not None and outgoing.check:
            self._outbox.remove(outgoing)
        elif outgoing is not None:
            for each in self._senders:
                each.put_refused(outgoing, reason)
        else:
            incoming = self._inbox.get(key)
            if incoming is not None:
                self._inbox.close(incoming)
            self._holdings.forget(key)
            self._assemblies.refused(key, reason)

    # ------------------------------------------------------------ outcomes

    def _slot_sealed(self, event: SlotSealed) -> None:
        stream = self._inbox.job_done(event.key)
        if stream is None:
            return
        # A replica may have been fetched.
        if stream.slot.replica and not self._assemblies.awaits(stream.key):
            self._holdings.sealed(stream, event)
        else:
            self._assemblies.sealed(stream, event)

    def _source_damaged(self, event: SourceDamaged) -> None:
        self._outbox.not_sent(event.key, event.part)
        stream = self._outbox.get(event.key)
        if stream is None:
            self._outbox.pump(event.key.link)
        elif stream.check:
            self._sources.damaged(stream)
        else:
            for each in self._senders:
                each.source_damaged(stream)

    # ------------------------------------------------------------ fence

    def _fence(self, epoch: int) -> None:
        self._board.fence = max(self._board.fence, epoch)
        self._fencing.append(epoch)
        for each in self._senders:
            each.fence()
        self._assemblies.fence()
        self._holdings.fence()
        for stream in self._inbox.live():
            if stream.epoch < self._board.fence:
                self._inbox.refuse(stream, f"epoch {stream.epoch} is over")
        if self._inbox.busy_before(epoch):
            self._board.do(WatchFence(epoch))

    def _answer_fences(self) -> None:
        for epoch in list(self._fencing):
            if not self._inbox.busy_before(epoch):
                self._fencing.remove(epoch)
                self._board.do(TellAgent(wire.Fenced(epoch)))
