"""How fast a state is copied into the arena and hashed, against a plain memcpy of the same bytes.

Everything by one thread. Each repetition times, one after the other and in turning order, the whole
of what the copier's thread does to a state (copying it into a slot, hashing every chunk, telling of
it) and three plain copies of the same tensors into the same slot: libc's ``memcpy`` in one call for
each tensor, the same in pieces of 4 MiB, and torch's ``copy_``. The ratio is that of the rates, for
each repetition by itself. Prints medians with quartiles and writes ``bench/results/snapshot.json``.

``python bench/snapshot.py [--repetitions 15] [--sizes 64 256 1024] [--tensors 1 64 4096]``
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import records
import torch

from deadpool_runtime.replication import fused
from deadpool_runtime.replication.hashers import Hashers
from deadpool_runtime.replication.layout import layout_segments, views_of
from deadpool_runtime.replication.manifest import OWN, chunk_hash, chunks_of
from deadpool_runtime.replication.passes import Pass, SegmentPlan, Sources
from deadpool_runtime.replication.slots import SlotFile
from deadpool_runtime.replication.streams import CpuStream

PIECE_NBYTES = 4 << 20
#: The least ratio to the plain copy of whole tensors that was set as a goal.
GOAL = 0.8


@dataclass(frozen=True)
class Item:
    """See ``layout.Placed``."""

    key: str
    tensor: torch.Tensor
    ranks: tuple[int, ...] = (0,)
    on_cpu: bool = False


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(nbytes: int, tensors: int, repetitions: int) -> dict[str, object]:
    """Seconds of each kind of copy of a state of ``nbytes`` in so many tensors."""
    live = [torch.randn(nbytes // tensors // 4) for _ in range(tensors)]
    segments, grouped = layout_segments(Item(f"t{i}", each) for i, each in enumerate(live))
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="deadpool-bench-") as folder:
        slot = SlotFile.open(Path(folder) / "own-0-0", create=True)
        slot.prepare(segments, (0, OWN))
        plan, stream, hashers = SegmentPlan(segments, 0), CpuStream(), Hashers(1)
        sources = Sources(plan, grouped[0], queue_all=False)
        library, reason = fused.load()
        views = views_of(slot, segments, 0)
        pairs = [
            (view.data_ptr(), tensor.data_ptr(), entry.nbytes)
            for view, tensor, entry in zip(views, live, segments[0].entries, strict=True)
        ]
        pieces = [
            (to + at, source + at, min(PIECE_NBYTES, size - at))
            for to, source, size in pairs
            for at in range(0, size, PIECE_NBYTES)
        ]

        def snapshot(with_library: bool) -> list[bytes] | None:
            one = Pass(plan, sources, slot)
            used = library if with_library else None
            return one.run(used, stream, lambda first, hashes: True, hashers)

        def memcpy(parts: Sequence[tuple[int, int, int]]) -> None:
            for part in parts:
                ctypes.memmove(*part)

        def torch_copy() -> None:
            for view, tensor in zip(views, live, strict=True):
                view.copy_(tensor)

        works: dict[str, Callable[[], object]] = {
            "memcpy": lambda: memcpy(pairs),
            "memcpy in 4 MiB pieces": lambda: memcpy(pieces),
            "torch copy_": torch_copy,
            "snapshot": lambda: snapshot(True),
            "snapshot without the library": lambda: snapshot(False),
        }
        if library is None:
            print(reason)
            del works["snapshot"]
        for work in works.values():
            work()
        check(slot, snapshot(True))
        seconds: dict[str, list[float]] = {name: [] for name in works}
        order = list(works)
        for turn in range(repetitions):
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                seconds[name].append(timed(works[name]))
        slot.close()
    return {"nbytes": nbytes, "tensors": tensors, "seconds": seconds}


def check(slot: SlotFile, hashes: list[bytes] | None) -> None:
    """The hashes are those that every receiver computes anew."""
    memory = slot.segment_view(0)
    assert hashes == [
        chunk_hash(slot.chunk_view(0, chunk)) for chunk in range(chunks_of(len(memory)))
    ]


def ratios(base: Sequence[float], other: Sequence[float]) -> list[float]:
    """Quartiles of the ratio of rates, repetition by repetition."""
    each = [one / two for one, two in zip(base, other, strict=True)]
    return [round(value, 3) for value in statistics.quantiles(each, n=4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256, 1024], help="MiB")
    parser.add_argument("--tensors", type=int, nargs="+", default=[1, 64, 4096])
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for size in options.sizes:
        for tensors in options.tensors:
            result = measure(size << 20, tensors, options.repetitions)
            seconds = result["seconds"]
            assert isinstance(seconds, dict)
            result["gb_per_s"] = {
                name: round((size << 20) / statistics.median(each) / 1e9, 2)
                for name, each in seconds.items()
            }
            result["ratio_quartiles"] = {
                f"{name} to {base}": ratios(seconds[base], seconds[name])
                for name in seconds
                if name.startswith("snapshot")
                for base in seconds
                if not base.startswith("snapshot")
            }
            results.append(result)
            report(result)
    write(results, options.repetitions)


def report(result: dict[str, object]) -> None:
    nbytes, rates, quartiles = result["nbytes"], result["gb_per_s"], result["ratio_quartiles"]
    assert isinstance(nbytes, int)
    assert isinstance(rates, dict)
    assert isinstance(quartiles, dict)
    print(f"\n{nbytes >> 20} MiB in {result['tensors']} tensors")
    for name, rate in rates.items():
        print(f"  {name:<32}{rate:8.2f} GB/s")
    for name, (low, median, high) in quartiles.items():
        print(f"  {name:<56}{median:6.2f}  ({low:.2f} to {high:.2f})", flush=True)


def write(results: list[dict[str, object]], repetitions: int) -> None:
    """Keep the figures with what they were measured on."""
    path = records.RESULTS / "snapshot.json"
    path.parent.mkdir(exist_ok=True)
    record = {
        "command": f"python bench/snapshot.py --repetitions {repetitions}",
        **records.conditions(),
        "xxhash": version("xxhash"),
        "goal": GOAL,
        "results": results,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
