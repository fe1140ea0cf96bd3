"""Which nodes an agent reaches: by a replicator that answers, is silent or has moved."""

from __future__ import annotations

import asyncio
import socket

from deadpool_launch import channel
from deadpool_launch.agent.paths import unreached
from deadpool_runtime.protocol import Address

SECRET = bytes(32)


def test_only_who_does_not_answer_is_not_reached() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await channel.accept_handshake(reader, writer, SECRET)
        await reader.read()
        writer.close()

    async def try_all() -> list[str]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        with socket.socket() as silent, socket.socket() as closed:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            closed.bind(("127.0.0.1", 0))
            peers = {
                "answers": Address("127.0.0.1", server.sockets[0].getsockname()[1]),
                "is silent": Address("127.0.0.1", silent.getsockname()[1]),
                "moved": Address("127.0.0.1", closed.getsockname()[1]),
            }
            return await unreached(peers, SECRET, 0.5)

    assert asyncio.run(try_all()) == ["is silent"]
