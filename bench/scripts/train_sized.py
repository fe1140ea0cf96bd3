"""One rank of a measurement: trains a model of a given size, with protection on and off by turns.

Blocks of steps with and without copies of the state follow each other in the order A B B A, so that
whatever else the machine does meets both alike. The time of a step is that from the start of its
body to the start of the next one's. Writes ``rank-N.json`` into the folder given by ``--out``.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import deadpool_runtime as deadpool


class Block(nn.Module):
    """The two matrices that hold most of a transformer layer's parameters, and as many again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 2 * width)
        self.mixed = nn.Linear(2 * width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mixed(torch.tanh(self.mix(self.norm(x))))
        out: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return out


def build(layout: str, width: int, layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model in its wrapper, and AdamW over it."""
    torch.manual_seed(1)
    blocks = [Block(width) for _ in range(layers)]
    model: nn.Module = nn.Sequential(*blocks)
    if layout == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)
    model = DistributedDataParallel(model)
    if layout == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", choices=("ddp", "zero1", "fsdp"), default="ddp")
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="a rank and step")
    parser.add_argument("--block", type=int, default=5, help="steps in a row of the same kind")
    parser.add_argument("--rounds", type=int, default=4, help="times A B B A")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, optimizer = build(options.layout, options.width, options.layers)
    job: Any = deadpool.attach(model, optimizer)
    # Copies begin with step 1: the optimizer's state is there then, and every size is final.
    kinds = [True] * 3
    for _ in range(options.rounds):
        for kind in (True, False, False, True):
            kinds += [kind] * options.block
    batch = torch.randn(
        options.tokens, options.width, generator=torch.Generator().manual_seed(rank)
    )
    starts: list[float] = []
    blocked: list[float] = []
    for step, data in job.steps([batch], max_steps=len(kinds)):
        with step:
            starts.append(time.monotonic())
            # The copy of this step's end, and so the next step's time, is with or without.
            job._snapshots.paused = not kinds[min(step.number, len(kinds) - 1)]
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
            blocked.append(job._guard.blocked_s)
    copied = {
        ",".join(map(str, ranks)): nbytes
        for ranks, nbytes in job._snapshots.segments_nbytes().items()
    }
    result = {
        "rank": rank,
        "kinds": kinds,
        "starts": starts,
        "blocked_s": blocked,
        "unprotected": job._guard.unprotected,
        "parameters": sum(each.numel() for each in model.parameters()),
        "segments": copied,
    }
    (options.out / f"rank-{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
