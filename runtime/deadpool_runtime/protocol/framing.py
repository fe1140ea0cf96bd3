"""Messages as bytes, and the frames that they travel in."""

from __future__ import annotations

import struct
from typing import Any, Final

import msgspec

from deadpool_runtime.protocol.base import Message, ProtocolError

#: Largest frame accepted, in bytes. A longer announcement is an error, not an allocation.
MAX_FRAME_NBYTES: Final = 256 << 20
_LENGTH: Final = struct.Struct("!I")
_encoder = msgspec.msgpack.Encoder()


class Codec:
    """Encodes messages and decodes those of one union; unknown or malformed input raises
    ``ProtocolError``.
    """

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(union)

    def decode(self, body: bytes) -> Any:
        """The message in ``body`` (without its length prefix)."""
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProtocolError(f"not a message of this protocol: {error}") from error


def frame(message: Message) -> bytes:
    """The message as it goes on the wire: four bytes of length (big-endian), then msgpack."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_NBYTES:
        raise ProtocolError(f"message of {len(body)} bytes is over the limit of {MAX_FRAME_NBYTES}")
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a byte stream into message bodies: feed bytes as they arrive, iterate over what is
    whole.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add ``data``; return the bodies that are now complete, in order."""
        self._buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (nbytes,) = _LENGTH.unpack_from(self._buffer, start)
            if nbytes > MAX_FRAME_NBYTES:
                raise ProtocolError(f"peer announced a frame of {nbytes} bytes")
            end = start + _LENGTH.size + nbytes
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return bodies
