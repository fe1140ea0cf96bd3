"""A slot's present mapping is page-locked, and training goes on where that fails."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from deadpool_runtime.replication.arena import SlotFile
from deadpool_runtime.replication.captures import RELAXED, Beside
from deadpool_runtime.replication.copying import Copier, CopyEvents
from deadpool_runtime.replication.layout import layout_segments
from deadpool_runtime.replication.manifest import OWN, Manifest
from deadpool_runtime.replication.pinning import (
    CudaPinning,
    NoPinning,
    PinnedSlots,
    Pinning,
    PinningFailed,
)
from deadpool_runtime.replication.slots import room_for
from deadpool_runtime.replication.streams import CpuStream

_libc = ctypes.CDLL(None, use_errno=True)


class LockedPages:
    """A real page-locking that needs no GPU: ``mlock``. Keeps count of what is locked."""

    def __init__(self, limit_nbytes: int = 1 << 40) -> None:
        self.locked: dict[int, int] = {}
        self._limit = limit_nbytes

    def register(self, address: int, nbytes: int) -> None:
        if sum(self.locked.values()) + nbytes > self._limit:
            raise PinningFailed("No more pages may be locked.")
        if _libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)) != 0:
            raise PinningFailed(os.strerror(ctypes.get_errno()))
        self.locked[address] = nbytes

    def unregister(self, address: int) -> None:
        nbytes = self.locked.pop(address)
        # Fails with ENOMEM if the memory is not mapped any more.
        assert _libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)) == 0


@dataclass(frozen=True)
class Item:
    key: str
    tensor: torch.Tensor
    ranks: tuple[int, ...] = (0,)
    on_cpu: bool = False


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[SlotFile]:
    with SlotFile.open(tmp_path / "own-0-0", create=True) as slot:
        slot.ensure(100_000)
        yield slot


def test_the_present_mapping_is_locked_and_the_older_one_let_go(slot: SlotFile) -> None:
    pages, notes = LockedPages(), list[str]()
    pinned = PinnedSlots(pages, notes.append)
    assert pinned.hold(slot)
    assert pinned.hold(slot)
    assert pages.locked == {slot.address: slot.nbytes}
    slot.ensure(1_000_000)
    assert pinned.hold(slot)
    assert pages.locked == {slot.address: slot.nbytes}
    slot.close()
    pinned.release()
    assert pages.locked == {}
    assert notes == []


def test_a_slot_that_cannot_be_locked_is_noted_once(slot: SlotFile, tmp_path: Path) -> None:
    notes: list[str] = []
    pages = LockedPages(limit_nbytes=slot.nbytes)
    pinned = PinnedSlots(pages, notes.append)
    with SlotFile.open(tmp_path / "own-0-1", create=True) as other:
        other.ensure(slot.nbytes)
        assert pinned.hold(slot)
        assert not pinned.hold(other)
        assert not pinned.hold(other)
        slot.ensure(10 * slot.nbytes)
        assert not pinned.hold(slot)
    assert notes == ["No more pages may be locked."]
    assert pages.locked == {}


def pinnings() -> list[object]:
    cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    return [
        NoPinning(),
        LockedPages(),
        pytest.param(CudaPinning(torch.device("cuda", 0)), marks=cuda),
    ]


@pytest.mark.parametrize("pinning", pinnings(), ids=lambda each: type(each).__name__)
def test_the_contract_of_a_pinning(pinning: Pinning, slot: SlotFile) -> None:
    for _ in range(3):
        pinning.register(slot.address, slot.nbytes)
        slot.view(0, 5)[:] = b"abcde"
        pinning.unregister(slot.address)
        assert bytes(slot.view(0, 5)) == b"abcde"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_cuda_refuses_is_one_sentence(slot: SlotFile) -> None:
    pinning = CudaPinning(torch.device("cuda", 0))
    pinning.register(slot.address, slot.nbytes)
    with pytest.raises(PinningFailed, match="page-lock"):
        pinning.register(slot.address, slot.nbytes)
    pinning.unregister(slot.address)
    assert torch.zeros(3, device="cuda").sum().item() == 0


# ---------------------------------------------------------------- before the first step


class LockingStream(CpuStream):
    """Copies from CPU memory as if it were a device's, into locked pages."""

    def __init__(self) -> None:
        self.pages = LockedPages()
        self.beside: list[int] = []
        self._beside = Beside(self._exchange)

    def _exchange(self, mode: int) -> int:
        self.beside.append(threading.get_ident())
        return 0

    def pinning(self) -> Pinning:
        return self.pages

    def beside_captures(self) -> Beside:
        return self._beside


def test_with_room_made_before_the_first_step_nothing_is_locked_in_any(tmp_path: Path) -> None:
    """The state of the optimizer, which the first step makes, has its room already."""
    sealed: queue.SimpleQueue[Manifest] = queue.SimpleQueue()
    ignore = CopyEvents(*[lambda *_: None] * 5)
    stream = LockingStream()
    copier = Copier(0, replace(ignore, on_sealed=sealed.put), None, stream)
    slots = [SlotFile.open(tmp_path / f"own-0-{number}", create=True) for number in range(3)]
    for step in range(7):
        tensors = [torch.full((300_000,), float(step)) for _ in range(3 if step else 1)]
        segments, grouped = layout_segments(Item(str(i), t) for i, t in enumerate(tensors))
        copier.begin(step, 1, segments, grouped, slots[step % 3])
        copier.finish(step, b"own" * 9000 * (1 + step))
        manifest = sealed.get(timeout=60)
        if step == 0:
            before = slots[0].verify(manifest, (0, OWN))
            copier.make_room(slots, room_for(segments, (0,), 1 << 18) + 2_400_000, 60)
            locked = dict(stream.pages.locked)
            assert sorted(locked) == sorted(slot.address for slot in slots)
            assert slots[0].verify(manifest, (0, OWN)) == before == []
        assert stream.pages.locked == locked
    assert copier.close()
    assert stream.pages.locked == {}
    # Each of them is in the copier's thread.
    assert len(set(stream.beside)) == 1
    assert threading.get_ident() not in stream.beside


def test_a_thread_has_its_own_mode_again_afterwards() -> None:
    mode = threading.local()

    def exchange(new: int) -> int:
        before = getattr(mode, "value", 0)
        mode.value = new
        return before

    beside, seen = Beside(exchange), []
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        mode.value = 1
        with beside:
            inside.set()
            assert done.wait(60)
        seen.append(mode.value)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(60)
    with beside, beside:
        assert mode.value == RELAXED
    assert mode.value == 0
    done.set()
    thread.join(60)
    assert seen == [1]
