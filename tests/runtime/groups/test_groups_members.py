"""Groups of which some members are set aside for a while: sizes, ranks and sums are of the rest."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deadpool_runtime.groups import ddp, members
from deadpool_runtime.groups.registry import GroupRegistry

PATIENCE = timedelta(seconds=60)


def test_groups_get_smaller_and_whole_again_under_the_same_objects(crew: Any) -> None:
    """Rank 1 of three is set aside, and comes back as another process."""

    def body(rank: int, since: int) -> list[dict[str, Any]]:
        registry = GroupRegistry()
        registry.install(detached=since > 0)
        store = registry.open_store("127.0.0.1", crew.port, PATIENCE)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=PATIENCE)
        world = dist.group.WORLD
        assert world is not None
        pairs = [dist.new_group([a, b]) for a, b in ((0, 1), (1, 2), (0, 2))]
        mine = [pair for pair in pairs if isinstance(pair, dist.ProcessGroup)]
        model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        ddp.freeze(model)
        client = crew.client()
        seen: list[dict[str, Any]] = []
        if rank == 1 and not since:
            return seen
        for epoch, aside in ((1, [1]), (2, []))[since // 2 :]:
            if epoch > since:
                # An abort breaks what the others are still in.
                client.set(f"{epoch}/{rank}", "")
                client.wait([f"{epoch}/0", f"{epoch}/2"])
            registry.abort(epoch)
            store = registry.open_store("127.0.0.1", crew.port, PATIENCE)
            registry.rebuild(epoch, store, aside=aside)
            ddp.reset(model)
            model.zero_grad()
            model(torch.tensor([[[3.0, 12.0, 9.0][rank]]])).sum().backward()
            ones = torch.ones(1)
            dist.all_reduce(ones)
            told = torch.tensor([rank + 10.0])
            dist.broadcast(told, src=0)
            seen.append(
                {
                    "size": dist.get_world_size(),
                    "rank": dist.get_rank(),
                    "sum": ones.item(),
                    "first": told.item(),
                    "average": model.module.weight.grad.item(),
                    "pairs": [(dist.get_world_size(p), dist.get_rank(p)) for p in mine],
                    "ranks": dist.get_process_group_ranks(world),
                    "all": members.ranks_of(world),
                    "same": dist.group.WORLD is world,
                }
            )
        return seen

    first = crew.start(body, 1, 0)
    workers = [crew.start(body, rank, 0) for rank in (0, 2)]
    assert first.result() == []
    late = crew.start(body, 1, 2)
    fewer = {"size": 2, "sum": 2.0, "average": 6.0, "ranks": [0, 1], "first": 10.0}
    whole = {"size": 3, "sum": 3.0, "average": 8.0, "ranks": [0, 1, 2], "first": 10.0}
    same = {"all": [0, 1, 2], "same": True}
    assert workers[0].result() == [
        {**fewer, **same, "rank": 0, "pairs": [(1, 0), (2, 0)]},
        {**whole, **same, "rank": 0, "pairs": [(2, 0), (2, 0)]},
    ]
    assert workers[1].result() == [
        {**fewer, **same, "rank": 1, "pairs": [(1, 0), (2, 1)]},
        {**whole, **same, "rank": 2, "pairs": [(2, 1), (2, 1)]},
    ]
    assert late.result() == [{**whole, **same, "rank": 1, "pairs": [(2, 1), (2, 0)]}]
