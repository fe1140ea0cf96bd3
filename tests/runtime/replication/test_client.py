"""The rank's connection: it never waits, and says again what a new replicator must know."""

from __future__ import annotations

import os
import queue
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deadpool_runtime import protocol
from deadpool_runtime.replication import client as client_module
from deadpool_runtime.replication.client import MAX_WAITING, ReplicatorClient
from deadpool_runtime.replication.manifest import Manifest
from deadpool_runtime.replication.messages import (
    Assemble,
    AssembleFailed,
    ChunksCopied,
    Confirmed,
    FromReplicator,
    RankHello,
    SetHolder,
    SnapshotBegun,
    SnapshotDropped,
    SnapshotSealed,
    ToReplicator,
)
from deadpool_runtime.replication.slotting import SLOTS
from deadpool_runtime.replication.sockets import short_path

DEADLINE_S = 120.0


class Server:
    """The replicator's end of the socket, held by the test."""

    def __init__(self, arena: Path) -> None:
        path = arena / "replicator.sock"
        path.unlink(missing_ok=True)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()
        self._server.settimeout(DEADLINE_S)
        self._frames = protocol.Frames()
        self._heard: list[ToReplicator] = []

    def accept(self) -> None:
        self.sock, _ = self._server.accept()
        self.sock.settimeout(DEADLINE_S)

    def hear(self) -> ToReplicator:
        while not self._heard:
            data = self.sock.recv(1 << 16)
            assert data
            codec = protocol.Codec(ToReplicator)
            self._heard += [codec.decode(body) for body in self._frames.feed(data)]
        return self._heard.pop(0)

    def close(self) -> None:
        self._server.close()
        if hasattr(self, "sock"):
            self.sock.close()


@pytest.fixture
def arena() -> Iterator[Path]:
    # Short: the path of a Unix socket has 108 bytes at most.
    path = Path(f"/dev/shm/deadpool-test%2D{secrets.token_hex(6)}-a-e0")
    path.mkdir()
    yield path
    (path / "replicator.sock").unlink(missing_ok=True)
    path.rmdir()


@pytest.fixture
def heard() -> queue.Queue[FromReplicator]:
    return queue.Queue()


@pytest.fixture
def client(arena: Path, heard: queue.Queue[FromReplicator]) -> Iterator[ReplicatorClient]:
    made = ReplicatorClient(arena, 3, 7, heard.put)
    yield made
    made.close()


def manifest(step: int) -> Manifest:
    return Manifest(3, step, 0, (), 0, b"")


def sealed(step: int) -> SnapshotSealed:
    return SnapshotSealed(manifest(step), step % SLOTS)


def test_without_a_replicator_nothing_waits(client: ReplicatorClient) -> None:
    assert not client.send(SetHolder(0, None))
    assert not client.send(sealed(0))


def test_what_a_new_replicator_must_know_is_repeated_in_order(
    arena: Path, client: ReplicatorClient, heard: queue.Queue[FromReplicator]
) -> None:
    client.send(SetHolder(0, None))
    client.send(SnapshotBegun(manifest(0), 0))
    client.send(ChunksCopied(0, 0, 0, [b"h"]))
    client.send(sealed(0))
    client.send(SnapshotBegun(manifest(1), 1))
    for _ in range(2):
        server = Server(arena)
        server.accept()
        said = [server.hear() for _ in range(3)]
        assert said == [RankHello(3, 7), SetHolder(0, None), sealed(0)]
        server.close()
    server = Server(arena)
    server.accept()
    client.send(sealed(1))
    assert [server.hear() for _ in range(4)][2:] == [sealed(0), sealed(1)]
    server.sock.sendall(protocol.frame(Confirmed(0, 0)) + protocol.frame(Confirmed(0, 1)))
    assert heard.get(timeout=DEADLINE_S) == Confirmed(0, 0)
    assert heard.get(timeout=DEADLINE_S) == Confirmed(0, 1)
    server.close()
    # What was confirmed need not be said again, but for the newest copy.
    server = Server(arena)
    server.accept()
    assert [server.hear() for _ in range(3)][2:] == [sealed(1)]
    server.close()


