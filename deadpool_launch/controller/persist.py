"""State, events and mail as bytes, and back. Pure; the file that they are kept in is written by
``statelog.py``.

What is kept at one time (``Kept``) and the events since then are all that a launcher knows; see
``takeover.py`` for how another one makes use of it.
"""

from __future__ import annotations

import re
from typing import Any, get_args

import msgspec

from deadpool_launch.controller.events import Event, Finish
from deadpool_launch.controller.mail import Mailbox
from deadpool_launch.controller.node import Node
from deadpool_launch.controller.rank import Rank
from deadpool_launch.controller.states import State
from deadpool_launch.controller.tables import NodeTable, RankTable


class NotReadable(Exception):
    """What is kept cannot be understood; the text says why, as the end of a sentence."""


class Kept(msgspec.Struct, frozen=True):
    """All that a launcher knows of its job between two events."""

    #: Which incarnation of the launcher; the first is 1.
    term: int
    #: When it was true, on the launcher's clock.
    at: float
    state: State
    #: By node, for every agent that was ordered and not fenced off.
    mail: dict[str, Mailbox]
    #: What the back end needs to find each agent again, by node.
    handles: dict[str, dict[str, Any]]
    #: Process id of each rank, on its node.
    pids: dict[int, int]
    finish: Finish | None = None


class Logged(msgspec.Struct, frozen=True):
    """An event as it is kept. ``number``: that of the agent's report it came with; 0 if none."""

    name: str
    number: int
    event: msgspec.Raw


class Started(msgspec.Struct, frozen=True):
    """What the back end needs to find an agent again that it started on ``node``."""

    node: str
    handle: dict[str, Any]


def _encode_other(value: Any) -> Any:
    match value:
        case re.Pattern():
            return [value.pattern, value.flags]
        case RankTable():
            return tuple(value)
        case NodeTable():
            return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be kept")


def _decode_other(kind: type, value: Any) -> Any:
    if kind is re.Pattern or getattr(kind, "__origin__", None) is re.Pattern:
        return re.compile(*value)
    if kind is RankTable:
        return RankTable(msgspec.convert(value, tuple[Rank, ...]))
    if kind is NodeTable:
        return NodeTable(msgspec.convert(value, dict[str, Node]))
    raise TypeError(f"{kind} cannot be kept")


#: What stands in the log behind what is kept: events with the numbers of their reports, and agents
#: that were started, in order.
Entry = tuple[Event, int] | Started

_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_kept = msgspec.msgpack.Decoder(Kept, dec_hook=_decode_other)
_logged = msgspec.msgpack.Decoder(Logged)
_started = msgspec.msgpack.Decoder(Started)
_events: dict[str, msgspec.msgpack.Decoder[Any]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind) for kind in get_args(Event)
}


def encode_kept(kept: Kept) -> bytes:
    """A launcher's knowledge as bytes."""
    return _encoder.encode(kept)


def decode_kept(data: bytes) -> Kept:
    """The opposite of ``encode_kept``."""
    kept: Kept = _decoded(_kept, data)
    return kept


def encode_event(event: Event, number: int) -> bytes:
    """An event that is about to be answered, with the number of the report it came with."""
    body = msgspec.Raw(_encoder.encode(event))
    return _encoder.encode(Logged(type(event).__name__, number, body))


def decode_event(data: bytes) -> tuple[Event, int]:
    """The opposite of ``encode_event``."""
    logged = _decoded(_logged, data)
    decoder = _events.get(logged.name)
    if decoder is None:
        raise NotReadable(f"this version knows no event {logged.name}")
    return _decoded(decoder, logged.event), logged.number


def encode_started(node: str, handle: dict[str, Any]) -> bytes:
    """That an agent was started."""
    return _encoder.encode(Started(node, handle))


def decode_started(data: bytes) -> Started:
    """The opposite of ``encode_started``."""
    started: Started = _decoded(_started, data)
    return started


def _decoded(decoder: msgspec.msgpack.Decoder[Any], data: bytes | msgspec.Raw) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise NotReadable(f"it does not fit this version ({error})") from error
