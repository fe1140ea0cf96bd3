"""Every collective of a rank is on record, whoever starts it, for one who reads from outside."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deadpool_runtime.groups import native, progress
from deadpool_runtime.groups.progress import Reader, Recorder, record_path
from deadpool_runtime.groups.registry import GroupRegistry
from deadpool_runtime.protocol import GroupStanding, Standing

PATIENCE_S = 60.0
PATIENCE = timedelta(seconds=PATIENCE_S)

#: What both ranks of a group call, and how it stands in the record.
COLLECTIVES: dict[str, Callable[[list[torch.Tensor], torch.Tensor], Any]] = {
    "broadcast": lambda pair, one: dist.broadcast(one, src=0),
    "all_reduce": lambda pair, one: dist.all_reduce(one),
    "all_reduce (coalesced)": lambda pair, one: dist.all_reduce_coalesced([one]),
    "reduce": lambda pair, one: dist.reduce(one, dst=0),
    "all_gather": lambda pair, one: dist.all_gather(pair, one),
    "all_gather_into_tensor": lambda pair, one: dist.all_gather_into_tensor(torch.ones(8), one),
    "gather": lambda pair, one: dist.gather(one, pair if dist.get_rank() == 0 else None),
    "scatter": lambda pair, one: dist.scatter(one, pair if dist.get_rank() == 0 else None),
    "reduce_scatter": lambda pair, one: dist.reduce_scatter(one, pair),
    "reduce_scatter_tensor": lambda pair, one: dist.reduce_scatter_tensor(torch.ones(2), one),
    "all_to_all_single": lambda pair, one: dist.all_to_all_single(torch.ones(4), one),
    "barrier": lambda pair, one: dist.barrier(),
    "monitored_barrier": lambda pair, one: dist.monitored_barrier(timeout=PATIENCE),
}


def _join(crew: Any, tmp_path: Path, rank: int) -> tuple[GroupRegistry, Recorder]:
    recorder = Recorder(record_path(tmp_path, rank, 1))
    registry = GroupRegistry(recorder)
    registry.install(detached=False, epoch=1)
    store = registry.open_store("127.0.0.1", crew.port, PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=PATIENCE)
    recorder.stepping(1, 6)
    return registry, recorder


def _read(path: Path, holds: Callable[[Standing], bool]) -> Standing:
    """What the record at ``path`` says, once that is so."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            standing = Reader(path).standing(0, 1, time.monotonic_ns())
        except (OSError, ValueError):
            standing = None
        if standing is not None and holds(standing):
            return standing
        assert time.monotonic() < deadline, standing
        time.sleep(0.01)


def _completed(standing: Standing) -> bool:
    return not any(group.waits for group in standing.groups)


#: How torch calls some of them from 2.14 on.
RENAMED = {
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
}


def _newest(path: Path, number: int) -> GroupStanding:
    """The group's standing when its collective of that number is complete."""
    standing = _read(path, lambda seen: _completed(seen) and seen.groups[0].entered >= number)
    return standing.groups[0]


def test_the_same_names_stand_in_both_languages() -> None:
    names = dict(zip(native.load().operations(), progress.OPERATIONS, strict=False))
    assert names["allreduce"] == "all_reduce"
    assert names["recvAnysource"] == "recv (from any)"
    renamed = "all_to_all_single" in names
    assert list(names.values()) == list(progress.OPERATIONS[: None if renamed else 21])


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_collectives_are_counted_alike_on_every_rank_until_a_rebuild(
    crew: Any, tmp_path: Path
) -> None:
    def body(rank: int) -> tuple[int, int, int, list[str]]:
        registry, recorder = _join(crew, tmp_path, rank)
        path = record_path(tmp_path, rank, 1)
        pair, one = [torch.ones(4), torch.ones(4)], torch.ones(4)
        count = 0
        for op, call in COLLECTIVES.items():
            call(pair, one)
            count += 1
            group = _newest(path, count)
            assert (group.entered, group.number) == (count, count)
            assert group.op in (op, RENAMED.get(op))
        # DDP's reducer starts its collectives in C++.
        model = DistributedDataParallel(nn.Linear(4, 4))
        constructed = _newest(path, count).entered
        model(one).sum().backward()
        reduced = _newest(path, constructed + 1)
        assert reduced.op == "all_reduce"
        dist.barrier()
        registry.rebuild(2, registry.open_store("127.0.0.1", crew.port, PATIENCE))
        recorder.stepping(2, 6)
        dist.barrier()
        again = _newest(path, 1)
        return constructed, reduced.entered, again.entered, [again.name]

    first, second = crew.run(2, body)
    assert first == second
    assert first[2:] == (1, ["0"])