def test_copies_that_are_gone_are_not_repeated(arena: Path, client: ReplicatorClient) -> None:
    client.send(SetHolder(0, None))
    client.send(sealed(0))
    client.send(sealed(1))
    client.send(SnapshotBegun(manifest(3), 0))
    client.send(SnapshotDropped(1))
    client.send(SetHolder(1, None))
    client.send(sealed(2))
    client.send(SetHolder(1, None))
    server = Server(arena)
    server.accept()
    assert [server.hear() for _ in range(3)] == [RankHello(3, 7), SetHolder(1, None), sealed(2)]
    server.close()


def test_a_newer_epoch_forgets_the_copies_of_the_older(
    arena: Path, client: ReplicatorClient
) -> None:
    client.send(SetHolder(0, None))
    client.send(sealed(0))
    client.send(SetHolder(1, None))
    server = Server(arena)
    server.accept()
    assert [server.hear() for _ in range(2)] == [RankHello(3, 7), SetHolder(1, None)]
    client.send(SnapshotDropped(9))
    assert server.hear() == SnapshotDropped(9)
    server.close()


def test_a_replicator_that_does_not_read_is_left_and_told_what_matters_later(
    arena: Path, client: ReplicatorClient
) -> None:
    server = Server(arena)
    server.accept()
    assert server.hear() == RankHello(3, 7)
    client.send(SetHolder(0, None))
    client.send(sealed(0))
    chunks = ChunksCopied(1, 0, 0, [os.urandom(16)] * 100)
    sent = 0
    while client.send(chunks):
        sent += 1
        assert sent < 100 * MAX_WAITING
    server.accept()
    server._frames, server._heard = protocol.Frames(), []
    assert [server.hear() for _ in range(3)] == [RankHello(3, 7), SetHolder(0, None), sealed(0)]
    server.close()


def test_an_assembly_is_asked_for_again_and_fails_if_no_replicator_comes(
    arena: Path,
    client: ReplicatorClient,
    heard: queue.Queue[FromReplicator],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "ASSEMBLE_PATIENCE_S", 0.5)
    asked = Assemble(1, 4, [], 1)
    client.send(asked)
    failed = heard.get(timeout=DEADLINE_S)
    assert isinstance(failed, AssembleFailed)
    assert (failed.epoch, failed.step) == (1, 4)
    monkeypatch.setattr(client_module, "ASSEMBLE_PATIENCE_S", DEADLINE_S)
    client.send(asked)
    server = Server(arena)
    server.accept()
    assert [server.hear() for _ in range(2)] == [RankHello(3, 7), asked]
    server.sock.sendall(protocol.frame(AssembleFailed(1, 4, "no")))
    assert heard.get(timeout=DEADLINE_S) == AssembleFailed(1, 4, "no")
    server.close()
    server = Server(arena)
    server.accept()
    assert server.hear() == RankHello(3, 7)
    client.send(SnapshotDropped(9))
    assert server.hear() == SnapshotDropped(9)
    server.close()


def test_nonsense_from_the_replicator_ends_the_connection_only(
    arena: Path, client: ReplicatorClient
) -> None:
    server = Server(arena)
    server.accept()
    server.sock.sendall(b"\0\0\0\1x")
    server.accept()
    server._frames, server._heard = protocol.Frames(), []
    assert server.hear() == RankHello(3, 7)
    server.close()


def test_the_arena_may_have_a_long_name(heard: queue.Queue[FromReplicator]) -> None:
    path = Path(f"/dev/shm/deadpool-test%2D{secrets.token_hex(6)}-{'n' * 100}-e0")
    path.mkdir()
    with short_path(path / "replicator.sock") as name, socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        server.settimeout(DEADLINE_S)
        client = ReplicatorClient(path, 3, 7, heard.put)
        server.accept()[0].close()
        client.close()
    (path / "replicator.sock").unlink()
    path.rmdir()


def test_client_and_replicator_do_not_import_torch() -> None:
    code = (
        "import sys, deadpool_runtime.replication.client, deadpool_runtime.replication.replicator;"
        "sys.exit('torch' in sys.modules or 'mpi4py' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
