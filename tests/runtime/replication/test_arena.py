"""Slots hold what was sealed in them or nothing, and arenas are removed when nobody needs them."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from deadpool_runtime import protocol
from deadpool_runtime.replication.arena import (
    Arena,
    ArenaFull,
    SlotFile,
    arena_path,
    inventory,
    remove_stale,
)
from deadpool_runtime.replication.manifest import (
    ALIGN_NBYTES,
    CHUNK_NBYTES,
    OWN,
    Entry,
    Manifest,
    Segment,
    chunk_hash,
    chunks_of,
)
from deadpool_runtime.replication.memory import free_memory

OWN_PART = b"what only this rank has"
#: Two segments, of which the first has a chunk and a bit.
SIZES = (CHUNK_NBYTES + 640, 64)


def segment(index: int) -> Segment:
    entry = Entry(f"p/0/{index}", "uint8", (SIZES[index],), 0, SIZES[index])
    return Segment(ranks=tuple(range(index + 1)), entries=(entry,), nbytes=SIZES[index])


def fill(
    slot: SlotFile, rank: int = 3, step: int = 7, present: tuple[int, ...] = (0, 1, OWN)
) -> Manifest:
    """Put a copy into the slot as its writer does."""
    segments = (segment(0), segment(1))
    slot.prepare(segments, present)
    hashed = []
    for index, each in enumerate(segments):
        data = random.Random(index).randbytes(each.nbytes)
        if index in present:
            slot.segment_view(index)[:] = data
        hashes = [
            chunk_hash(data[chunk * CHUNK_NBYTES : (chunk + 1) * CHUNK_NBYTES])
            for chunk in range(chunks_of(each.nbytes))
        ]
        hashed.append(msgspec.structs.replace(each, hashes=tuple(hashes)))
    manifest = Manifest(rank, step, 2, tuple(hashed), len(OWN_PART), chunk_hash(OWN_PART))
    slot.seal(manifest, present, OWN_PART)
    return manifest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "own-3-1"


@pytest.fixture
def slot(path: Path) -> Iterator[SlotFile]:
    with SlotFile.open(path, create=True) as slot:
        yield slot


# ---------------------------------------------------------------- slots


def test_a_slot_holds_what_was_sealed(slot: SlotFile, path: Path) -> None:
    assert slot.read() is None
    manifest = fill(slot)
    with SlotFile.open(path) as other:
        assert other.read() == (manifest, (-1, 0, 1))
        assert other.own_bytes() == OWN_PART
        assert other.verify(manifest, (0, 1, OWN)) == []
        assert other.segment_view(1) == random.Random(1).randbytes(SIZES[1])
        assert other.chunk_view(0, 1) == other.segment_view(0)[CHUNK_NBYTES:]
        with pytest.raises(IndexError):
            other.chunk_view(0, 2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_slot_with_fewer_segments(slot: SlotFile) -> None:
    manifest = fill(slot, present=(1, OWN))
    assert slot.read() == (manifest, (-1, 1))
    assert slot.verify(manifest, (1, OWN)) == []
    assert slot.segment_view(1) == random.Random(1).randbytes(SIZES[1])
    assert slot.nbytes < SIZES[0]
    with pytest.raises(KeyError):
        slot.segment_view(0)


def test_an_own_part_that_is_in_place_already(slot: SlotFile, path: Path) -> None:
    manifest = fill(slot)
    slot.prepare(manifest.segments, (0, 1, OWN))
    slot.view(slot.place_of(OWN), len(OWN_PART))[:] = OWN_PART
    slot.seal(manifest, (0, 1, OWN), None)
    with SlotFile.open(path) as other:
        assert other.read() == (manifest, (-1, 0, 1))
        assert other.verify(manifest, (0, 1, OWN)) == []


def test_preparing_or_invalidating_empties_a_slot(slot: SlotFile, path: Path) -> None:
    with SlotFile.open(path) as other:
        manifest = fill(slot)
        assert other.read() is not None
        slot.invalidate()
        assert other.read() is None
        fill(slot)
        assert other.read() is not None
        slot.prepare(manifest.segments, (0, 1, OWN))
        assert other.read() is None


def test_every_flipped_bit_is_found(slot: SlotFile, path: Path) -> None:
    manifest = fill(slot)
    places = {index: slot.place_of(index) for index in (0, 1, OWN)}
    whole = (0, 1, OWN)
    for index, at in [(0, 0), (0, SIZES[0] - 1), (1, 5), (OWN, 0), (OWN, len(OWN_PART) - 1)]:
        byte = slot.view(places[index] + at, 1)
        byte[0] ^= 4
        assert slot.read() is not None
        assert slot.verify(manifest, whole) == [index]
        assert slot.verify(manifest, whole, threads=3) == [index]
        byte[0] ^= 4
    assert slot.verify(manifest, whole) == []
    manifest_at = places[OWN] + ALIGN_NBYTES
    header_end = slot.view(0, ALIGN_NBYTES).tobytes().rstrip(b"\0")
    for at in [*range(0, len(header_end), 3), manifest_at, manifest_at + 50]:
        byte = slot.view(at, 1)
        byte[0] ^= 4
        assert slot.read() is None
        byte[0] ^= 4
    assert slot.read() is not None


def test_a_manifest_without_all_hashes_does_not_verify(slot: SlotFile) -> None:
    manifest = fill(slot)
    first = msgspec.structs.replace(manifest.segments[0], hashes=manifest.segments[0].hashes[:1])
    short = msgspec.structs.replace(manifest, segments=(first, manifest.segments[1]))
    assert slot.verify(short, (0, 1, OWN)) == [0]


@pytest.mark.parametrize("nbytes", [0, 7, 100, ALIGN_NBYTES, ALIGN_NBYTES + 1, CHUNK_NBYTES])
def test_a_file_cut_short_is_damaged_not_fatal(slot: SlotFile, path: Path, nbytes: int) -> None:
    manifest = fill(slot)
    os.truncate(path, nbytes)
    with SlotFile.open(path) as other:
        assert other.read() is None
        assert set(other.verify(manifest, (0, 1, OWN))) == {0, 1, OWN}


def test_views_stay_valid_when_the_slot_grows(slot: SlotFile) -> None:
    slot.ensure(ALIGN_NBYTES)
    old = slot.view(0, ALIGN_NBYTES)
    generation, mapping = slot.generation, slot.mapping
    slot.ensure(10 << 20)
    assert slot.generation > generation
    assert slot.mapping is not mapping
    old[:3] = b"abc"
    assert bytes(slot.view(0, 3)) == b"abc"
    before = slot.nbytes, slot.generation
    slot.ensure(1 << 20)
    assert (slot.nbytes, slot.generation) == before


def test_sealing_needs_no_new_mapping(slot: SlotFile) -> None:
    segments = (segment(0), segment(1))
    slot.prepare(segments, (0, 1, OWN))
    generation = slot.generation
    fill(slot)
    assert slot.generation == generation


def test_a_view_outlives_the_slot(slot: SlotFile) -> None:
    fill(slot)
    view = slot.segment_view(1)
    slot.close()
    assert view == random.Random(1).randbytes(SIZES[1])


def test_a_reader_never_takes_a_half_written_slot_for_whole(slot: SlotFile, path: Path) -> None:
    """A writer in another process seals states over and over while this one reads."""
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER.format(folder=str(Path(__file__).parent), path=str(path))],
        stdout=subprocess.PIPE,
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        seen: set[int] = set()
        nothing = 0
        while len(seen) < 200:
            found = slot.read()
            if found is None:
                nothing += 1
                continue
            manifest, _ = found
            assert manifest.rank == manifest.step % 1000
            assert manifest.own_nbytes == manifest.step % 700
            seen.add(manifest.step)
        assert nothing > 0
    finally:
        writer.kill()
        writer.wait()


_WRITER = """
import sys
from pathlib import Path
from deadpool_runtime.replication.arena import SlotFile
from deadpool_runtime.replication.manifest import OWN, Entry, Manifest, Segment, chunk_hash