def test_a_rank_that_waits_is_seen_to_wait_from_outside(crew: Any, tmp_path: Path) -> None:
    """First in a collective with another one behind it, then for a single message."""

    def waiting() -> None:
        _join(crew, tmp_path, 0)
        works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(2)]
        for work in works:
            assert work is not None
            work.wait()
        dist.recv(torch.ones(4), 1)
        crew.client().wait(["seen"])

    def late() -> None:
        _join(crew, tmp_path, 1)
        client = crew.client()
        client.wait(["come"])
        for _ in range(2):
            dist.all_reduce(torch.ones(4))
        client.wait(["send"])
        dist.send(torch.ones(4), 0)

    workers = [crew.start(waiting), crew.start(late)]
    path = record_path(tmp_path, 0, 1)
    standing = _read(path, lambda seen: [g.entered for g in seen.groups] == [2])
    (group,) = standing.groups
    assert (standing.epoch, standing.step) == (1, 7)
    assert (group.name, group.number, group.waits, group.op) == ("0", 1, True, "all_reduce")
    assert 0 < group.wait_s <= standing.step_s
    crew.store.set("come", "")
    standing = _read(path, lambda seen: seen.groups[0].peer_op != "")
    (group,) = standing.groups
    assert (group.waits, group.peer_op) == (False, "recv")
    crew.store.set("send", "")
    _read(path, lambda seen: seen.groups[0].peer_op == "")
    crew.store.set("seen", "")
    for worker in workers:
        worker.result()


def test_rank_in_no_step_has_no_standing(tmp_path: Path) -> None:
    path = record_path(tmp_path, 3, 2)
    recorder = Recorder(path)
    assert path.stat().st_mode & 0o777 == 0o600
    reader = Reader(path)
    assert reader.standing(3, 2, 0) is None
    recorder.stepping(2, 20)
    standing = reader.standing(3, 2, time.monotonic_ns() + 5_000_000_000)
    assert standing is not None
    assert (standing.rank, standing.born, standing.epoch, standing.step) == (3, 2, 2, 21)
    assert standing.step_s >= 5
    recorder.resting()
    assert reader.standing(3, 2, 0) is None
    reader.close()


def test_steps_are_timed_with_and_without_the_waits_for_others(crew: Any, tmp_path: Path) -> None:
    """Rank 1 comes late to what rank 0 waits in: the step takes both the same time."""
    lasts_s = 0.5

    def body(rank: int) -> None:
        _, recorder = _join(crew, tmp_path, rank)
        for step in (7, 8):
            if rank == 1:
                time.sleep(lasts_s)
            work = dist.all_reduce(torch.ones(4), async_op=True)
            assert work is not None
            work.wait()
            recorder.stepping(1, step)
        dist.barrier()

    crew.run(2, body)
    timed = [Reader(record_path(tmp_path, rank, 1)).timed(0) for rank in range(2)]
    for rank in range(2):
        assert [(number, epoch) for number, epoch, _, _ in timed[rank]] == [(1, 1), (2, 1)]
        assert timed[rank][1:] == Reader(record_path(tmp_path, rank, 1)).timed(1)
    (_, _, own_s, step_s), (_, _, late_own_s, late_step_s) = timed[0][1], timed[1][1]
    assert min(step_s, late_step_s) >= 0.9 * lasts_s
    assert late_own_s >= 0.9 * lasts_s
    assert own_s <= step_s - 0.5 * lasts_s


def test_steps_in_which_the_script_rested_are_not_timed(tmp_path: Path) -> None:
    recorder = Recorder(record_path(tmp_path, 0, 1))
    reader = Reader(record_path(tmp_path, 0, 1))
    recorder.stepping(1, 0)
    recorder.stepping(1, 0)  # the next batch is there
    recorder.resting()
    recorder.stepping(2, 0)
    assert reader.timed(0) == []
    recorder.stepping(2, 1, blocked_s=1e6)
    ((number, epoch, own_s, step_s),) = reader.timed(0)
    assert (number, epoch, own_s) == (1, 2, 0.0)
    assert step_s > 0
    for step in range(2, 80):
        recorder.stepping(2, step)
    assert [each[0] for each in reader.timed(0)] == list(range(16, 80))
    reader.close()
