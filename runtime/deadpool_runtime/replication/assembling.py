"""Copies that are put together on this node for a rank that has none, from pieces of others.

Pure. The base piece brings the manifest and the own part; what other pieces bring must have the
hashes of that manifest. A rank may also have a replica of another rank's copy fetched, one piece
of it, which is then kept here as if it had been sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from deadpool_runtime.protocol import Address, Piece
from deadpool_runtime.replication import messages, wire
from deadpool_runtime.replication.board import Board, fault_in, hash_of, parts_of
from deadpool_runtime.replication.events import Part, SlotName, SlotSealed, StreamKey
from deadpool_runtime.replication.holding import Holdings
from deadpool_runtime.replication.incoming import Inbox, Incoming
from deadpool_runtime.replication.manifest import OWN, Manifest, offsets
from deadpool_runtime.replication.messages import Assembled, AssembleFailed, FromReplicator
from deadpool_runtime.replication.naming import packed
from deadpool_runtime.replication.outgoing import room_for

#: Attempts to dial a source, and times that its link may be lost.
TRIES = 3


@dataclass
class Assembly:
    """``slot`` is being made whole with a copy of ``step`` for ``rank``, or a replica fetched for
    it."""

    rank: int
    epoch: int
    step: int
    pieces: list[Piece]
    slot: SlotName
    held: bool = False
    index: int = 0
    tries: int = 0
    #: The manifest of the base piece.
    manifest: Manifest | None = None
    got: dict[Part, bytes] = field(default_factory=dict)
    #: The stream of the piece that is awaited.
    key: StreamKey | None = None
    sealing: bool = False

    @property
    def piece(self) -> Piece:
        """The piece that is awaited."""
        return self.pieces[self.index]

    def present(self, manifest: Manifest) -> tuple[int, ...]:
        """What of the base copy the slot has in the end."""
        indices = [
            index
            for index, segment in enumerate(manifest.segments)
            if not self.held or packed(segment.ranks) in self.piece.segments
        ]
        return (*indices, OWN)


class Assemblies:
    """All assemblies under way; at most one a rank."""

    def __init__(
        self,
        board: Board,
        inbox: Inbox,
        holdings: Holdings,
        tell: Callable[[int, FromReplicator], None],
    ) -> None:
        self._board = board
        self._inbox = inbox
        self._holdings = holdings
        self._tell = tell
        self._by_rank: dict[int, Assembly] = {}

    def sources(self) -> set[Address]:
        """Where links are needed."""
        return {assembly.piece.source for assembly in self._by_rank.values()}

    def begin(self, rank: int, message: messages.Assemble) -> None:
        """A rank wants a slot to be made whole."""
        if message.epoch < self._board.fence:
            self._tell(
                rank, AssembleFailed(message.epoch, message.step, "a newer epoch was declared")
            )
            return
        if (older := self._by_rank.get(rank)) is not None:
            self._fail(older, "the rank asked for something else")
        owner = message.pieces[0].rank if message.held and message.pieces else rank
        slot = SlotName(
            message.held,
            owner,
            message.step,
            self._holdings.slot_for(owner, message.step) if message.held else message.slot,
        )
        assembly = Assembly(rank, message.epoch, message.step, message.pieces, slot, message.held)
        self._by_rank[rank] = assembly
        if message.held and len(message.pieces) != 1:
            self._fail(assembly, "a replica is fetched in one piece")
            return
        if [piece.base for piece in message.pieces] != [True] + [False] * (len(message.pieces) - 1):
            self._fail(assembly, "the first piece, and no other, must be the base")
            return
        self._ask(assembly)

    def _ask(self, assembly: Assembly) -> None:
        """Fetch the piece that is awaited, if its source can be reached."""
        piece = assembly.piece
        link = self._board.dialled.get(piece.source)
        if assembly.key is not None or link is None:
            return
        link.streams += 1
        assembly.key = StreamKey(link.number, link.streams)
        self._board.tell(
            link.number,
            wire.Fetch(
                stream=link.streams,
                epoch=assembly.epoch,
                rank=piece.rank,
                step=assembly.step,
                replica=piece.replica,
                segments=piece.segments,
                base=piece.base,
            ),
        )

    def _of(self, key: StreamKey) -> Assembly | None:
        return next((a for a in self._by_rank.values() if a.key == key), None)

    def begun(self, link: int, message: wire.FetchBegun) -> None:
        """The source has the copy."""
        key = StreamKey(link, message.stream)
        assembly = self._of(key)
        if assembly is None:
            self._board.tell(link, wire.StreamRefused(message.stream, "not needed any more"))
            return
        reason = self._fault(assembly, message)
        if reason:
            self._refuse(assembly, reason)
            return
        room = None
        if assembly.piece.base:
            # A peer's copy that is taken over becomes this rank's own.
            assembly.manifest = replace(message.manifest, rank=assembly.slot.rank)
            room = room_for(message.manifest, assembly.present(message.manifest))
        base = assembly.manifest
        assert base is not None
        index_of = {segment.ranks: index for index, segment in enumerate(base.segments)}
        index_of_theirs = {
            theirs: OWN if theirs == OWN else index_of[message.manifest.segments[theirs].ranks]
            for theirs in message.present
        }
        at = offsets(base.segments, assembly.present(base))

        def expected(part: Part) -> bytes:
            return hash_of(base, Part(index_of_theirs[part.segment], part.chunk))

        self._inbox.open(
            Incoming(
                key=key,
                epoch=assembly.epoch,
                slot=assembly.slot,
                manifest=message.manifest,
                wanted=message.present,
                places={theirs: at[ours] for theirs, ours in index_of_theirs.items()},
                room=room,
                expected=expected,
            )
        )

    def _fault(self, assembly: Assembly, message: wire.FetchBegun) -> str:
        piece = assembly.piece
        manifest = message.manifest
        if reason := fault_in(manifest, message.present, hashed=True):
            return reason
        named = [packed(manifest.segments[i].ranks) for i in message.present if i != OWN]
        if (manifest.rank, manifest.step) != (piece.rank, assembly.step):
            return f"the source sent the copy of rank {manifest.rank} after step {manifest.step}"
        if sorted(named) != sorted(piece.segments) or (OWN in message.present) != piece.base:
            return "the source sent other segments than it was asked for"
        if piece.base:
            own = piece.rank == assembly.rank or piece.adopted or assembly.held
            return "" if own else "the base is another rank's copy"
        base = assembly.manifest
        assert base is not None
        sizes = {segment.ranks: segment.nbytes for segment in base.segments}
        for index in message.present:
            segment = manifest.segments[index]
            if sizes.get(segment.ranks) != segment.nbytes:
                return f"the segment of ranks {list(segment.ranks)} is not that of the base copy"
        return ""

    def ended(self, link: int, message: wire.FetchEnd) -> None:
        """Every chunk of the piece was taken."""
        assembly = self._of(StreamKey(link, message.stream))
        stream = self._inbox.get(StreamKey(link, message.stream))
        if assembly is None or stream is None:
            return
        base = assembly.manifest
        assert base is not None
        index_of = {segment.ranks: index for index, segment in enumerate(base.segments)}
        for part, hash in stream.got.items():
            ours = (
                OWN
                if part.segment == OWN
                else index_of[stream.manifest.segments[part.segment].ranks]
            )
            assembly.got[Part(ours, part.chunk)] = hash
        if assembly.index + 1 < len(assembly.pieces):
            self._inbox.close(stream)
            assembly.key = None
            assembly.index += 1
            assembly.tries = 0
            self._ask(assembly)
            return
        whole = assembly.present(base)
        for part in parts_of(base, whole):
            if assembly.got.get(part) != hash_of(base, part):
                ranks = list(base.segments[part.segment].ranks)
                self._refuse(assembly, f"no piece brought the segment of ranks {ranks}")
                return
        assembly.sealing = True
        self._inbox.seal(stream, base, whole)

    def awaits(self, key: StreamKey) -> bool:
        """Whether the stream is one of these."""
        return self._of(key) is not None

    def sealed(self, stream: Incoming, event: SlotSealed) -> None:
        """The slot is sealed, or could not be."""
        assembly = self._of(stream.key)
        self._inbox.close(stream)
        if assembly is None:
            return
        if event.error:
            self._fail(assembly, event.error)
            return
        if assembly.held:
            self._holdings.have(assembly.slot)
        del self._by_rank[assembly.rank]
        self._tell(assembly.rank, Assembled(assembly.epoch, assembly.step))

    # ------------------------------------------------------------ failures

    def _refuse(self, assembly: Assembly, reason: str) -> None:
        self._fail(assembly, f"{self._source(assembly)}: {reason}")

    def _source(self, assembly: Assembly) -> str:
        address = assembly.piece.source
        link = self._board.dialled.get(address)
        return link.node if link is not None else f"{address.host}:{address.port}"

    def _fail(self, assembly: Assembly, reason: str) -> None:
        self._by_rank.pop(assembly.rank, None)
        if assembly.key is not None:
            stream = self._inbox.get(assembly.key)
            if stream is not None:
                self._inbox.refuse(stream, reason)
            else:
                link, number = assembly.key
                self._board.tell(link, wire.StreamRefused(number, reason))
        self._tell(assembly.rank, AssembleFailed(assembly.epoch, assembly.step, reason))

    def refused(self, key: StreamKey, reason: str) -> None:
        """A stream was given up, here or by the source."""
        assembly = self._of(key)
        if assembly is not None:
            self._refuse(assembly, reason)

    def dial_failed(self, address: Address, reason: str) -> None:
        """A source could not be reached."""
        for assembly in list(self._by_rank.values()):
            if assembly.piece.source == address and assembly.key is None:
                self._try_again(assembly, f"cannot be reached: {reason}")

    def link_down(self, link: int, reason: str) -> None:
        """The piece that was awaited over that link begins anew, if the link comes up again."""
        for assembly in list(self._by_rank.values()):
            if assembly.key is not None and assembly.key.link == link and not assembly.sealing:
                assembly.key = None
                self._try_again(assembly, f"the link was lost: {reason}")

    def _try_again(self, assembly: Assembly, reason: str) -> None:
        assembly.tries += 1
        if assembly.tries >= TRIES:
            self._refuse(assembly, reason)

    def link_up(self) -> None:
        """A link may be one that an assembly waits for."""
        for assembly in list(self._by_rank.values()):
            if not assembly.sealing:
                self._ask(assembly)

    def rank_gone(self, rank: int) -> None:
        """Nobody waits for the slot any more."""
        if (assembly := self._by_rank.get(rank)) is not None:
            self._fail(assembly, "the rank is gone")

    def fence(self) -> None:
        """A newer epoch was declared."""
        for assembly in list(self._by_rank.values()):
            if assembly.epoch < self._board.fence:
                self._fail(assembly, "a newer epoch was declared")
