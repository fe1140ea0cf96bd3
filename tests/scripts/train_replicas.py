"""A training of which each rank keeps its state of every step on disk, for tests of fewer ranks.

After step K rank R, by the job's numbers, writes ``<run dir>/state-K-R.pt``. ``--from DIR:STEP``
begins with the states that another run left there, and ``--as R0,R1`` as these ranks of it: with
their batches and their parts of the model. ``--hsdp N``: replicas of N ranks, with fully_shard.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import deadpool_runtime as deadpool
from deadpool_runtime.kinds import local_part


def parts(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """All tensors of the training state by name, this rank's part of each."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
    found: dict[str, torch.Tensor] = {}
    for index, parameter in enumerate(model.parameters()):
        found[f"{index}"] = local_part(parameter)
        state: dict[str, Any] = inner.state.get(parameter, {})
        found |= {f"{index} {name}": local_part(value) for name, value in state.items()}
    return found


def saved_parts(folder: Path, step: int, role: int, *, of_all: bool) -> dict[str, torch.Tensor]:
    """What rank ``role`` had, or with ``of_all`` besides what only others had."""
    own = f"state-{step}-{role}.pt"
    paths = [*(sorted(folder.glob(f"state-{step}-*.pt")) if of_all else ()), folder / own]
    found: dict[str, torch.Tensor] = {}
    for path in paths:
        found |= torch.load(path)["parts"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--hsdp", type=int, default=0)
    parser.add_argument("--zero", action="store_true")
    parser.add_argument("--from", dest="origin", default="")
    parser.add_argument("--as", dest="roles", default="")
    parser.add_argument("--wait-for", default="", help="STEP:SIZE: not past it with fewer ranks")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    # What the launcher numbers, whoever takes part at present.
    own = int(os.environ["RANK"])
    role = int(args.roles.split(",")[own]) if args.roles else own
    here = Path(os.environ["DEADPOOL_RUN_DIR"])
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    model: Any
    if args.hsdp:
        shape = (dist.get_world_size() // args.hsdp, args.hsdp)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        model = fully_shard(net, mesh=mesh)
    else:
        model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer: Any
    if args.zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # takes long

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = 0
    if args.origin:
        folder, _, step_text = args.origin.rpartition(":")
        first = int(step_text)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # makes its state
        optimizer.zero_grad()
        with torch.no_grad():
            saved = saved_parts(Path(folder), first, role, of_all=args.zero)
            for name, tensor in parts(model, optimizer).items():
                tensor.copy_(saved[name])
    generator = torch.Generator().manual_seed(100 + role)
    batches = list(torch.randn(args.steps, 6, 8, generator=generator))[first:]
    job = deadpool.attach(model, optimizer)
    for step, batch in job.steps(batches, epochs=1):
        number = first + step.number
        with step:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            wait_step, _, size = args.wait_for.partition(":")
            while wait_step == str(number) and job.world_size < int(size):
                dist.barrier()  # is broken off when more take part
                time.sleep(0.05)
            numbers = torch.tensor(float(job.world_size))
            dist.all_reduce(numbers)
            assert dist.get_world_size() == job.world_size
            assert numbers == job.world_size**2
        if step.completed:
            state = {"parts": parts(model, optimizer), "size": job.world_size}
            torch.save(state, here / f"state-{number}-{role}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
