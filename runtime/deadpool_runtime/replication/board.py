"""What the parts of the core share: the links, the fence, the actions of the running turn.

Pure, as everything that ``core.py`` is made of.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from deadpool_runtime.protocol import Address
from deadpool_runtime.replication.events import (
    Action,
    CloseLink,
    Dial,
    Part,
    StopDialling,
    TellLink,
)
from deadpool_runtime.replication.manifest import CHUNK_NBYTES, OWN, Manifest, chunks_of
from deadpool_runtime.replication.wire import OnLink


@dataclass
class Link:
    """An open link. ``address``: what this end dialled; None if the other end did."""

    number: int
    node: str
    address: Address | None
    #: Numbers of the streams that this end began on it.
    streams: int = 0


@dataclass
class Board:
    """The state that several parts of the core read."""

    node: str
    #: Nothing of an older epoch is written or sent.
    fence: int = -1
    links: dict[int, Link] = field(default_factory=dict)
    dialled: dict[Address, Link] = field(default_factory=dict)
    dialling: set[Address] = field(default_factory=set)
    actions: list[Action] = field(default_factory=list)

    def do(self, action: Action) -> None:
        """Add an action to the turn."""
        self.actions.append(action)

    def tell(self, link: int, message: OnLink) -> None:
        """Say something on a link, if it is still there."""
        if link in self.links:
            self.do(TellLink(link, message))

    def keep_links(self, wanted: set[Address]) -> None:
        """Dial what is wanted, end what this end dialled and nobody needs any more."""
        for address in sorted(self.dialling - wanted, key=repr):
            self.dialling.discard(address)
            self.do(StopDialling(address))
        for address, link in list(self.dialled.items()):
            if address not in wanted:
                del self.dialled[address]
                self.do(CloseLink(link.number, "not needed any more"))
        for address in sorted(wanted - self.dialled.keys() - self.dialling, key=repr):
            self.dialling.add(address)
            self.do(Dial(address))


def part_nbytes(manifest: Manifest, part: Part) -> int:
    """Size of a chunk."""
    if part.segment == OWN:
        return manifest.own_nbytes
    whole = manifest.segments[part.segment].nbytes
    return min(CHUNK_NBYTES, whole - part.chunk * CHUNK_NBYTES)


def parts_of(manifest: Manifest, segments: Iterable[int]) -> list[Part]:
    """Every chunk of these segments, in order."""
    parts: list[Part] = []
    for index in segments:
        if index != OWN:
            count = chunks_of(manifest.segments[index].nbytes)
            parts += [Part(index, chunk) for chunk in range(count)]
        elif manifest.own_nbytes:
            parts.append(Part(OWN, 0))
    return parts


def count_parts(manifest: Manifest, segments: Iterable[int]) -> int:
    """How many chunks these segments have; ``len(parts_of(...))`` without making the list."""
    return sum(
        bool(manifest.own_nbytes) if index == OWN else chunks_of(manifest.segments[index].nbytes)
        for index in segments
    )


def hash_of(manifest: Manifest, part: Part) -> bytes:
    """The hash that the manifest has for a chunk; empty if it has none yet."""
    if part.segment == OWN:
        return manifest.own_hash
    hashes = manifest.segments[part.segment].hashes
    return hashes[part.chunk] if part.chunk < len(hashes) else b""


def fault_in(manifest: Manifest, present: tuple[int, ...], *, hashed: bool) -> str:
    """Why a manifest that came from elsewhere makes no sense; empty if it does."""
    if manifest.own_nbytes < 0 or any(segment.nbytes < 0 for segment in manifest.segments):
        return "the manifest has a negative size"
    if len(set(present)) != len(present):
        return "a part is named twice"
    for index in present:
        if index != OWN and not 0 <= index < len(manifest.segments):
            return f"the manifest has no segment {index}"
    if hashed:
        for segment in manifest.segments:
            if len(segment.hashes) != chunks_of(segment.nbytes):
                return f"the manifest lacks hashes of the segment of ranks {list(segment.ranks)}"
    return ""