slot = SlotFile.open(Path({path!r}), create=True)
step = 0
print("writing", flush=True)
while True:
    step += 1
    own = bytes(step % 700)
    entries = tuple(Entry("k" * (step % 50), "uint8", (64,), 0, 64) for _ in range(step % 9))
    segments = (Segment((0,), entries, 64),)
    slot.prepare(segments, (0, OWN))
    manifest = Manifest(step % 1000, step, 1, segments, len(own), chunk_hash(own))
    slot.seal(manifest, (0, OWN), own)
"""


def test_no_room_is_one_clear_error(small_shm: Path) -> None:
    with SlotFile.open(small_shm / "own-0-0", create=True) as slot:
        slot.ensure(1 << 20)
        before = slot.nbytes
        with pytest.raises(ArenaFull, match=r"needs 63\.\d MiB more .* is left by what is free in"):
            slot.ensure(64 << 20)
        assert slot.nbytes == before
        slot.view(0, before)[:] = bytes(before)


@pytest.fixture
def small_shm(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory with room for 4 MiB."""
    folder = tmp_path / "shm"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


# ---------------------------------------------------------------- arenas


def test_an_arena_is_private_and_locked(tmp_path: Path) -> None:
    path = tmp_path / "deadpool-1-n1-e0"
    arena = Arena.create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match=r"not empty|exists"):
        Arena.create(path)
    assert list(tmp_path.iterdir()) == [path]
    assert Arena.open(path).own_path(3, 1) == path / "own-3-1"
    assert Arena.open(path).held_path(3, 2) == path / "held-3-2"
    arena.remove()
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        Arena.open(path)


def test_names_of_different_jobs_never_meet() -> None:
    names = {
        arena_path(job, node, 1)
        for job, node in [("a-b", "c"), ("a", "b-c"), ("a/b", "c"), ("a", "b-c-e1")]
    }
    assert len(names) == 4
    assert {path.parent for path in names} == {Path("/dev/shm")}
    assert arena_path("17", "node-3", 2).name == "deadpool-17-node-3-e2"


