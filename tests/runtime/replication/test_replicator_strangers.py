"""Strangers at a replicator's port: they are closed, and replicas go on."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from replicators import DEADLINE_S, World, world_in

from deadpool_runtime import protocol
from deadpool_runtime.replication import wire
from deadpool_runtime.replication.links import MOST_GUESTS
from deadpool_runtime.replication.messages import Confirmed


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Nodes, ranks and proxies of one test."""
    yield from world_in(tmp_path)


def visit(address: protocol.Address) -> socket.socket:
    return socket.create_connection((address.host, address.port), timeout=DEADLINE_S)


def rest(sock: socket.socket) -> bytes:
    """All that comes until the other end closes the connection or resets it."""
    got = b""
    try:
        while more := sock.recv(1 << 16):
            got += more
    except ConnectionError:
        pass
    return got


def test_strangers_do_not_come_between_two_replicators(world: World) -> None:
    a, b = world.node("a"), world.node("b")
    hello = protocol.frame(wire.LinkHello("a", "name", {}))
    for said in (bytes(64), b"\xff\xff\xff\xff" + bytes(60), hello + bytes(64)):
        with visit(b.address) as sock:
            sock.sendall(said)
            assert len(rest(sock)) <= protocol.NONCE_NBYTES
    silent = [visit(b.address) for _ in range(2 * MOST_GUESTS)]
    try:
        rank = world.rank(a, 0, (5000,))
        rank.protect(b)
        rank.snapshot(0)
        assert rank.hear(Confirmed) == Confirmed(0, 0)
        # The oldest made room long before their time was up.
        assert all(len(rest(sock)) <= protocol.NONCE_NBYTES for sock in silent[: MOST_GUESTS // 2])
        descriptors = list(Path(f"/proc/{b.process.pid}/fd").iterdir())
        assert len(descriptors) < MOST_GUESTS + 64
    finally:
        for sock in silent:
            sock.close()
