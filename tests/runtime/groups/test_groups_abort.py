"""A collective that is stuck because its peer fell silent is freed at once, whichever it is."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deadpool_runtime.groups.errors import GroupsAborted, RebuildFailed
from deadpool_runtime.groups.registry import GroupRegistry

#: The longest that being freed may take on a busy machine; it usually takes a few milliseconds.
FREED_WITHIN_S = 10.0
PATIENCE = timedelta(seconds=60)


def _small() -> torch.Tensor:
    return torch.ones(4)


def _two() -> list[torch.Tensor]:
    return [_small(), _small()]


def _exchange() -> None:
    operations = [
        dist.P2POp(dist.isend, _small(), 1),
        dist.P2POp(dist.irecv, _small(), 1),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _asynchronously() -> None:
    work = dist.all_reduce(_small(), async_op=True)
    assert work is not None
    work.wait()


#: As called by rank 0 of two, whose peer never calls anything.
COLLECTIVES: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(_small()),
    "all_reduce_async": _asynchronously,
    "all_reduce_large": lambda: dist.all_reduce(torch.ones(4_000_000)),
    "all_reduce_coalesced": lambda: dist.all_reduce_coalesced(_two()),
    "broadcast": lambda: dist.broadcast(_small(), src=1),
    "broadcast_object_list": lambda: dist.broadcast_object_list([None], src=1),
    "reduce": lambda: dist.reduce(_small(), dst=0),
    "all_gather": lambda: dist.all_gather(_two(), _small()),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.ones(8), _small()),
    "all_gather_object": lambda: dist.all_gather_object([None, None], "x"),
    "gather": lambda: dist.gather(_small(), _two(), dst=0),
    "scatter": lambda: dist.scatter(_small(), None, src=1),
    "reduce_scatter": lambda: dist.reduce_scatter(_small(), _two()),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.ones(2), _small()),
    "all_to_all": lambda: dist.all_to_all(_two(), _two()),
    "all_to_all_single": lambda: dist.all_to_all_single(_small(), _small()),
    "barrier": lambda: dist.barrier(),
    "monitored_barrier": lambda: dist.monitored_barrier(timeout=PATIENCE),
    "send": lambda: dist.send(torch.ones(16_000_000), 1),
    "recv": lambda: dist.recv(_small(), 1),
    "recv_from_any": lambda: dist.recv(_small()),
    "batch_isend_irecv": _exchange,
}


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_stuck_collective_is_freed(crew: Any, kind: str) -> None:
    def stopped_peer() -> None:
        _join(crew, 1, GroupRegistry())
        os.kill(os.getpid(), signal.SIGSTOP)

    def stuck() -> float:
        registry = GroupRegistry()
        _join(crew, 0, registry)
        crew.client().wait(["stopped"])
        return _freed_after(registry, COLLECTIVES[kind])

    waiting = crew.start(stuck)
    peer = crew.start(stopped_peer)
    os.waitid(os.P_PID, peer.pid, os.WSTOPPED | os.WNOWAIT)
    crew.store.set("stopped", "")
    elapsed_s = waiting.result()
    print(f"{kind}: freed after {elapsed_s * 1e3:.1f} ms")
    assert elapsed_s < FREED_WITHIN_S


def test_collective_after_an_abort_raises_at_once(crew: Any) -> None:
    def body(rank: int) -> None:
        registry = GroupRegistry()
        _join(crew, rank, registry)
        pair = dist.new_group([0, 1])
        crew.meet(crew.client(), "made", rank, 2)
        assert registry.abort() > 0
        for group in (None, pair):
            with pytest.raises(RuntimeError):
                dist.all_reduce(_small(), group=group)
        with pytest.raises(GroupsAborted):
            dist.new_group([0, 1])

    crew.run(2, body)


def test_abort_leaves_other_connections_alone(crew: Any) -> None:
    def body(rank: int) -> None:
        registry = GroupRegistry()
        own = crew.client()
        _join(crew, rank, registry)
        later = crew.client()
        crew.meet(own, "joined", rank, 2)
        registry.abort()
        crew.meet(own, "aborted", rank, 2)
        crew.meet(later, "still here", rank, 2)

    crew.run(2, body)


@pytest.mark.parametrize("opened_by", ["env", "open_store"])
def test_thread_that_waits_in_a_store_is_freed(
    crew: Any, opened_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body() -> float:
        registry = GroupRegistry()
        registry.install(detached=False)
        if opened_by == "env":
            dist.init_process_group("gloo", timeout=PATIENCE)
            store: Any = dist.distributed_c10d._get_default_store()
        else:
            store = registry.open_store("127.0.0.1", crew.port, PATIENCE)
        return _freed_after(registry, lambda: store.wait(["never"]))

    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(crew.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    elapsed_s = crew.start(body).result()
    print(f"store of {opened_by}: freed after {elapsed_s * 1e3:.1f} ms")
    assert elapsed_s < FREED_WITHIN_S


def test_rebuild_that_waits_for_a_dead_peer_is_freed_and_can_be_repeated(crew: Any) -> None:
    def body(rank: int) -> None:
        registry = GroupRegistry()
        _join(crew, rank, registry)
        client = crew.client()
        crew.meet(client, "joined", rank, 2)
        registry.abort(1)
        if rank == 0:
            store = registry.open_store("127.0.0.1", crew.port, PATIENCE)
            elapsed_s = _freed_after(
                registry, lambda: registry.rebuild(1, store, PATIENCE), RebuildFailed, epoch=2
            )
            assert elapsed_s < FREED_WITHIN_S
        registry.abort(2)
        with pytest.raises(RebuildFailed):
            registry.rebuild(1, client)
        registry.rebuild(2, registry.open_store("127.0.0.1", crew.port, PATIENCE))
        value = _small()
        dist.all_reduce(value)
        assert value.tolist() == [2.0] * 4

    crew.run(2, body)


def _join(crew: Any, rank: int, registry: GroupRegistry) -> None:
    registry.install(detached=False)
    store = registry.open_store("127.0.0.1", crew.port, PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=PATIENCE)


def _freed_after(
    registry: GroupRegistry,
    wait: Callable[[], Any],
    error: type[Exception] = RuntimeError,
    epoch: int | None = None,
) -> float:
    """Seconds from the abort, called while this thread waits, to the exception."""
    status = Path(f"/proc/self/task/{threading.get_native_id()}/stat")
    entered = threading.Event()
    aborted_at: list[float] = []

    def abort_once_it_sleeps() -> None:
        entered.wait()
        while status.read_text().rpartition(")")[2].split()[0] != "S":
            pass
        aborted_at.append(time.monotonic())
        registry.abort(epoch)

    thread = threading.Thread(target=abort_once_it_sleeps)
    thread.start()
    entered.set()
    with pytest.raises(error):
        wait()
    raised_at = time.monotonic()
    thread.join()
    return raised_at - aborted_at[0]
