"""What happens to a replicator (events) and what it is to do (actions).

``core.Core`` turns the first into the second; ``replicator.py`` performs the actions and reports
their outcome. Streams are named by their link and number, slots by ``SlotName``.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import msgspec

from deadpool_runtime.protocol import Address
from deadpool_runtime.replication import wire
from deadpool_runtime.replication.manifest import Manifest
from deadpool_runtime.replication.messages import FromReplicator, ToReplicator
from deadpool_runtime.replication.slotting import slot_file


class SlotName(NamedTuple):
    """The slot in which a copy of ``rank`` after ``step`` lies: its own, or that of a replica."""

    replica: bool
    rank: int
    step: int
    slot: int

    @property
    def file(self) -> str:
        """Its file's name in the arena; shared with other steps."""
        return slot_file(self.replica, self.rank, self.slot)


class StreamKey(NamedTuple):
    """A stream of a link."""

    link: int
    stream: int


class Part(NamedTuple):
    """A chunk of a segment; (``manifest.OWN``, 0) is the own part."""

    segment: int
    chunk: int


class Outcome(StrEnum):
    """How receiving a chunk ended."""

    #: It is in the slot and has its hash.
    RIGHT = "right"
    #: It came with another hash.
    WRONG = "wrong"
    #: The carrier broke.
    LOST = "lost"
    #: It came, and could not be written.
    UNWRITTEN = "unwritten"
    #: It was discarded, as asked.
    DISCARDED = "discarded"


# ---------------------------------------------------------------- events


class RankSaid(msgspec.Struct, frozen=True):
    """A message of a rank, on its connection ``client``."""

    client: int
    message: ToReplicator


class ClientGone(msgspec.Struct, frozen=True):
    """A rank's connection ended."""

    client: int


class LinkUp(msgspec.Struct, frozen=True):
    """A link is ready for use. ``address``: what was dialled; None if the other end dialled."""

    link: int
    node: str
    address: Address | None


class LinkDown(msgspec.Struct, frozen=True):
    """A link ended; nothing more is heard on it. Jobs that were under way still report."""

    link: int
    reason: str


class DialFailed(msgspec.Struct, frozen=True):
    """One attempt to dial failed. The driver goes on trying until ``StopDialling``."""

    address: Address
    reason: str


class Heard(msgspec.Struct, frozen=True):
    """A message on a link."""

    link: int
    message: wire.OnLink


class SlotPrepared(msgspec.Struct, frozen=True):
    """``PrepareSlot`` is done; ``error`` says why not, or is empty."""

    key: StreamKey
    error: str


class ChunkReceived(msgspec.Struct, frozen=True):
    """``ReceiveChunk`` is done. ``reason``: why it was lost or could not be written."""

    key: StreamKey
    part: Part
    outcome: Outcome
    hash: bytes
    carrier: str
    reason: str


class SlotSealed(msgspec.Struct, frozen=True):
    """``SealSlot`` is done; ``error`` says why not, or is empty."""

    key: StreamKey
    error: str


class CopyRead(msgspec.Struct, frozen=True):
    """``ReadCopy`` is done; ``manifest`` is None if no slot holds such a copy."""

    key: StreamKey
    slot: int
    manifest: Manifest | None
    present: tuple[int, ...]


class SourceDamaged(msgspec.Struct, frozen=True):
    """``SendChunk`` with ``check`` found other bytes than the hash says, and sent nothing."""

    key: StreamKey
    part: Part


class FenceWanted(msgspec.Struct, frozen=True):
    """The agent said ``Fence``."""

    epoch: int


class FenceOverdue(msgspec.Struct, frozen=True):
    """Some time after ``WatchFence``."""

    epoch: int


class Noticed(msgspec.Struct, frozen=True):
    """A link has something for the user to read."""

    text: str


Event = (
    RankSaid
    | ClientGone
    | LinkUp
    | LinkDown
    | DialFailed
    | Heard
    | SlotPrepared
    | ChunkReceived
    | SlotSealed
    | CopyRead
    | SourceDamaged
    | FenceWanted
    | FenceOverdue
    | Noticed
)

# ---------------------------------------------------------------- actions


class TellRank(msgspec.Struct, frozen=True):
    """Say something to a rank."""

    client: int
    message: FromReplicator


class DropClient(msgspec.Struct, frozen=True):
    """Close a rank's connection: another replaced it, or it makes no sense."""

    client: int


class TellLink(msgspec.Struct, frozen=True):
    """Say something on a link; silently lost if it is down."""

    link: int
    message: wire.OnLink


class Dial(msgspec.Struct, frozen=True):
    """Keep trying to open a link until ``LinkUp`` or ``StopDialling``."""

    address: Address


class StopDialling(msgspec.Struct, frozen=True):
    """Nobody needs that link any more."""

    address: Address


class CloseLink(msgspec.Struct, frozen=True):
    """End a link; ``LinkDown`` follows."""

    link: int
    reason: str


class DropCarrier(msgspec.Struct, frozen=True):
    """Do not use that carrier for sending on the link any more."""

    link: int
    carrier: str
    reason: str


class PrepareSlot(msgspec.Struct, frozen=True):
    """Wipe the slot's seal and make room for ``nbytes``."""

    key: StreamKey
    slot: SlotName
    nbytes: int


class ReceiveChunk(msgspec.Struct, frozen=True):
    """Receive a chunk into the slot at ``offset`` and hash it. ``slot`` None: discard it."""

    key: StreamKey
    part: Part
    slot: SlotName | None
    offset: int
    nbytes: int
    hash: bytes
    carrier: str
    ticket: bytes


class SealSlot(msgspec.Struct, frozen=True):
    """Seal the slot; everything ``present`` is in it, its own part included."""

    key: StreamKey
    slot: SlotName
    manifest: Manifest
    present: tuple[int, ...]


class ReadCopy(msgspec.Struct, frozen=True):
    """Find a copy, or a replica, and read its seal and manifest."""

    key: StreamKey
    replica: bool
    rank: int
    step: int


class SendChunk(msgspec.Struct, frozen=True):
    """Send a chunk of the slot. ``check``: hash it first, and do not send it if it is wrong."""

    key: StreamKey
    part: Part
    slot: SlotName
    offset: int
    nbytes: int
    hash: bytes
    check: bool


class WipeCopy(msgspec.Struct, frozen=True):
    """The copy in the slot is damaged: wipe its seal, if the slot still holds that step."""

    slot: SlotName


class WatchFence(msgspec.Struct, frozen=True):
    """Send ``FenceOverdue`` in a short while: writing may hang on a peer that is gone."""

    epoch: int


class TellAgent(msgspec.Struct, frozen=True):
    """Say something to the agent."""

    message: wire.Fenced


Action = (
    TellRank
    | DropClient
    | TellLink
    | Dial
    | StopDialling
    | CloseLink
    | DropCarrier
    | PrepareSlot
    | ReceiveChunk
    | SealSlot
    | ReadCopy
    | SendChunk
    | WipeCopy
    | WatchFence
    | TellAgent
)
