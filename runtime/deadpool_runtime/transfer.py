"""Sending the replicated part of a state from a rank that has it to one that has not.

The sender listens on a port of its own and leaves address and token in the plan's store; the
receiver connects and shows the token. The manifest goes first (names, types, shapes), then the
plain values and all tensors as one stream of bytes, then the hash, which the receiver compares
with its own. Nothing in it can run code in the receiver.

A socket and not a process group of two: torch cannot be interrupted while it waits for a peer that
has announced itself and died, and here both ends look for a newer epoch ten times a second.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from deadpool_runtime.encoding import Digest, decode, encode, tensor_bytes
from deadpool_runtime.errors import CorruptState, Interrupted
from deadpool_runtime.protocol import Address
from deadpool_runtime.state import Slot

CHUNK_NBYTES = 4 << 20
#: Longest time without a single byte from the peer, seconds.
SILENCE_S = 60.0
_POLL_S = 0.1
_TOKEN_NBYTES = 32


class Entry(msgspec.Struct, frozen=True):
    """One tensor. ``on_cpu``: it lies on the CPU whatever its parameter's device."""

    key: str
    dtype: str
    shape: list[int]
    on_cpu: bool


class Manifest(msgspec.Struct, frozen=True):
    """What the stream of bytes holds, in this order, after ``meta_nbytes`` of plain values."""

    step: int
    meta_nbytes: int
    entries: list[Entry]


class Stream:
    """One connected socket that carries bytes of known length, or of announced length.

    ``void``: asked ten times a second while waiting; when it is true the wait ends in
    ``Interrupted``.
    """

    def __init__(self, sock: socket.socket, void: Callable[[], bool]) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._void = void

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def send(self, data: memoryview) -> None:
        """Send all of ``data``."""
        while data:
            _await(self._sock, self._void, writing=True)
            data = data[self._sock.send(data) :]

    def receive_into(self, room: memoryview) -> None:
        """Receive as many bytes as ``room`` has."""
        while room:
            _await(self._sock, self._void)
            nbytes = self._sock.recv_into(room)
            if nbytes == 0:
                raise ConnectionError("The peer of a state transfer closed the connection.")
            room = room[nbytes:]

    def receive(self, nbytes: int) -> bytes:
        """Receive ``nbytes`` bytes."""
        data = bytearray(nbytes)
        self.receive_into(memoryview(data))
        return bytes(data)

    def send_sized(self, data: bytes) -> None:
        """Send the length of ``data``, then ``data``."""
        self.send(memoryview(len(data).to_bytes(8, "big") + data))

    def receive_sized(self) -> bytes:
        """Receive what ``send_sized`` sent."""
        return self.receive(int.from_bytes(self.receive(8), "big"))


def open_sender(
    store: dist.Store, store_address: Address, key: str, void: Callable[[], bool]
) -> Stream:
    """Wait for the receiver to connect to this rank; ``key`` names the transfer."""
    token = secrets.token_bytes(_TOKEN_NBYTES)
    family, host = _own_host(store_address)
    with socket.create_server((host, 0), family=family) as server:
        store.set(key, f"{token.hex()} {host} {server.getsockname()[1]}")
        while True:
            _await(server, void)
            stream = Stream(server.accept()[0], void)
            if hmac.compare_digest(stream.receive(_TOKEN_NBYTES), token):
                return stream
            stream.close()


def open_receiver(store: dist.Store, key: str, void: Callable[[], bool]) -> Stream:
    """Connect to the rank that waits in ``open_sender`` under the same ``key``."""
    store.wait([key], timedelta(seconds=SILENCE_S))
    token, host, port = store.get(key).decode().split()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    stream = Stream(sock, void)
    sock.connect_ex((host, int(port)))
    _await(sock, void, writing=True)
    stream.send(memoryview(bytes.fromhex(token)))
    return stream


def _own_host(towards: Address) -> tuple[socket.AddressFamily, str]:
    """The address of this node as seen from another: every rank can reach the store's host, so
    the interface used towards that host is one the ranks can reach."""
    family, kind, _, _, address = socket.getaddrinfo(
        towards.host, towards.port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing: it only chooses a route
        return family, str(probe.getsockname()[0])


def _await(sock: socket.socket, void: Callable[[], bool], *, writing: bool = False) -> None:
    deadline = time.monotonic() + SILENCE_S
    poll = select.poll()
    poll.register(sock, select.POLLOUT if writing else select.POLLIN)
    while True:
        if void():
            raise Interrupted("A peer was lost during a state transfer.")
        if poll.poll(_POLL_S * 1000):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"The peer of a state transfer was silent for {SILENCE_S:g} s.")


def send_slot(stream: Stream, slot: Slot, on_cpu: set[str]) -> None:
    """Send the replicated part of ``slot``."""
    assert slot.step is not None
    meta = encode(slot.meta, "the optimizer's state")
    entries = [
        Entry(key, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), key in on_cpu)
        for key, tensor in slot.tensors.items()
    ]
    stream.send_sized(msgspec.msgpack.encode(Manifest(slot.step, len(meta), entries)))
    for chunk in _chunks(meta, slot):
        stream.send(chunk.numpy().data)
    stream.send_sized(_digest(meta, slot).encode())


def receive_slot(stream: Stream, slot: Slot) -> int:
    """Fill ``slot`` with what the peer sends; returns the step, which the caller must check.

    Raises ``CorruptState`` when the hash does not fit; the slot is then not to be used.
    """
    manifest = msgspec.msgpack.decode(stream.receive_sized(), type=Manifest)
    slot.tensors = {
        entry.key: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for entry in manifest.entries
    }
    meta = torch.empty(manifest.meta_nbytes, dtype=torch.uint8)
    targets = [meta, *(tensor.view(-1).view(torch.uint8) for tensor in slot.tensors.values())]
    for target in targets:
        stream.receive_into(target.numpy().data)
    encoded = meta.numpy().tobytes()
    if stream.receive_sized().decode() != _digest(encoded, slot):
        raise CorruptState(f"The state of step {manifest.step} arrived with a different hash.")
    slot.meta = decode(encoded)
    slot.meta["on_cpu"] = {entry.key for entry in manifest.entries if entry.on_cpu}
    return manifest.step


def _chunks(meta: bytes, slot: Slot) -> Iterator[torch.Tensor]:
    """The stream, each chunk but the last of full length; a chunk is valid until the next."""
    staging = torch.empty(CHUNK_NBYTES, dtype=torch.uint8)
    used = 0
    pieces = [torch.frombuffer(bytearray(meta), dtype=torch.uint8)]
    pieces += [tensor_bytes(tensor) for tensor in slot.tensors.values()]
    for piece in pieces:
        taken = 0
        while taken < piece.numel():
            size = min(piece.numel() - taken, CHUNK_NBYTES - used)
            staging[used : used + size].copy_(piece[taken : taken + size])
            used += size
            taken += size
            if used == CHUNK_NBYTES:
                yield staging
                used = 0
    if used:
        yield staging[:used]


def _digest(meta: bytes, slot: Slot) -> str:
    digest = Digest()
    digest.add(meta, "plain values")
    for key, tensor in slot.tensors.items():
        digest.add(key, key)
        digest.add_tensor(tensor)
    return digest.hexdigest()
