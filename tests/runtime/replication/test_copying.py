"""A copy has the very bytes of every kind of tensor and the right hashes, or it is dropped."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deadpool_runtime.errors import UnsupportedState
from deadpool_runtime.replication import fused
from deadpool_runtime.replication.arena import SlotFile
from deadpool_runtime.replication.copying import (
    Copier,
    CopyEvents,
    layout_segments,
    read_into,
    views_of,
)
from deadpool_runtime.replication.hashers import Hashers, hasher_threads
from deadpool_runtime.replication.manifest import (
    CHUNK_NBYTES,
    OWN,
    Manifest,
    Segment,
    chunk_hash,
    chunks_of,
)
from deadpool_runtime.replication.passes import GROUP
from deadpool_runtime.replication.streams import CopyStream, CpuStream, CudaStream

PATIENCE_S = 60.0
OWN_PART = b"own"


@dataclass(frozen=True)
class Item:
    key: str
    tensor: torch.Tensor
    ranks: tuple[int, ...] = (0,)
    on_cpu: bool = False


@dataclass
class Heard:
    """What the copier told. ``gate``: clear it to hold the copier at its next group of chunks."""

    told: queue.SimpleQueue[tuple[Any, ...]] = field(default_factory=queue.SimpleQueue)
    gate: threading.Event = field(default_factory=threading.Event)
    held: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    def events(self) -> CopyEvents:
        return CopyEvents(
            on_begun=lambda manifest: self.told.put(("begun", manifest)),
            on_chunks=self._on_chunks,
            on_sealed=lambda manifest: self.told.put(("sealed", manifest)),
            on_dropped=lambda step, reason: self.told.put(("dropped", step, reason)),
            on_note=lambda text: self.told.put(("note", text)),
        )

    def _on_chunks(self, *what: Any) -> None:
        self.told.put(("chunks", *what))
        if not self.gate.is_set():
            self.held.set()
            assert self.gate.wait(PATIENCE_S)

    def next(self, kind: str) -> tuple[Any, ...]:
        """The next word of that kind."""
        while True:
            told = self.told.get(timeout=PATIENCE_S)
            if told[0] == kind:
                return told[1:]


def modes() -> list[Any]:
    """Each way in which bytes get into a slot."""
    cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    return [
        pytest.param("library", id="library"),
        pytest.param("torch", id="torch"),
        pytest.param("threads", id="threads"),
        pytest.param("queued", id="queued"),
        pytest.param("cuda", id="cuda", marks=cuda),
    ]


@dataclass
class Bench:
    """A copier, its slots and what it tells."""

    folder: Path
    mode: str
    heard: Heard
    copier: Copier
    slots: dict[int, SlotFile] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return "cuda" if self.mode == "cuda" else "cpu"

    def slot(self, step: int) -> SlotFile:
        if step % 3 not in self.slots:
            self.slots[step % 3] = SlotFile.open(self.folder / f"own-0-{step % 3}", create=True)
        return self.slots[step % 3]

    def copy(self, items: Sequence[Item], step: int = 1) -> Manifest:
        """Copy and seal, and check what is always so."""
        segments, tensors = layout_segments(items)
        self.copier.begin(step, 5, segments, tensors, self.slot(step))
        assert self.copier.wait_copied(step, PATIENCE_S)
        self.copier.finish(step, OWN_PART)
        begun: Manifest
        (begun,) = self.heard.next("begun")
        assert (begun.rank, begun.step, begun.epoch) == (0, step, 5)
        assert begun.segments == segments
        hashes: list[list[bytes]] = [[] for _ in segments]
        for _ in range(sum(-(-chunks_of(each.nbytes) // GROUP) for each in segments)):
            at_step, index, first, group = self.heard.next("chunks")
            assert at_step == step
            assert first == len(hashes[index])
            hashes[index] += group
        manifest: Manifest
        (manifest,) = self.heard.next("sealed")
        assert [list(each.hashes) for each in manifest.segments] == hashes
        with SlotFile.open(self.slot(step).path) as other:
            assert other.read() == (manifest, (OWN, *range(len(segments))))
            assert other.verify(manifest, (*range(len(segments)), OWN)) == []
            assert other.own_bytes() == OWN_PART
        assert self.copier.wait_idle(PATIENCE_S)
        return manifest


@pytest.fixture(params=modes())
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    heard = Heard()
    library, reason = fused.load()
    assert library is not None, reason
    copier = Copier(
        0,
        heard.events(),
        None if request.param == "torch" else library,
        stream=CpuStream() if request.param == "queued" else None,
        threads=3 if request.param == "threads" else 1,
    )
    yield Bench(tmp_path, request.param, heard, copier)
    heard.gate.set()
    assert copier.close(PATIENCE_S)


def kinds(device: str) -> dict[str, torch.Tensor]:
    """Every kind of tensor that a state may have."""
    generator = torch.Generator().manual_seed(1)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    base = some(50, 40)
    found = {
        "plain": some(33, 5),
        "several chunks": some(3 * (CHUNK_NBYTES // 4) + 1000),
        "0-dim": some(),
        "empty": some(0, 4),
        "one byte": torch.tensor([7], dtype=torch.uint8, device=device),
        "bool": some(77) > 0,
        "bf16": some(19).bfloat16(),
        "half": some(19).half(),
        "double": some(19).double(),
        "fp8 e4m3": some(1001).to(torch.float8_e4m3fn),
        "fp8 e5m2": some(1001).to(torch.float8_e5m2),
        "int64": torch.arange(9, device=device),
        "complex": torch.complex(some(9), some(9)),
        "conj": torch.complex(some(9), some(9)).conj(),
        "neg": torch.complex(some(9), some(9)).conj().imag,
        "transposed": base.t(),
        "strided": base[::3, 1::2],
        "large transposed": some(1500, 2000).t(),
        "channels last": some(2, 3, 8, 8).to(memory_format=torch.channels_last),
        "view": base[7],
        "shared": base,
        "expanded": some(6, 1, 2).expand(6, 50, 2),
        "expanded 0-dim": some().expand(4, 4),
        "parameter": nn.Parameter(some(12, 12)),
    }
    with torch.inference_mode():
        found["inference"] = torch.ones(21, device=device) * 3
    return found


def of(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in logical order."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.clone().view(-1).view(torch.uint8).numpy().tobytes()


def test_every_kind_of_tensor_is_copied_and_brought_back(bench: Bench) -> None:
    live = kinds(bench.device)
    items = [
        Item(key, each, (0,) if i % 2 else (0, 1)) for i, (key, each) in enumerate(live.items())
    ]
    before = {key: of(each) for key, each in live.items()}
    manifest = bench.copy(items)
    segments, tensors = layout_segments(items)
    for index, segment in enumerate(segments):
        memory = bench.slot(1).segment_view(index)
        for entry in segment.entries:
            stored = bytes(memory[entry.offset : entry.offset + entry.nbytes])
            assert stored == before[entry.key], entry.key
            assert live[entry.key].shape == entry.shape
    with torch.inference_mode():
        live["inference"].zero_()
    with torch.no_grad():
        for key, each in live.items():
            if key == "expanded 0-dim":
                each[:1, :1].zero_()
            elif key == "expanded":
                each[:, :1].zero_()
            elif key != "inference":
                each.copy_(torch.zeros((), device=each.device).to(each.dtype).expand(each.shape))
    assert of(live["large transposed"]) != before["large transposed"]
    read_into(bench.slot(1), manifest.segments, tensors)
    assert {key: of(each) for key, each in live.items()} == before


def test_padding_is_zero_whatever_the_slot_held(bench: Bench) -> None:
    items = [Item(str(i), torch.ones(i, dtype=torch.uint8, device=bench.device)) for i in range(70)]
    first = bench.copy(items)
    bench.slot(1).segment_view(0)[:] = b"x" * first.segments[0].nbytes
    second = bench.copy(items)
    assert first.segments[0].digest() == second.segments[0].digest()
    memory = bytes(bench.slot(1).segment_view(0))
    assert sum(memory) == sum(range(70))


def test_all_ways_give_the_same_digest(tmp_path: Path) -> None:
    library, _ = fused.load()
    streams: tuple[CopyStream | None, ...] = (None, CpuStream())
    ways = [(each, to, n) for each in (library, None) for to in streams for n in (1, 2, 5)]
    digests = set()
    for number, (each, stream, threads) in enumerate(ways):
        heard = Heard()
        copier = Copier(0, heard.events(), each, stream=stream, threads=threads)
        folder = tmp_path / str(number)
        folder.mkdir()
        bench = Bench(folder, "", heard, copier)
        manifest = bench.copy([Item(key, tensor) for key, tensor in kinds("cpu").items()])
        digests.add(manifest.segments[0].digest())
        copier.close()
    assert len(digests) == 1


def test_groups_are_told_in_order_and_nothing_is_under_way_afterwards() -> None:
    """The first group takes longer than all others; after the third nobody wants more."""
    hashers, first_may_end = Hashers(3), threading.Event()
    begun, ended = [], []

    def fill(first: int, last: int) -> list[bytes]:
        begun.append(first)
        if first == 0:
            assert first_may_end.wait(PATIENCE_S)
        else:
            first_may_end.set()
        ended.append(first)
        return [bytes([chunk]) for chunk in range(first, last)]

    told = []
    with hashers.ordered(fill, ((n, n + 2) for n in range(0, 40, 2))) as filled:
        for first, hashes in filled:
            told.append((first, hashes))
            if len(told) == 3:
                break
    assert told == [(n, [bytes([n]), bytes([n + 1])]) for n in (0, 2, 4)]
    assert sorted(begun) == sorted(ended)
    assert len(begun) < 10

    def fail(first: int, last: int) -> list[bytes]:
        raise OSError(first)

    with pytest.raises(OSError, match="0"), hashers.ordered(fail, [(0, 1), (1, 2)]) as filled:
        list(filled)
    hashers.close()


@pytest.mark.parametrize(
    ("processors", "ranks", "has_device", "threads"),
    [
        (2, 1, False, 1),
        (4, 1, False, 1),
        (5, 1, False, 2),
        (64, 8, False, 4),
        (64, 16, False, 1),
        (2, 8, True, 1),
        (4, 1, True, 2),
        (208, 8, True, 4),
    ],
)
def test_threads_hash_where_processors_are_to_spare(
    processors: int, ranks: int, has_device: bool, threads: int
) -> None:
    assert hasher_threads(processors, ranks, has_device) == threads


def test_many_small_tensors(bench: Bench) -> None:
    many = [torch.full((i % 300,), i, device=bench.device) for i in range(5000)]
    items = [Item(f"t{i}", each) for i, each in enumerate(many)]
    bench.copy(items)
    segments, _ = layout_segments(items)
    assert all(map(torch.equal, views_of(bench.slot(1), segments, 0), [t.cpu() for t in many]))


def test_several_steps_see_replaced_moved_and_changed_tensors(bench: Bench) -> None:
    parameter = nn.Parameter(torch.zeros(300, 300, device=bench.device))
    square = torch.arange(16.0, device=bench.device).view(4, 4)
    items = [Item("p", parameter), Item("s", square)]
    segments, tensors = layout_segments(items)
    for step in range(1, 8):
        with torch.no_grad():
            parameter.add_(1)
        if step == 3:
            parameter.data = torch.full_like(parameter, 3.0)
        if step == 5:
            square.data = square.data.t()
        bench.copier.begin(step, 1, segments, tensors, bench.slot(step))
        bench.copier.finish(step, OWN_PART)
        bench.heard.next("sealed")
        stored = views_of(bench.slot(step), segments, 0)
        assert torch.equal(stored[0], torch.full((300, 300), float(step)))
        assert torch.equal(stored[1], square.cpu())


def test_memory_exchanged_while_it_is_copied_is_not_read_after_it_was_freed(bench: Bench) -> None:
    parameter = nn.Parameter(torch.ones(6 * GROUP * CHUNK_NBYTES // 4, device=bench.device))
    segments, tensors = layout_segments([Item("p", parameter)])
    bench.heard.gate.clear()
    bench.copier.begin(1, 1, segments, tensors, bench.slot(1))
    bench.copier.finish(1, OWN_PART)
    assert bench.heard.held.wait(PATIENCE_S)
    parameter.data = torch.zeros(3)
    bench.heard.gate.set()
    bench.heard.next("sealed")
    assert bool((views_of(bench.slot(1), segments, 0)[0] == 1).all())


def test_a_tensor_changed_meanwhile_drops_the_copy(bench: Bench) -> None:
    if bench.mode in ("queued", "cuda"):
        pytest.skip("the copy is made before the first chunk is told of")
    tensors = [torch.zeros(2 * GROUP * CHUNK_NBYTES // 4), torch.zeros(5)]
    segments, grouped = layout_segments([Item("a", tensors[0]), Item("b", tensors[1])])
    bench.heard.gate.clear()
    bench.copier.begin(4, 1, segments, grouped, bench.slot(4))
    bench.copier.finish(4, OWN_PART)
    assert bench.heard.held.wait(PATIENCE_S)
    assert not bench.copier.wait_copied(4, 0.01)
    tensors[1].add_(1)
    bench.heard.gate.set()
    assert bench.heard.next("dropped") == (4, "b was changed while state 4 was being copied.")
    assert bench.slot(4).read() is None
    assert bench.copier.wait_copied(4, PATIENCE_S)
    bench.copy([Item("a", tensors[0]), Item("b", tensors[1])], step=4)


def test_tensors_may_be_overwritten_once_they_are_copied(bench: Bench) -> None:
    live = torch.ones(2 * GROUP * CHUNK_NBYTES // 4, device=bench.device)
    segments, tensors = layout_segments([Item("a", live)])
    for step in range(1, 6):
        bench.copier.begin(step, 1, segments, tensors, bench.slot(step))
        assert bench.copier.wait_copied(step, PATIENCE_S)
        live.add_(1)
        bench.copier.finish(step, OWN_PART)
        assert bench.heard.next("sealed")
        stored = views_of(bench.slot(step), segments, 0)[0]
        assert bool((stored == step).all())


def test_a_copy_is_sealed_only_with_its_own_part(bench: Bench) -> None:
    live = torch.ones(5, device=bench.device)
    segments, tensors = layout_segments([Item("a", live)])
    bench.copier.begin(1, 1, segments, tensors, bench.slot(1))
    assert bench.copier.wait_copied(1, PATIENCE_S)
    assert bench.slot(1).read() is None
    bench.copier.begin(2, 1, segments, tensors, bench.slot(2))
    assert bench.heard.next("dropped") == (1, "State 1 was not completed.")
    bench.copier.finish(2, OWN_PART)
    bench.heard.next("sealed")
    assert bench.copier.wait_idle(PATIENCE_S)
    assert bench.slot(1).read() is None
    assert bench.slot(2).read() is not None


def test_an_own_part_is_made_by_the_copier_and_may_fail(bench: Bench) -> None:
    segments, tensors = layout_segments([Item("a", torch.ones(5, device=bench.device))])

    def fail() -> bytes:
        raise UnsupportedState("An extra cannot be saved.")

    for step in (1, 2, 3):
        bench.copier.begin(step, 1, segments, tensors, bench.slot(step))
        bench.copier.finish(step, fail if step == 2 else lambda: OWN_PART)
        if step == 2:
            reason = "UnsupportedState: An extra cannot be saved."
            assert bench.heard.next("dropped") == (2, reason)
        else:
            assert bench.heard.next("sealed")[0].own_nbytes == len(OWN_PART)
    assert bench.slot(2).read() is None
    assert bench.copier.can_fetch([torch.device("cpu")]) == (bench.mode in ("queued", "cuda"))


def test_one_copy_is_cancelled_and_the_one_before_it_is_sealed(bench: Bench) -> None:
    live = torch.ones(3 * GROUP * CHUNK_NBYTES // 4, device=bench.device)
    segments, tensors = layout_segments([Item("a", live)])
    bench.heard.gate.clear()
    bench.copier.begin(1, 1, segments, tensors, bench.slot(1))
    bench.copier.finish(1, OWN_PART)
    assert bench.heard.held.wait(PATIENCE_S)
    bench.copier.begin(2, 1, segments, tensors, bench.slot(2))
    bench.copier.cancel("The step was cut short.", step=2)
    bench.heard.gate.set()
    assert bench.heard.next("sealed")[0].step == 1
    assert bench.heard.next("dropped") == (2, "The step was cut short.")


def test_a_cancelled_copy_is_dropped_and_one_that_had_not_begun_leaves_its_slot(
    bench: Bench,
) -> None:
    live = torch.ones(3 * GROUP * CHUNK_NBYTES // 4, device=bench.device)
    bench.copy([Item("a", live)], step=0)
    segments, tensors = layout_segments([Item("a", live)])
    bench.heard.gate.clear()
    bench.copier.begin(2, 1, segments, tensors, bench.slot(2))
    assert bench.heard.held.wait(PATIENCE_S)
    bench.copier.finish(2, OWN_PART)
    bench.copier.begin(3, 1, segments, tensors, bench.slot(3))
    bench.copier.cancel("A peer was lost.")
    bench.heard.gate.set()
    assert bench.heard.next("dropped") == (2, "A peer was lost.")
    assert bench.heard.next("dropped") == (3, "A peer was lost.")
    assert bench.copier.wait_idle(PATIENCE_S)
    assert bench.copier.wait_copied(3, PATIENCE_S)
    assert bench.slot(2).read() is None
    found = bench.slot(3).read()
    assert found is not None
    assert found[0].step == 0


def test_a_layout_that_does_not_fit_is_dropped_with_a_reason(bench: Bench) -> None:
    segments, _ = layout_segments([Item("a", torch.zeros(5, device=bench.device))])
    other = [[torch.zeros(6, device=bench.device)]]
    bench.copier.begin(1, 1, segments, other, bench.slot(1))
    assert "a has changed its size" in bench.heard.next("dropped")[1]
    read = nn.Parameter(torch.zeros(5, 1))
    bench.copy([Item("a", torch.zeros(5, device=bench.device))], step=2)
    with pytest.raises(UnsupportedState, match="a is"):
        read_into(bench.slot(2), segments, [[read]])


def test_a_tensor_without_memory_is_dropped_with_a_reason(bench: Bench) -> None:
    live = torch.ones(5000, device=bench.device)
    bench.copy([Item("a", live)], step=1)
    segments, tensors = layout_segments([Item("a", live)])
    live.untyped_storage().resize_(0)
    bench.copier.begin(2, 1, segments, tensors, bench.slot(2))
    assert "a has no memory" in bench.heard.next("dropped")[1]


def test_a_listener_that_fails_costs_the_copy_and_nothing_else(tmp_path: Path) -> None:
    heard = Heard()
    fails = [True]

    def on_begun(manifest: Manifest) -> None:
        if fails.pop():
            raise OSError("the replicator is gone")

    events = CopyEvents(
        on_begun=on_begun,
        on_chunks=lambda *_: None,
        on_sealed=heard.events().on_sealed,
        on_dropped=heard.events().on_dropped,
        on_note=heard.events().on_note,
    )
    copier = Copier(0, events, None)
    bench = Bench(tmp_path, "torch", heard, copier)
    segments, tensors = layout_segments([Item("a", torch.zeros(5))])
    copier.begin(1, 1, segments, tensors, bench.slot(1))
    assert heard.next("dropped") == (1, "OSError: the replicator is gone")
    fails.append(False)
    copier.begin(2, 1, segments, tensors, bench.slot(2))
    copier.finish(2, OWN_PART)
    assert heard.next("sealed")
    assert copier.close()


def test_layouts_agree_and_can_be_foreseen() -> None:
    def items(rank: int, device: str) -> list[Item]:
        shapes: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = [
            ("w", (3, 3), (0, 1)),
            ("b", (100,), (0, 1)),
            ("e", (0,), (0, 1)),
        ]
        shapes.insert(rank, ("own", (7 + rank,), (rank,)))
        return [Item(key, torch.zeros(s, device=device), ranks) for key, s, ranks in shapes]

    def by_ranks(rank: int, device: str) -> dict[tuple[int, ...], Segment]:
        return {each.ranks: each for each in layout_segments(items(rank, device))[0]}

    assert by_ranks(0, "cpu")[0, 1] == by_ranks(1, "cpu")[0, 1]
    assert by_ranks(0, "meta") == by_ranks(0, "cpu")
    segment = by_ranks(0, "cpu")[0, 1]
    assert [entry.offset for entry in segment.entries] == [0, 64, 512]
    assert segment.nbytes == 512


def test_over_two_gib(tmp_path: Path) -> None:
    """In memory that need not be all there: the tensor is one page of zeros, many times."""
    nbytes = (2 << 30) + CHUNK_NBYTES + 100
    live = torch.zeros(nbytes, dtype=torch.uint8)
    live[-1] = 5
    folder = Path("/dev/shm") / f"deadpool-test-{os.getpid()}"
    folder.mkdir()
    try:
        heard = Heard()
        copier = Copier(0, heard.events(), fused.load()[0])
        with SlotFile.open(folder / "own-0-0", create=True) as slot:
            segments, tensors = layout_segments([Item("a", live)])
            copier.begin(0, 0, segments, tensors, slot)
            copier.finish(0, OWN_PART)
            (manifest,) = heard.next("sealed")
            hashes = manifest.segments[0].hashes
            assert len(hashes) == chunks_of(segments[0].nbytes) == 514
            assert set(hashes[:513]) == {chunk_hash(bytes(CHUNK_NBYTES))}
            assert slot.segment_view(0)[nbytes - 1] == 5
            assert hashes[513] == chunk_hash(slot.chunk_view(0, 513))
        copier.close()
    finally:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


@pytest.mark.parametrize("point", ["begun", "chunks", "copied"])
def test_a_rank_killed_at_any_point_leaves_a_slot_that_holds_nothing(
    tmp_path: Path, point: str
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _KILLED.format(folder=str(tmp_path), point=point)],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"there\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    with SlotFile.open(tmp_path / "own-0-0") as slot:
        assert slot.nbytes > 30 << 20
        assert slot.read() is None


_KILLED = """
import queue
import threading
from dataclasses import dataclass
from pathlib import Path
import torch
from deadpool_runtime.replication import fused
from deadpool_runtime.replication.arena import SlotFile
from deadpool_runtime.replication.copying import Copier, CopyEvents, layout_segments