def in_shm(folder: Path, job: str, node: str, epoch: int) -> Path:
    return folder / arena_path(job, node, epoch).name


def test_stale_arenas_are_removed_and_living_ones_kept(tmp_path: Path) -> None:
    mine_before = Arena.create(in_shm(tmp_path, "7", "n1", 0))
    living = Arena.create(in_shm(tmp_path, "8", "n1", 0))
    neighbour = Arena.create(in_shm(tmp_path, "7", "n2", 0))
    dead = in_shm(tmp_path, "9", "n1", 4)
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import signal, sys\nfrom pathlib import Path\n"
            "from deadpool_runtime.replication.arena import Arena\n"
            f"arena = Arena.create(Path({str(dead)!r}))\n"
            "print('made', flush=True)\nsignal.pause()",
        ],
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    child.stdout.readline()
    unrelated = tmp_path / "deadpool-folder-e"
    unrelated.mkdir()
    assert remove_stale("6", "n1", shm=tmp_path) == []
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert set(remove_stale("7", "n1", shm=tmp_path)) == {mine_before.path, dead}
    assert set(tmp_path.iterdir()) == {living.path, neighbour.path, unrelated}


def test_an_arena_that_was_never_finished_is_removed_when_it_is_old(tmp_path: Path) -> None:
    path = tmp_path / "deadpool-1-n1-e0.new-5-ab"
    path.mkdir()
    assert remove_stale("2", "n1", shm=tmp_path) == []
    os.utime(path, (0, 0))
    assert remove_stale("2", "n1", shm=tmp_path) == [path]


def test_the_inventory_lists_what_is_sealed(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "deadpool-1-n1-e0")
    for name, present in [("own-3-1", (0, 1, OWN)), ("held-5-1", (1, OWN)), ("own-4-2", (0, OWN))]:
        with SlotFile.open(arena.path / name, create=True) as slot:
            fill(slot, rank=int(name.split("-")[1]), present=present)
            if name == "own-4-2":
                slot.invalidate()
    (arena.path / "own-9-0").touch()
    (arena.path / "replicator.sock").touch()
    assert inventory(arena.path) == [
        protocol.Copy(5, 7, 2, True, [(0, 1)], [(0,)]),
        protocol.Copy(3, 7, 2, False, [(0,), (0, 1)], []),
    ]


# ---------------------------------------------------------------- memory


def machine(folder: Path, available_kb: int, cgroup: str) -> dict[str, str]:
    """Files as the kernel has them; returns the arguments of ``free_memory``."""
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available_kb} kB\n")
    (folder / "proc" / "self" / "cgroup").write_text(cgroup)
    return {
        "shm": "/dev/shm",
        "proc": str(folder / "proc"),
        "cgroups": str(folder / "cgroup"),
    }


def test_the_smallest_limit_counts(tmp_path: Path) -> None:
    kernel = machine(tmp_path, 1000, "0::/slurm/job_1/step_0\n")
    assert free_memory(**kernel) == (1000 << 10, "the memory that this machine has available")
    job = tmp_path / "cgroup" / "slurm" / "job_1"
    (job / "step_0").mkdir(parents=True)
    (job / "step_0" / "memory.max").write_text("max\n")
    (job / "step_0" / "memory.current").write_text("100\n")
    (job / "memory.max").write_text("5000\n")
    (job / "memory.current").write_text("3000\n")
    (job / "memory.stat").write_text("anon 7\ninactive_file 400\n")
    nbytes, words = free_memory(**kernel)
    assert nbytes == 2400
    assert words == f"what the memory limit of the job leaves ({job}/memory.max)"


def test_limits_of_the_older_control_groups(tmp_path: Path) -> None:
    kernel = machine(tmp_path, 1 << 40, "4:cpu:/x\n9:memory:/slurm/job_1\n0::/other\n")
    job = tmp_path / "cgroup" / "memory" / "slurm" / "job_1"
    job.mkdir(parents=True)
    (job / "memory.limit_in_bytes").write_text("9000\n")
    (job / "memory.usage_in_bytes").write_text("9500\n")
    (job / "memory.stat").write_text("total_inactive_file 100\n")
    (job.parent.parent / "memory.limit_in_bytes").write_text(f"{(1 << 63) - 4096}\n")
    (job.parent.parent / "memory.usage_in_bytes").write_text("9500\n")
    nbytes, words = free_memory(**kernel)
    assert nbytes == 0
    assert "memory.limit_in_bytes" in words


def test_a_slot_that_was_exchanged_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "own-0-0"
    with SlotFile.open(path, create=True) as slot:
        assert slot.is_in_place()
        path.unlink()
        assert not slot.is_in_place()
        with SlotFile.open(path, create=True) as other:
            assert other.is_in_place()
            assert not slot.is_in_place()


def test_this_machine_has_a_limit() -> None:
    nbytes, words = free_memory()
    assert nbytes > 0
    assert words


def test_no_torch_is_needed() -> None:
    code = (
        "import sys\nimport deadpool_runtime.replication.arena\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
