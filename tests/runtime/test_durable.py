"""The durable checkpoint: written by ranks one by one, committed, read back bit for bit."""

from __future__ import annotations

import io
import os
import pickle
import queue
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from deadpool_runtime.durable import index, loading, saving
from deadpool_runtime.durable import share as sharing
from deadpool_runtime.durable.hashing import first_wrong_chunk, sum_of
from deadpool_runtime.durable.index import CheckpointDamaged, CheckpointIncomplete
from deadpool_runtime.durable.saving import SaveFailed, Saver, Target
from deadpool_runtime.encoding import decode, encode, tensor_bytes
from deadpool_runtime.errors import Misuse
from deadpool_runtime.replication.manifest import (
    ALIGN_TENSOR_NBYTES,
    CHUNK_NBYTES,
    Entry,
    Manifest,
    Segment,
    chunk_hash,
)

# pytest puts the filters back that the module sets when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

DEADLINE_S = 60.0
Parts = Mapping[tuple[int, ...], Mapping[str, torch.Tensor]]


def segment_of(ranks: tuple[int, ...], tensors: Mapping[str, torch.Tensor]) -> Segment:
    """A segment as the arena lays it out, with its hashes."""
    data, entries = bytearray(), []
    for key, tensor in tensors.items():
        data += bytes(-len(data) % ALIGN_TENSOR_NBYTES)
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(Entry(key, dtype, tuple(tensor.shape), len(data), tensor.nbytes))
        data += tensor_bytes(tensor).numpy().tobytes()
    chunks = [bytes(data[at : at + CHUNK_NBYTES]) for at in range(0, len(data), CHUNK_NBYTES)]
    return Segment(ranks, tuple(entries), len(data), tuple(map(chunk_hash, chunks)))


class Rank:
    """The sealed state of one rank."""

    def __init__(self, rank: int, step: int, parts: Parts, own: bytes, epoch: int = 1) -> None:
        self.tensors = {key: each for tensors in parts.values() for key, each in tensors.items()}
        self.own = own
        segments = tuple(segment_of(ranks, tensors) for ranks, tensors in parts.items())
        self.manifest = Manifest(rank, step, epoch, segments, len(own), chunk_hash(own))

    def write(self, target: Target) -> saving.Written:
        return saving.write(target, self.manifest, self.tensors, self.own)