@dataclass
class Item:
    key: str
    tensor: torch.Tensor
    ranks: tuple = (0,)
    on_cpu: bool = False

def stop(*_):
    if sealed:
        print("there", flush=True)
        threading.Event().wait()

sealed = []
nothing = lambda *_: None
hear = dict(begun=nothing, chunks=nothing)
hear["{point}"] = stop
told = queue.SimpleQueue()
events = CopyEvents(hear["begun"], hear["chunks"], told.put, nothing, nothing)
slot = SlotFile.open(Path("{folder}") / "own-0-0", create=True)
copier = Copier(0, events, fused.load()[0])
segments, tensors = layout_segments([Item("a", torch.ones(8 << 20))])
copier.begin(0, 0, segments, tensors, slot)
copier.finish(0, b"own")
told.get()
assert slot.read() is not None
sealed.append(True)
copier.begin(3, 0, segments, tensors, slot)
copier.wait_copied(3, 60)
stop()
"""


# ---------------------------------------------------------------- streams


STREAMS = [
    pytest.param("cpu"),
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    ),
]


@pytest.mark.parametrize("device", STREAMS)
def test_the_contract_of_a_stream(device: str) -> None:
    stream: CopyStream = CudaStream(torch.device("cuda", 0)) if device == "cuda" else CpuStream()
    live = torch.zeros(1 << 20, device=device)
    targets = [torch.empty(1 << 20) for _ in range(3)]
    for number, target in enumerate(targets, start=1):
        live.fill_(number)
        stream.start(stream.mark())
        stream.copy([target], [live])
        token = stream.token()
        assert stream.wait(token, PATIENCE_S)
        live.add_(100)
        assert stream.wait(token)
        assert bool((target == number).all())
    pinning = stream.pinning()
    memory = torch.empty(1 << 16, dtype=torch.uint8)
    pinning.register(memory.data_ptr(), len(memory))
    pinning.unregister(memory.data_ptr())
