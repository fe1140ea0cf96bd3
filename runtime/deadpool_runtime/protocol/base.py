"""What all messages have in common."""

from __future__ import annotations

from typing import Final

import msgspec

#: Grows when messages change in a way that an older peer would misread.
PROTOCOL_VERSION: Final = 5


class ProtocolError(Exception):
    """The peer sent something that is not a message of this protocol, or failed to prove the
    secret.
    """


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages; the class name is the tag on the wire."""


class Address(msgspec.Struct, frozen=True):
    """Where a TCP server listens."""

    host: str
    port: int
