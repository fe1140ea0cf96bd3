"""A training script with everything in it that a recovery must bring back, and ways to die.

DDP, batch normalisation, dropout, AdamW, a schedule, a shuffled DataLoader, numbers drawn from
torch, Python and numpy in the body, and values of its own in ``job.state``. It runs the same under
a launcher, ``torchrun`` and plain Python, and writes what it ended with to OUT/RANK.json.
"""

import argparse
import copy
import hashlib
import json
import os
import random
import signal
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import deadpool_runtime as deadpool


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Item i: features and a target that depend on i alone, with random noise on top."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        features = torch.randn(16, generator=generator) + 0.01 * torch.randn(16)
        return features, features[:4].sin(), index


class Bomb(nn.Module):
    """Passes its input on; in the backward pass it calls ``Bomb.armed`` half way."""

    armed: Callable[[], None] | None = None

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if value.requires_grad and Bomb.armed is not None:
            value.register_hook(Bomb.explode)  # type: ignore[no-untyped-call]
        return value

    @staticmethod
    def explode(gradient: torch.Tensor) -> None:
        if Bomb.armed is not None:
            Bomb.armed()


def fuse(directory: Path, name: str) -> bool:
    """True the first time in the job's life; a replacement must not die of the same cause."""
    try:
        os.close(os.open(directory / f"fuse-{name}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def die(job: Any, step: int) -> None:
    if hasattr(job, "wait_confirmed"):
        job.wait_confirmed(step - 1, 60.0)  # else its death would cost another step at times
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.001)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--epochs", type=int)
    # RANK:STEP:PHASE, phase one of start, backward, ahead, late, end
    parser.add_argument("--die", action="append", default=[])
    parser.add_argument("--raise-at", default="")
    parser.add_argument("--stop-at", type=int, default=0)
    parser.add_argument("--break-at", type=int, default=0)
    parser.add_argument("--in-place", action="store_true")
    parser.add_argument("--accumulate-wrongly", action="store_true")
    # An exception of the backward pass or of the optimizer is caught, and the step goes on.
    parser.add_argument("--swallow", action="store_true")
    # From this step on no gradients are averaged, so that the ranks' parameters drift apart.
    parser.add_argument("--local-from", type=int, default=1 << 30)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--width", type=int, default=32)
    # Builds the model in `initial_weights()`; the loss uses a copy of it that nobody saves.
    parser.add_argument("--initial-weights", action="store_true")
    args = parser.parse_args()

    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(7)
    with deadpool.initial_weights() if args.initial_weights else nullcontext() as block:
        model: nn.Module = nn.Sequential(
            nn.Linear(16, args.width),
            nn.BatchNorm1d(args.width),
            nn.Dropout(0.2),
            nn.Linear(args.width, args.width),
            Bomb(),
            nn.ReLU(),
            nn.Linear(args.width, 4),
        )
    teacher = copy.deepcopy(model).eval().requires_grad_(False) if args.initial_weights else None
    if world_size > 1:
        model = DistributedDataParallel(model, bucket_cap_mb=0.005)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    torch.manual_seed(100 + rank)
    random.seed(200 + rank)
    np.random.seed(300 + rank)

    dataset = Numbers()
    sampler: DistributedSampler[Any] | None = None
    if world_size > 1:
        sampler = DistributedSampler(dataset, world_size, rank, shuffle=True)
    loader = DataLoader(
        dataset, 4, shuffle=sampler is None, sampler=sampler, num_workers=args.workers
    )

    job = deadpool.attach(model, optimizer, scheduler)
    job.state["seen"] = []
    deaths = [(int(r), int(s), phase) for r, s, phase in (d.split(":") for d in args.die)]
    watched: list[weakref.ref[torch.Tensor]] = []
    redone: list[bool] = []

    def forward_backward(batch: list[torch.Tensor]) -> torch.Tensor:
        activation = model(batch[0])
        watched.append(weakref.ref(activation))
        loss = (activation - batch[1]).pow(2).mean() * (1 + random.random() + np.random.rand())
        if teacher is not None:
            loss = loss + (activation - teacher(batch[0])).pow(2).mean()
        loss.backward()
        detached: torch.Tensor = loss.detach()
        return detached

    limits = {"max_steps": args.max_steps} if args.max_steps else {"epochs": args.epochs}
    for step, batch in job.steps(loader, **limits):
        if watched:
            redone.append(watched[-1]() is None)
        with step:
            mine = [p for r, s, p in deaths if r == rank and s == step.number]
            mine = [p for p in mine if fuse(args.out, f"{rank}-{step.number}-{p}")]
            (args.out / f"began-{rank}-{step.number}").touch()
            if "start" in mine or "backward" in mine:
                # Only then has every rank sealed the state before.
                for other in range(world_size):
                    wait_for(args.out / f"began-{other}-{step.number}")
            if "start" in mine:
                die(job, step.number)
            Bomb.armed = partial(die, job, step.number) if "backward" in mine else None
            if args.in_place:
                batch[0].add_(1.0)
            optimizer.zero_grad()
            local = step.number >= args.local_from and isinstance(model, DistributedDataParallel)
            if local:
                dist.barrier()
            loss = torch.zeros(())
            with suppress(Exception) if args.swallow else nullcontext():
                with model.no_sync() if local else nullcontext():  # type: ignore[operator]
                    loss = forward_backward(batch)
            if args.swallow and any(s == step.number and r != rank for r, s, _ in deaths):
                time.sleep(0.5)  # until it is known that the other died
            if "ahead" in mine:
                # The others have all they need to end this step and wait for this rank in the next.
                for other in set(range(world_size)) - {rank}:
                    wait_for(args.out / f"began-{other}-{step.number + 1}")
                die(job, step.number)
            if "late" in mine:
                wait_for(args.out / f"ended-{(rank + 1) % world_size}")
                die(job, step.number)
            if args.raise_at == f"{rank}:{step.number}":
                raise ZeroDivisionError("the script's own mistake")
            if not args.accumulate_wrongly:
                with suppress(RuntimeError) if args.swallow else nullcontext():
                    optimizer.step()
            scheduler.step()
            job.state["seen"] = job.state["seen"] + batch[2].tolist()
            step.report(loss=float(loss))
            if step.number == args.stop_at:
                step.stop()
            if "end" in mine:
                die(job, step.number)
        if step.number == args.break_at:
            break

    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    digest.update(repr((random.random(), np.random.rand(), torch.rand(1).item())).encode())
    result = {"hash": digest.hexdigest(), "seen": job.state["seen"], "freed": redone}
    if block is not None:
        result |= {"drawn": block.drawn, "skipped": block.skipped}
    (args.out / f"{rank}.json").write_text(json.dumps(result))


main()
