"""Copies of the training state: what goes in comes out, bit for bit and in place."""

from __future__ import annotations

import copy
import socket
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deadpool_runtime import protocol
from deadpool_runtime.encoding import decode, digest_of, encode
from deadpool_runtime.errors import CorruptState, Interrupted, Misuse, UnsupportedState
from deadpool_runtime.state import Slot, TrainingState
from deadpool_runtime.transfer import open_receiver, open_sender, receive_slot, send_slot


class Odd(nn.Module):
    """Parameters and buffers of every kind that has gone wrong somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.randn(4, 3))
        self.transposed = nn.Parameter(torch.randn(3, 5).t())
        self.scalar = nn.Parameter(torch.randn(()))
        self.brain = nn.Parameter(torch.randn(7).bfloat16())
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.twin = self.plain
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("expanded", torch.arange(3).view(1, 3).expand(4, 3))
        self.register_buffer("nothing", None)
        self.register_buffer(
            "images", torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
        )
        self.register_buffer("phase", torch.randn(2, dtype=torch.complex64))


def make(seed: int = 0, model: nn.Module | None = None, **options: Any) -> Any:
    """A model, an optimizer that stepped once, a schedule, and their state."""
    torch.manual_seed(seed)
    model = model or Odd()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3], gamma=0.5)
    return model, optimizer, scheduler, TrainingState([model], [optimizer], [scheduler], options)


def train(model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    optimizer.zero_grad()
    sum(p.float().pow(2).sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    scheduler.step()


def take(state: TrainingState, step: int) -> dict[str, Any]:
    own = state.own_part()
    state.copy(step)
    state.seal(step, encode(own, "own"))
    return own


def live(state: TrainingState) -> dict[str, torch.Tensor]:
    return {key: tensor.detach().clone() for key, tensor in state.tensors.everything().items()}


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert list(left) == list(right)
    for key, value in left.items():
        assert value.dtype == right[key].dtype
        assert torch.equal(value, right[key]), key


def test_restoring_brings_everything_back_into_the_same_storage() -> None:
    model, optimizer, scheduler, state = make()
    train(model, optimizer, scheduler)
    take(state, 1)
    before, digest, parts = live(state), state.replicated_digest(), state.part_digests()
    hyper = copy.deepcopy(optimizer.param_groups[0]["lr"]), scheduler.last_epoch
    addresses = {key: t.data_ptr() for key, t in state.tensors.everything().items()}
    for step in (2, 3):
        train(model, optimizer, scheduler)
        model.count.add_(1)
        take(state, step)
    assert state.replicated_digest() != digest
    assert state.sealed() == [1, 2, 3]
    state.restore(1, decode(state.slot_of(1).own))
    assert_equal(live(state), before)
    assert (state.replicated_digest(), state.part_digests()) == (digest, parts)
    assert (optimizer.param_groups[0]["lr"], scheduler.last_epoch) == hyper
    assert addresses == {key: t.data_ptr() for key, t in state.tensors.everything().items()}
    assert model.twin is model.plain


def test_training_from_a_restored_state_goes_as_it_went() -> None:
    model, optimizer, scheduler, state = make()
    take(state, 0)
    for _ in range(4):
        train(model, optimizer, scheduler)
    expected = live(state)
    state.restore(0, decode(state.slot_of(0).own))
    assert not optimizer.state
    for _ in range(4):
        train(model, optimizer, scheduler)
    assert_equal(live(state), expected)


def test_a_slot_counts_only_when_sealed() -> None:
    *_, state = make()
    for step in range(4):
        take(state, step)
    state.copy(4)
    assert state.sealed() == [2, 3]
    with pytest.raises(Misuse, match="not 4"):
        state.slot_of(4)


def test_slots_keep_their_storage() -> None:
    *_, state = make()
    take(state, 0)
    pointers = {key: t.data_ptr() for key, t in state.slot_of(0).tensors.items()}
    take(state, 3)
    assert pointers == {key: t.data_ptr() for key, t in state.slot_of(3).tensors.items()}


def test_whether_a_gradient_is_none_or_zero_is_kept() -> None:
    model, optimizer, scheduler, state = make()
    train(model, optimizer, scheduler)
    model.plain.grad = None
    take(state, 1)
    model.plain.grad = torch.ones_like(model.plain)
    state.restore(1, state.own_part())
    assert model.plain.grad is None
    assert torch.equal(model.scalar.grad, torch.tensor(0.0))


def test_optimizer_state_that_is_no_tensor_comes_back() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0)
    state = TrainingState([model], [optimizer], [], {})
    optimizer.state[model.weight]["momentum_buffer"] = None
    optimizer.state[model.weight]["history"] = [torch.ones(2), 3]
    take(state, 0)
    optimizer.state[model.weight]["history"][0].add_(1)
    optimizer.state[model.weight]["momentum_buffer"] = torch.ones(1, 2)
    state.restore(0, state.own_part())
    assert optimizer.state[model.weight]["momentum_buffer"] is None
    assert torch.equal(optimizer.state[model.weight]["history"][0], torch.ones(2))


def test_extras_are_saved_with_the_rank_and_modules_with_the_model() -> None:
    scaler = torch.amp.GradScaler("cpu")
    averaged = nn.Linear(2, 2)
    *_, state = make(scaler=scaler, averaged=averaged)
    own = take(state, 0)
    saved = averaged.weight.detach().clone()
    scaler.load_state_dict(scaler.state_dict() | {"scale": 4.0})
    nn.init.zeros_(averaged.weight)
    state.restore(0, own)
    assert scaler.get_scale() == 65536.0
    assert torch.equal(averaged.weight, saved)


class Pipe:
    """Both ends of a transfer, one after the other; can flip a bit on the way."""

    def __init__(self) -> None:
        self.data = bytearray()

    def send(self, data: memoryview) -> None:
        self.data += data

    def receive_into(self, room: memoryview) -> None:
        room[:] = self.data[: len(room)]
        del self.data[: len(room)]

    def send_sized(self, data: bytes) -> None:
        self.data += len(data).to_bytes(8, "big") + data

    def receive_sized(self) -> bytes:
        nbytes = int.from_bytes(self.data[:8], "big")
        data = bytes(self.data[8 : 8 + nbytes])
        del self.data[: 8 + nbytes]
        return data


@pytest.mark.parametrize("chunk_nbytes", [7, 64, 1 << 20])
def test_a_new_process_gets_the_state_of_its_peer(
    chunk_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deadpool_runtime.transfer.CHUNK_NBYTES", chunk_nbytes)
    donor_model, donor_optimizer, donor_scheduler, donor = make()
    train(donor_model, donor_optimizer, donor_scheduler)
    own = take(donor, 1)
    model, optimizer, scheduler, state = make(seed=5)
    pipe: Any = Pipe()
    send_slot(pipe, donor.slot_of(1), set())
    assert receive_slot(pipe, state.slot_for(1)) == 1
    state.seal(1, encode(own, "own"))
    state.restore(1, decode(state.slot_of(1).own))
    assert_equal(live(state), live(donor))
    assert state.part_digests() == donor.part_digests()
    assert optimizer.state[model.plain]["step"].item() == 1
    train(model, optimizer, scheduler)
    train(donor_model, donor_optimizer, donor_scheduler)
    assert state.replicated_digest() == donor.replicated_digest()


def test_a_flipped_bit_on_the_way_is_noticed() -> None:
    *_, donor = make()
    take(donor, 1)
    pipe: Any = Pipe()
    send_slot(pipe, donor.slot_of(1), set())
    # The last tensors lie just before the hash (a length and 32 digits).
    pipe.data[-8 - 32 - 3] ^= 1
    with pytest.raises(CorruptState, match="different hash"):
        receive_slot(pipe, Slot())


def test_a_peer_with_another_model_is_refused() -> None:
    *_, donor = make()
    own = take(donor, 1)
    *_, state = make(model=nn.Linear(2, 2))
    pipe: Any = Pipe()
    send_slot(pipe, donor.slot_of(1), set())
    receive_slot(pipe, state.slot_for(1))
    state.seal(1, b"")
    with pytest.raises(Misuse, match="b/0/count"):
        state.restore(1, own)


def test_a_transfer_over_sockets_needs_the_token_and_ends_when_void() -> None:
    store = dist.HashStore()
    address = protocol.Address("127.0.0.1", 1)
    received: list[bytes] = []

    def receive() -> None:
        while not store.check(["key"]):
            time.sleep(0.001)
        port = int(store.get("key").decode(errors="replace").split()[-1])
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(bytes(32))
            assert stranger.recv(1) == b""
        stream = open_receiver(store, "key", lambda: False)
        received.append(stream.receive_sized())
        stream.close()

    thread = threading.Thread(target=receive)
    thread.start()
    sender = open_sender(store, address, "key", lambda: False)
    sender.send_sized(b"x" * 5_000_000)
    thread.join()
    sender.close()
    assert received == [b"x" * 5_000_000]
    with pytest.raises(Interrupted):
        open_sender(store, address, "other", lambda: True)


class Odder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"inner": [1, self.value]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


@pytest.mark.parametrize("value", [object(), frozenset([1]), lambda: None])
def test_what_cannot_come_back_is_refused_by_name(value: Any) -> None:
    with pytest.raises(UnsupportedState, match="'odd'"):
        make(odd=Odder(value))


def test_sparse_parameters_are_refused() -> None:
    model = nn.Module()
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    with pytest.raises(UnsupportedState, match=r"b/0/1\.sparse"):
        make(model=nn.Sequential(nn.Linear(1, 1), model))


def test_equal_values_have_equal_digests_however_they_were_built() -> None:
    text = "".join(["a", "b"])
    left = {"x": [text, text], "y": (1, 2.0, None, True)}
    right = decode(encode({"y": (1, 2.0, None, True), "x": ["ab", text]}, "value"))
    assert digest_of(left, "left") == digest_of(right, "right")
    assert digest_of([1, 23], "left") != digest_of([12, 3], "right")
    assert digest_of(1, "left") != digest_of(True, "right")
    assert digest_of(float("nan"), "left") == digest_of(float("nan"), "right")