def odd_tensors() -> dict[str, torch.Tensor]:
    """Every kind of tensor whose bytes are easily lost; one of them spans several chunks."""
    bits = torch.arange(256, dtype=torch.uint8)
    return {
        "p/0/w.weight": torch.arange(3 * CHUNK_NBYTES // 4 + 5, dtype=torch.float32),
        "p/0/bf16": bits.repeat(2).view(torch.bfloat16).reshape(16, 16),
        "p/0/e4m3": bits.view(torch.float8_e4m3fn),
        "p/0/e5m2": bits.view(torch.float8_e5m2).reshape(2, 128),
        "p/0/nan": torch.tensor([0x7FC00001, -1, 0x7F800001], dtype=torch.int32).view(
            torch.float32
        ),
        "o/0/bool": torch.tensor([True, False, True]),
        "o/0/step": torch.tensor(7.0),
        "o/0/flag": torch.tensor(False),
        "o/0/empty": torch.empty(0, 4, dtype=torch.float64),
        "o/0/complex": torch.tensor([1 - 2j, 3j], dtype=torch.complex64),
        "o/0/u16": torch.tensor([65535, 1], dtype=torch.uint16),
        "o/0/view": torch.arange(20)[3:9],
    }


def ranks_at(step: int, epoch: int = 1, world_size: int = 3) -> list[Rank]:
    """Ranks of which all share one segment, the first two another, and each has one alone."""
    everyone = odd_tensors()
    pair = {"b/0/pair": torch.arange(100) + step, "b/0/more": torch.arange(9) * step}
    made = []
    for rank in range(world_size):
        alone = {"o/0/alone": torch.full((33,), rank + step / 7, dtype=torch.bfloat16)}
        parts: dict[tuple[int, ...], Mapping[str, torch.Tensor]] = {
            tuple(range(world_size)): everyone,
            (rank,): alone,
        }
        if rank < 2:
            parts[0, 1] = pair
        made.append(Rank(rank, step, parts, encode({"rank": rank, "step": step}, "own"), epoch))
    return made


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return Target(tmp_path / "checkpoints", "job-1", 3)


@pytest.fixture(params=[None, 1 << 16], ids=["whole", "split"])
def split(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are small enough to be written by one rank, or are split."""
    if request.param is not None:
        monkeypatch.setattr(sharing, "SPLIT_NBYTES", request.param)


def save(target: Target, step: int, epoch: int = 1) -> list[Rank]:
    ranks = ranks_at(step, epoch)
    for rank in reversed(ranks):
        rank.write(target)
    index.commit(target.directory, step, target.world_size)
    return ranks


def assert_same(loaded: loading.Loaded, rank: Rank) -> None:
    assert loaded.own == rank.own
    assert loaded.manifest == rank.manifest
    assert loaded.tensors.keys() == rank.tensors.keys()
    for key, tensor in rank.tensors.items():
        found = loaded.tensors[key]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(tensor_bytes(found), tensor_bytes(tensor)), key


# ---------------------------------------------------------------- who writes what


@given(
    sizes=st.lists(st.integers(0, 1 << 40), max_size=40),
    ranks=st.sets(st.integers(0, 600), min_size=1, max_size=12).map(sorted),
)
def test_every_entry_has_one_writer_and_bytes_are_balanced(
    sizes: list[int], ranks: list[int]
) -> None:
    entries = tuple(Entry(str(i), "uint8", (size,), 0, size) for i, size in enumerate(sizes))
    segment = Segment(tuple(ranks), entries, sum(sizes))
    shares = [sharing.share((segment,), rank)[0] for rank in ranks]
    assert sorted(e.key for each in shares for e in each) == sorted(e.key for e in entries)
    if sum(sizes) < 2 * sharing.SPLIT_NBYTES:
        assert shares[0] == entries
    parts = max(1, min(len(ranks), sum(sizes) // sharing.SPLIT_NBYTES))
    loads = [sum(e.nbytes for e in each) for each in shares]
    assert max(loads) <= sum(sizes) / parts + max(sizes, default=0)
    assert loads == [sharing.share_nbytes((segment,), rank, 0) for rank in ranks]


def test_eight_data_parallel_ranks_write_each_parameter_once(tmp_path: Path) -> None:
    target = Target(tmp_path, "job", 8)
    model = {"p/0/w": torch.arange(1 << 20, dtype=torch.float32), "p/0/b": torch.ones(7)}
    ranks = [Rank(rank, 0, {tuple(range(8)): model}, b"own") for rank in range(8)]
    nbytes = [rank.write(target).nbytes for rank in ranks]
    index.commit(tmp_path, 0, 8)
    once = sum(tensor.nbytes for tensor in model.values())
    assert once < sum(nbytes) < 1.05 * once
    assert_same(loading.load(tmp_path, 0, 5), ranks[5])


# ---------------------------------------------------------------- there and back


@pytest.mark.usefixtures("split")
def test_every_rank_gets_every_bit_back(target: Target) -> None:
    for rank, written in enumerate(save(target, 40)):
        assert_same(loading.load(target.directory, 40, rank), written)


@pytest.mark.usefixtures("split")
def test_a_rank_can_ask_for_some_tensors_only(target: Target) -> None:
    ranks = save(target, 40)
    keys = ["o/0/step", "b/0/more", "p/0/w.weight"]
    loaded = loading.load(target.directory, 40, 1, keys)
    assert sorted(loaded.tensors) == sorted(keys)
    assert all(torch.equal(loaded.tensors[key], ranks[1].tensors[key]) for key in keys)
    assert loaded.own == ranks[1].own


def test_a_rank_does_not_read_what_only_others_have(target: Target) -> None:
    ranks = save(target, 40)
    # Rank 0 writes, besides, what it alone has (group 0) and what only ranks 0 and 1 have.
    for name in ("group-000-0.distcp", "group-002-0.distcp"):
        (index.rank_directory(target.directory, 40, 0) / name).unlink()
    assert_same(loading.load(target.directory, 40, 2), ranks[2])


def test_stock_tools_of_torch_open_a_rank_directory(target: Target, tmp_path: Path) -> None:
    ranks = save(target, 40)
    folder = index.rank_directory(target.directory, 40, 0)
    into: dict[str, Any] = {"p/0/bf16": torch.zeros(16, 16, dtype=torch.bfloat16)}
    checkpoint.load(into, checkpoint_id=folder, no_dist=True)
    assert torch.equal(tensor_bytes(into["p/0/bf16"]), tensor_bytes(ranks[0].tensors["p/0/bf16"]))
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert whole.keys() == ranks[0].tensors.keys() | {"own"}
    for key, tensor in ranks[0].tensors.items():
        assert torch.equal(tensor_bytes(whole[key]), tensor_bytes(tensor)), key
    own = io.BytesIO(whole["own"].numpy().tobytes())
    assert torch.load(own, weights_only=True) == decode(ranks[0].own)


def test_a_checkpoint_of_another_job_is_refused_as_such(target: Target) -> None:
    save(target, 40)
    with pytest.raises(Misuse, match="is of 3 ranks, so rank 3 cannot start from it"):
        loading.load(target.directory, 40, 3)
    with pytest.raises(Misuse, match="has no tensor p/0/other"):
        loading.load(target.directory, 40, 0, ["p/0/other", "o/0/step"])


# ---------------------------------------------------------------- damage


def load_all(target: Target) -> None:
    for rank in range(target.world_size):
        loading.load(target.directory, 40, rank)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink], ids=lambda f: f.__name__)
def test_any_damage_to_any_file_is_noticed_and_named(target: Target, damage: Any) -> None:
    save(target, 40)
    step = index.step_directory(target.directory, 40)
    files = sorted(path for path in step.rglob("*") if path.is_file())
    assert len(files) == 1 + 3 * 3 + 2
    for path in files:
        before = path.read_bytes()
        damage(path)
        with pytest.raises(CheckpointDamaged, match=f"step 40 .*{path}.* older checkpoint"):
            load_all(target)
        path.write_bytes(before)
    load_all(target)


def rewritten(folder: Path, name: str, data: bytes, world_size: int) -> None:
    """Change a file of a rank and make every hash fit again."""
    (folder / name).write_bytes(data)
    old = index.unseal((folder / index.RANK_INDEX).read_bytes(), index.RankIndex)
    new = msgspec.structs.replace(old, files=old.files | {name: sum_of(data)})
    (folder / index.RANK_INDEX).write_bytes(index.seal(new))
    index.commit(folder.parent.parent, old.manifest.step, world_size)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("code-ran",)


def test_metadata_that_would_run_code_is_refused(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(target, 40)
    folder = index.rank_directory(target.directory, 40, 1)
    rewritten(folder, ".metadata", pickle.dumps(Evil()), 3)
    with pytest.raises(CheckpointDamaged, match=r"\.metadata is not what DCP writes"):
        loading.load(target.directory, 40, 1)
    assert not Path("code-ran").exists()


def test_a_part_of_another_step_is_refused_even_if_all_hashes_fit(target: Target) -> None:
    save(target, 20)
    save(target, 40)
    folder, older = (index.rank_directory(target.directory, step, 0) for step in (40, 20))
    name = "group-002-0.distcp"
    rewritten(folder, name, (older / name).read_bytes(), 3)
    with pytest.raises(CheckpointDamaged, match="other bytes for the tensors of rank 0, 1"):
        loading.load(target.directory, 40, 1)


def test_a_tensor_of_another_type_is_refused(target: Target) -> None:
    ranks = save(target, 40)
    manifest, folder = ranks[0].manifest, index.rank_directory(target.directory, 40, 0)
    retyped = tuple(
        msgspec.structs.replace(
            each,
            entries=tuple(
                msgspec.structs.replace(e, dtype="float16") if e.dtype == "bfloat16" else e
                for e in each.entries
            ),
        )
        for each in manifest.segments
    )
    for rank in range(3):
        folder = index.rank_directory(target.directory, 40, rank)
        part = index.unseal((folder / index.RANK_INDEX).read_bytes(), index.RankIndex)
        segments = (retyped[0], *part.manifest.segments[1:])
        changed = msgspec.structs.replace(
            part, manifest=msgspec.structs.replace(part.manifest, segments=segments)
        )
        (folder / index.RANK_INDEX).write_bytes(index.seal(changed))
    index.commit(target.directory, 40, 3)
    with pytest.raises(CheckpointDamaged, match="does not have p/0/bf16 as float16"):
        loading.load(target.directory, 40, 2)


def test_chunks_are_checked_as_far_as_their_bytes_are_known() -> None:
    tensors = {"a": torch.zeros(CHUNK_NBYTES + 10, dtype=torch.uint8), "b": torch.ones(3)}
    segment = segment_of((0,), tensors)
    data = {key: tensor_bytes(each).numpy().data for key, each in tensors.items()}
    assert first_wrong_chunk(segment, data) is None
    tensors["b"][1] = 5
    assert first_wrong_chunk(segment, data) == 1
    assert first_wrong_chunk(segment, {"a": data["a"]}) is None
    tensors["a"][CHUNK_NBYTES - 1] = 5
    assert first_wrong_chunk(segment, {"a": data["a"]}) == 0


# ---------------------------------------------------------------- commit, list, prune


def test_only_what_every_rank_wrote_is_committed(target: Target) -> None:
    first, second, third = ranks_at(40)
    for rank in (first, second):
        rank.write(target)
    with pytest.raises(CheckpointIncomplete, match=r"rank-00002/deadpool\.json is missing"):
        index.commit(target.directory, 40, 3)
    assert index.list_complete(target.directory) == []
    third.write(target)
    index.commit(target.directory, 40, 3)
    assert index.list_complete(target.directory) == [40]
    assert index.read_complete(target.directory, 40).job_id == "job-1"


def test_parts_that_do_not_fit_together_are_not_committed(target: Target) -> None:
    ranks_at(40, epoch=1)[0].write(target)
    for rank in ranks_at(40, epoch=2)[1:]:
        rank.write(target)
    with pytest.raises(CheckpointIncomplete, match="rank 1 was written by job job-1 in epoch 2"):
        index.commit(target.directory, 40, 3)
    other = ranks_at(40, epoch=2)[0]
    other.tensors["o/0/step"].add_(1)
    Rank(
        0,
        40,
        {
            s.ranks: {e.key: other.tensors[e.key] for e in s.entries}
            for s in other.manifest.segments
        },
        other.own,
        epoch=2,
    ).write(target)
    with pytest.raises(CheckpointIncomplete, match="ranks 0, 1, 2 do not agree"):
        index.commit(target.directory, 40, 3)
    path = index.rank_directory(target.directory, 40, 1) / "group-000-0.distcp"
    truncate(path)
    with pytest.raises(CheckpointIncomplete, match=r"size of group-000-0\.distcp, which differs"):
        index.commit(target.directory, 40, 3)


def test_writing_a_step_again_replaces_its_checkpoint_as_a_whole(target: Target) -> None:
    save(target, 40)
    again = ranks_at(40, epoch=2)
    again[0].write(target)
    assert index.list_complete(target.directory) == []
    for rank in again[1:]:
        rank.write(target)
    index.commit(target.directory, 40, 3)
    assert_same(loading.load(target.directory, 40, 1), again[1])


def test_old_checkpoints_and_leftovers_go_but_nothing_in_the_making(target: Target) -> None:
    assert index.list_complete(target.directory) == []
    assert index.prune(target.directory) == []
    ranks_at(10)[0].write(target)
    assert index.prune(target.directory) == []  # no checkpoint yet: all may be in the making
    for step in (20, 40, 60):
        save(target, step)
    ranks_at(50)[2].write(target)
    ranks_at(80)[1].write(target)
    (target.directory / "notes").mkdir()
    assert index.list_complete(target.directory) == [60, 40, 20]
    assert index.prune(target.directory, keep=2) == [10, 20, 50]
    assert sorted(os.listdir(target.directory)) == [
        "notes",
        "step-00000040",
        "step-00000060",
        "step-00000080",
    ]
    assert index.list_complete(target.directory) == [60, 40]
    with pytest.raises(ValueError, match="At least one checkpoint must be kept"):
        index.prune(target.directory, keep=0)


# ---------------------------------------------------------------- kills

KILLED_AFTER = """
import os, signal, sys

def kill_after(count, directory):
    # Kill this process just before its file operation of that number below the directory.
    def hook(event, args):
        nonlocal count
        if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.scandir"):
            # Trees are removed by names relative to a descriptor.
            relative = isinstance(args[0], int) or "/" not in str(args[0])
            if relative or str(args[0]).startswith(directory):
                count -= 1
                if count < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
"""


def run_script(body: str, *args: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(body), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_a_kill_during_commit_or_prune_leaves_the_old_or_the_new_state(
    target: Target, tmp_path: Path
) -> None:
    save(target, 20)
    save(target, 40)
    for rank in ranks_at(60):
        rank.write(target)
    script = KILLED_AFTER + textwrap.dedent("""
        import shutil
        from pathlib import Path
        from deadpool_runtime.durable import index

        assert "torch" not in sys.modules
        for count in range(200):
            directory = Path(sys.argv[2], f"{count:03d}")
            shutil.copytree(sys.argv[1], directory, copy_function=os.link)
            child = os.fork()
            if child == 0:
                kill_after(count, str(directory))
                index.commit(directory, 60, 3)
                index.prune(directory, keep=1)
                os._exit(0)
            status = os.waitpid(child, 0)[1]
            if status != signal.SIGKILL:
                sys.exit(status)
    """)
    results = tmp_path / "results"
    done = run_script(script, target.directory, results)
    assert done.returncode == 0, done.stderr
    seen = []
    for directory in sorted(results.iterdir()):
        listed = index.list_complete(directory)
        if listed not in seen:
            seen.append(listed)
        for step in listed:
            loading.load(directory, step, 2)
    assert seen == [[40, 20], [60, 40, 20], [60, 40], [60]]
    assert os.listdir(directory) == ["step-00000060"]


def test_a_kill_while_a_rank_writes_leaves_no_mixture(target: Target, tmp_path: Path) -> None:
    """Rank 1 writes step 40 again, in epoch 2, where a checkpoint of epoch 1 lies."""
    first = save(target, 40)
    script = KILLED_AFTER + textwrap.dedent("""
        import importlib.util, shutil
        from pathlib import Path
        spec = importlib.util.spec_from_file_location("test_durable", sys.argv[1])
        tests = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(tests)
        from deadpool_runtime.durable import dcp
        again = tests.ranks_at(40, epoch=2)[1]
        for count in range(100):
            directory = Path(sys.argv[3], f"{count:03d}")
            shutil.copytree(sys.argv[2], directory, copy_function=os.link)
            child = os.fork()
            if child == 0:
                kill_after(count, str(directory))
                again.write(tests.Target(directory, "job-1", 3))
                os._exit(0)
            status = os.waitpid(child, 0)[1]
            if status != signal.SIGKILL:
                sys.exit(status)
    """)
    results = tmp_path / "results"
    done = run_script(script, __file__, target.directory, results)
    assert done.returncode == 0, done.stderr
    directories = sorted(results.iterdir())
    states = [index.list_complete(directory) for directory in directories]
    assert states == sorted(states, reverse=True)
    assert states.count([40]) > 5
    assert states[-3:] == [[], [], []]
    for directory, state in zip(directories, states, strict=True):
        if state:
            assert_same(loading.load(directory, 40, 1), first[1])
    between = replace(target, directory=directories[-2])
    again = ranks_at(40, epoch=3)
    for rank in again:
        rank.write(between)
    index.commit(between.directory, 40, 3)
    assert_same(loading.load(between.directory, 40, 1), again[1])


# ---------------------------------------------------------------- beside training


class Reports:
    """What a ``Saver`` reported, and a way to wait for it."""

    def __init__(self) -> None:
        self.queue: queue.Queue[tuple[Any, ...]] = queue.Queue()

    def saved(self, epoch: int, step: int, nbytes: int, seconds: float) -> None:
        self.queue.put(("saved", step, nbytes, seconds))

    def failed(self, step: int, reason: str) -> None:
        self.queue.put(("failed", step, reason))

    def next(self) -> tuple[Any, ...]:
        return self.queue.get(timeout=DEADLINE_S)


class Gated(dict[str, torch.Tensor]):
    """Tensors of a slot, which can be looked at only once the gate is open."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.reached, self.gate = threading.Event(), threading.Event()

    def __getitem__(self, key: str) -> torch.Tensor:
        self.reached.set()
        assert self.gate.wait(DEADLINE_S)
        return super().__getitem__(key)


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def saver(target: Target, reports: Reports) -> Iterator[Saver]:
    saver = Saver(target, reports.saved, reports.failed)
    yield saver
    saver.close(wait=True)


def test_one_save_at_a_time_and_training_never_waits(
    target: Target, saver: Saver, reports: Reports
) -> None:
    first, second, third = (ranks_at(step)[0] for step in (20, 40, 60))
    tensors = Gated(first.tensors)
    assert saver.begin(first.manifest, tensors, first.own)
    assert tensors.reached.wait(DEADLINE_S)
    assert not saver.begin(second.manifest, second.tensors, second.own)
    assert reports.next() == (
        "failed",
        40,
        "The durable checkpoint of step 40 was skipped: that of step 20 is still being written.",
    )
    tensors.gate.set()
    kind, step, nbytes, seconds = reports.next()
    assert (kind, step) == ("saved", 20)
    folder = index.rank_directory(target.directory, 20, 0)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert nbytes == sum(sizes.values()) - sizes["deadpool.json"]
    assert seconds > 0
    assert saver.begin(third.manifest, third.tensors, third.own)
    assert reports.next()[:2] == ("saved", 60)


def test_what_happens_to_the_slot_after_the_copy_does_not_matter(target: Target) -> None:
    for rank in ranks_at(40)[1:]:
        rank.write(target)
    written, slot = (ranks_at(40)[0] for _ in range(2))
    scratch = target.directory / "step-00000040" / "rank-00000.e1.writing"
    overwritten = False

    def overwrite_once_copied() -> None:
        nonlocal overwritten
        if scratch.exists():
            overwritten = True
            for tensor in slot.tensors.values():
                tensor_bytes(tensor).fill_(0)

    saving.write(target, slot.manifest, slot.tensors, slot.own, overwrite_once_copied)
    assert overwritten
    index.commit(target.directory, 40, 3)
    assert_same(loading.load(target.directory, 40, 0), written)


def test_a_slot_that_was_overwritten_before_the_copy_is_not_saved(
    target: Target, saver: Saver, reports: Reports
) -> None:
    rank = ranks_at(40)[0]
    rank.tensors["o/0/alone"][5] = 0
    assert saver.begin(rank.manifest, rank.tensors, rank.own)
    assert reports.next() == (
        "failed",
        40,
        "The durable checkpoint of step 40 was not saved: rank 0's copy of that step was "
        "overwritten or damaged before it could be saved.",
    )
    rank = ranks_at(60)[0]
    with pytest.raises(SaveFailed, match="overwritten or damaged"):
        saving.write(target, rank.manifest, rank.tensors, rank.own + b"x")
    assert not target.directory.exists()


def test_a_save_that_is_given_up_leaves_nothing(target: Target, reports: Reports) -> None:
    saver = Saver(target, reports.saved, reports.failed)
    rank = ranks_at(40)[0]
    tensors = Gated(rank.tensors)
    assert saver.begin(rank.manifest, tensors, rank.own)
    assert tensors.reached.wait(DEADLINE_S)
    closing = threading.Thread(target=saver.close, args=(False,))
    closing.start()
    tensors.gate.set()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert reports.queue.empty()
    assert [path for path in target.directory.rglob("*") if "rank" in path.name] == []
    assert not saver.begin(rank.manifest, rank.tensors, rank.own)


def test_closing_waits_for_the_save_under_way(target: Target, reports: Reports) -> None:
    saver = Saver(target, reports.saved, reports.failed)
    rank = ranks_at(40)[0]
    assert saver.begin(rank.manifest, rank.tensors, rank.own)
    saver.close(wait=True)
    assert reports.next()[:2] == ("saved", 40)


def test_a_save_that_does_not_move_is_given_up_at_the_end(target: Target, reports: Reports) -> None:
    saver = Saver(target, reports.saved, reports.failed)
    rank = ranks_at(40)[0]
    tensors = Gated(rank.tensors)
    assert saver.begin(rank.manifest, tensors, rank.own)
    assert tensors.reached.wait(DEADLINE_S)
    assert saver.close(wait=True, stall_s=0.01) == 40
    tensors.gate.set()
    assert saver.close(wait=True) is None
    assert reports.queue.empty()
    assert [path for path in target.directory.rglob("*") if "rank" in path.name] == []


def test_a_save_that_moves_is_not_given_up(target: Target, reports: Reports) -> None:
    saver = Saver(target, reports.saved, reports.failed)
    rank = ranks_at(40)[0]
    tensors = Gated(rank.tensors)
    assert saver.begin(rank.manifest, tensors, rank.own)
    assert tensors.reached.wait(DEADLINE_S)
    saver._moved_at = time.monotonic() + DEADLINE_S
    given_up: list[int | None] = []
    closing = threading.Thread(target=lambda: given_up.append(saver.close(True, stall_s=0.01)))
    closing.start()
    closing.join(0.2)
    assert given_up == []
    tensors.gate.set()
    closing.join(DEADLINE_S)
    assert given_up == [None]
    assert reports.next()[:2] == ("saved", 40)


def test_a_directory_that_cannot_be_written_is_a_sentence(reports: Reports) -> None:
    """/sys is read-only even for root."""
    saver = Saver(Target(Path("/sys/checkpoints"), "job", 3), reports.saved, reports.failed)
    rank = ranks_at(40)[0]
    assert saver.begin(rank.manifest, rank.tensors, rank.own)
    kind, step, reason = reports.next()
    saver.close(wait=True)
    assert (kind, step) == ("failed", 40)
    assert reason.startswith(
        "The durable checkpoint of step 40 was not saved: this user may not write /sys/checkpoints"
    )
    assert reason.endswith("choose another directory, or change its permissions.")


def test_a_directory_that_is_deleted_meanwhile_costs_at_most_one_save(target: Target) -> None:
    rank, pieces = ranks_at(1)[0], 0

    def write(delete_at: int) -> str:
        nonlocal pieces
        pieces = 0

        def before_piece() -> None:
            nonlocal pieces
            if pieces == delete_at:
                shutil.rmtree(target.directory, ignore_errors=True)
            pieces += 1

        try:
            saving.write(target, rank.manifest, rank.tensors, rank.own, before_piece)
        except SaveFailed as error:
            return str(error)
        return ""

    assert write(-1) == ""
    sentences = [write(place) for place in (0, pieces // 2, pieces - 1)]
    assert sentences[0] == ""  # nothing was written yet
    start = f"The durable checkpoint of step 1 was not saved: writing {target.directory}/step-"
    for sentence in sentences[1:]:
        assert sentence.startswith(start), sentence
        assert sentence.endswith("failed (No such file or directory)."), sentence
    with pytest.raises(CheckpointIncomplete, match="is missing"):
        index.commit(target.directory, 1, target.world_size)
    save(target, 2)
    assert index.list_complete(target.directory) == [2]


def test_a_full_disk_fails_the_save_and_not_the_process(target: Target) -> None:
    """The limit on the size of files fails a write in the midst of a tensor, as a full disk."""
    script = """
        import importlib.util, resource, sys
        from pathlib import Path
        spec = importlib.util.spec_from_file_location("test_durable", sys.argv[1])
        tests = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(tests)
        reports = tests.Reports()
        target = tests.Target(Path(sys.argv[2]), "job-1", 3)
        saver = tests.Saver(target, reports.saved, reports.failed)
        rank = tests.ranks_at(40)[0]
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        for limit in (0, 1000, 70_000, 5_000_000, 9_000_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
            saver.begin(rank.manifest, rank.tensors, rank.own)
            kind, step, reason = reports.next()
            assert kind == "failed", limit
            start = "The durable checkpoint of step 40 was not saved: there is no room in "
            assert reason.startswith(start + sys.argv[2]), reason
            assert "MB of rank-00000 (File too large); free some" in reason, reason
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert list(target.directory.glob("step-*/*")) == []
        saver.begin(rank.manifest, rank.tensors, rank.own)
        saver.close(wait=True)
        assert reports.next()[0] == "saved"
    """
    done = run_script(script, __file__, target.directory)
    assert (done.returncode, done.stderr) == (0, "")


def test_imports_are_light() -> None:
    script = """
        import sys
        import deadpool_runtime.durable.index
        assert "torch" not in sys.modules
        import deadpool_runtime.durable.loading, deadpool_runtime.durable.saving
        assert "torch.distributed.checkpoint" not in sys.modules
    """
    done = run_script(script)
    assert done.returncode == 0, done.stderr
