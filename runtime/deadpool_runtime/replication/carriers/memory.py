"""The carrier between two nodes that are one machine: the receiver reads the sender's file.

So it is in rehearsals and tests, and where a site runs several agents on one host. The sender does
nothing but say where the bytes are. Used only if both ends run under the same boot of the same
kernel and the receiver sees the very directory that the sender means.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import msgspec

from deadpool_runtime.replication.carriers.base import (
    MOVE_TIMEOUT_S,
    CarrierBroken,
    Kind,
    Range,
    Receiver,
    Sender,
)
from deadpool_runtime.replication.carriers.files import Maps

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """Which machine and which directory: path, device and inode."""

    boot: str
    arena: str
    device: int
    inode: int


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """A range of a file of the sender's arena."""

    file: str
    offset: int
    nbytes: int


class MemoryKind(Kind):
    """Links between arenas of one machine."""

    name = "memory"

    def __init__(self, arena: Path, maps: Maps) -> None:
        self._arena = arena
        self._maps = maps

    def offer(self) -> bytes | None:
        """This machine and this arena."""
        info = os.stat(self._arena)
        boot = BOOT_ID.read_text().strip()
        return msgspec.msgpack.encode(Offer(boot, str(self._arena), info.st_dev, info.st_ino))

    def _same_machine(self, theirs: bytes) -> Offer | None:
        try:
            offer = msgspec.msgpack.decode(theirs, type=Offer)
            info = os.stat(offer.arena)
        except (msgspec.MsgspecError, OSError):
            return None
        same = offer.boot == BOOT_ID.read_text().strip()
        same = same and (info.st_dev, info.st_ino) == (offer.device, offer.inode)
        return offer if same and os.access(offer.arena, os.R_OK | os.X_OK) else None

    def sender(self, theirs: bytes) -> Sender | None:
        """An end if the other arena is on this machine."""
        return MemorySender() if self._same_machine(theirs) else None

    def receiver(self, theirs: bytes) -> Receiver | None:
        """An end if the other arena is on this machine."""
        offer = self._same_machine(theirs)
        return MemoryReceiver(Path(offer.arena), self._maps) if offer else None


class MemorySender(Sender):
    """Says where the bytes are."""

    def __init__(self) -> None:
        self._closed = False

    def send(self, source: Range) -> bytes:
        """Nothing moves yet."""
        if self._closed:
            raise CarrierBroken("closed")
        return msgspec.msgpack.encode(
            Ticket(os.path.basename(source.path), source.offset, source.nbytes)
        )

    def wait_sent(self, ticket: bytes, timeout_s: float = MOVE_TIMEOUT_S) -> None:
        """The receiver does all of it."""
        if self._closed:
            raise CarrierBroken("closed")

    def close(self) -> None:
        """Tickets that were given out stay usable, which does no harm."""
        self._closed = True


class MemoryReceiver(Receiver):
    """Copies from the sender's files, which it maps, into this node's.

    Arena files never get shorter, so a mapping of them is safe to read until it is let go.
    """

    def __init__(self, arena: Path, maps: Maps) -> None:
        self._arena = arena
        self._maps = maps
        self._closed = False

    def receive(self, ticket: bytes, target: Range, timeout_s: float = MOVE_TIMEOUT_S) -> None:
        """Copy from mapping to mapping."""
        if self._closed:
            raise CarrierBroken("closed")
        try:
            source = msgspec.msgpack.decode(ticket, type=Ticket)
            if source.nbytes != target.nbytes or "/" in source.file:
                raise CarrierBroken("the ticket is not for this range")
            theirs = Range(str(self._arena / source.file), source.offset, source.nbytes)
            _copy(self._maps.view(theirs), self._maps.view(target))
        except (msgspec.MsgspecError, OSError) as error:
            raise CarrierBroken(f"the sender's memory cannot be read: {error}") from error

    def discard(self, ticket: bytes, nbytes: int, timeout_s: float = MOVE_TIMEOUT_S) -> None:
        """Nothing was moved."""

    def close(self) -> None:
        """A copy that is under way ends by itself, in the time of a memcpy."""
        self._closed = True


def _copy(source: memoryview, target: memoryview) -> None:
    """``target[:] = source``, but other threads run meanwhile."""
    if len(source):
        begin, end = (ctypes.c_char.from_buffer(view) for view in (source, target))
        ctypes.memmove(ctypes.addressof(end), ctypes.addressof(begin), len(source))
