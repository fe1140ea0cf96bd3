"""One rank of a measurement: trains a model of a given size, with protection on and off by turns.

Blocks of steps of different kinds follow each other forwards and backwards (A B B A), so that
whatever else the machine does meets all alike. The time of a step is that from the start of its
body to the start of the next one's. Kinds: ``plain``; ``copies``, with protection; ``memory`` and
``disk``, with a checkpoint by ``torch.distributed.checkpoint`` at the end of each step, into
/dev/shm or into ``--out``. Writes ``rank-N.json`` into the folder given by ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import deadpool_runtime as deadpool

OWN_LAYOUTS = ("ddp", "zero1", "fsdp")
#: Kinds of steps; the first ones of a run are of the first kind.
KINDS = ("copies", "plain", "memory", "disk")
_SETTLING = 3


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


Training = tuple[nn.Module, torch.optim.Optimizer, Callable[[], object]]


def own(layout: str, width: int, layers: int, tokens: int) -> Training:
    """One of the layouts above, and a forward and backward pass over the rank's batch."""
    model, optimizer = build(layout, width, layers)
    generator = torch.Generator().manual_seed(dist.get_rank())
    data = torch.randn(tokens, width, generator=generator)

    def train() -> None:
        loss: Any = model(data).square().mean()
        loss.backward()

    return model, optimizer, train


def shared(layout: str, width: int, tokens: int) -> Training:
    """One of the layouts that tests use, as large as wanted."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
    import parallel_layouts

    parallel_layouts.WIDTH, parallel_layouts.BATCH = width, tokens
    parallel_layouts.BUCKET_MB = 25
    program = parallel_layouts.build(layout)
    inputs, targets = parallel_layouts.batch(1, program.data_rank)
    return program.model, program.optimizer, lambda: program.train(inputs, targets)


def checkpoint(
    layout: str, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path
) -> None:
    """What a training script writes with torch's distributed checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    rank, world = dist.get_rank(), dist.get_world_size()
    state: dict[str, Any]
    if layout == "zero1":
        inner: Any = optimizer
        # Each rank has a part of the optimizer, which no other rank is to overwrite.
        state = {"model": model.state_dict(), f"optimizer-{rank}": inner.optim.state_dict()}
    else:
        weights, kept = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": kept}
    if "1f1b" in layout:
        # The stages' parameters have the same names.
        state = {f"stage-{2 * rank // world}": state}
    dcp.save(state, checkpoint_id=folder)


def order(kinds: Sequence[str], block: int, rounds: int) -> list[str]:
    """The kind of each step: all forwards, then backwards, in blocks."""
    # Copies begin with step 1: the optimizer's state is there then, and every size is final.
    there_and_back = [kind for each in (*kinds, *reversed(kinds)) for kind in [each] * block]
    return [kinds[0]] * _SETTLING + there_and_back * rounds


def bind(rank: int) -> None:
    """Keep the training thread on a core of its own where there are enough, as sites do with ranks:
    otherwise two ranks share a core now and then while another is idle, which hides all else.

    Other threads, and processes beside the ranks, run where the kernel puts them.
    """
    cores = sorted(os.sched_getaffinity(0))
    if dist.get_world_size() <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", default="ddp")
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="a rank and step")
    parser.add_argument("--block", type=int, default=5, help="steps in a row of the same kind")
    parser.add_argument("--rounds", type=int, default=4, help="times there and back")
    parser.add_argument("--kinds", nargs="+", default=KINDS[:2], choices=KINDS)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layout = options.layout
    if layout in OWN_LAYOUTS:
        model, optimizer, train = own(layout, options.width, options.layers, options.tokens)
    else:
        model, optimizer, train = shared(layout, options.width, options.tokens)
    job: Any = deadpool.attach(model, optimizer)
    bind(rank)
    kinds = order(options.kinds, options.block, options.rounds)
    folders = {"memory": Path("/dev/shm/checkpoint"), "disk": options.out / "checkpoint"}
    starts: list[float] = []
    blocked: list[float] = []
    for step, _ in job.steps([0], max_steps=len(kinds)):
        with step:
            starts.append(time.monotonic())
            # The copy of this step's end, and so the next step's time, is with or without.
            job._snapshots.paused = kinds[min(step.number, len(kinds) - 1)] != "copies"
            optimizer.zero_grad()
            train()
            optimizer.step()
            blocked.append(job._guard.blocked_s)
            if folder := folders.get(kinds[step.number - 1]):
                checkpoint(layout, model, optimizer, folder)
    copied = {
        ",".join(map(str, ranks)): nbytes
        for ranks, nbytes in job._snapshots.segments_nbytes().items()
    }
    parameters = sum(each.numel() for each in model.parameters())
    result = {
        "rank": rank,
        "kinds": kinds,
        "starts": starts,
        "blocked_s": blocked,
        "unprotected": job._guard.unprotected,
        # Those that this rank computes with; tensor parallelism is over two ranks.
        "parameters": parameters // 2 if layout.endswith("_tp") else parameters,
        "segments": copied,
    }
    (options.out / f"rank-{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    for folder in folders.values():
        shutil.rmtree(folder, ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
