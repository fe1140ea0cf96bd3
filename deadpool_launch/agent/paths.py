"""Whether this node reaches others: their replicators are called and have to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from deadpool_launch import channel
from deadpool_runtime import protocol


async def unreached(
    peers: Mapping[str, protocol.Address],
    secret: bytes,
    timeout_s: float,
    *,
    refused: bool = True,
) -> list[str]:
    """The names of those that do not answer in time. ``refused``: a refusal is an answer too, as it
    comes from the node, whose replicator may have moved.
    """
    answers = await asyncio.gather(
        *(_answers(at, secret, timeout_s, refused) for at in peers.values())
    )
    return [name for name, answered in zip(peers, answers, strict=True) if not answered]


async def _answers(at: protocol.Address, secret: bytes, timeout_s: float, refused: bool) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(at.host, at.port)
            try:
                await channel.connect_handshake(reader, writer, secret, timeout_s)
            finally:
                writer.transport.abort()
    except ConnectionRefusedError:
        return refused
    except (OSError, TimeoutError, protocol.ProtocolError):
        return False
    return True
