"""A small data-parallel training that goes wrong where it is told to, and writes down the digest of
each rank's state after every step.

``ORDERS`` is a folder that every node sees. A file ``RANK.STEP.PLACE.KIND`` there is an order to
that rank: in the first step from STEP on it does KIND when it comes to PLACE, which is ``start``,
``backward`` (in the middle of it) or ``updated`` (after the optimizer); ``build`` is the beginning
of a later process of the rank. The file gets the ending ``.done`` first, so that nobody does it
again. The file ``stop`` holds the number of the last step.

``digests-RANK`` in the folder has a line ``STEP DIGEST`` for each completed step.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import random
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from small_net import Marker, scale_of_step, seeded_loader, seeded_net
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import deadpool_runtime as deadpool
from deadpool_runtime.context import current_context
from deadpool_runtime.groups.sockets import shut

#: Seconds that a rank which was told to be slow sleeps in each step.
SLOW_S = 0.2
#: What a rank that is to run out of memory asks for at a time.
PIECE_NBYTES = 16 << 20


class Orders:
    """The orders to one rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = str(rank)
        self.slow = False
        self.skip = False
        self.job: Any = None

    def at(self, step: int, place: str) -> None:
        """Carry out what is to be done here."""
        for name in os.listdir(self._folder):
            words = name.split(".")
            if len(words) != 4 or (words[0], words[2]) != (self._rank, place):
                continue
            if int(words[1]) <= step and self._take(name):
                self._do(words[3], self._folder / f"{name}.done", step)

    def _take(self, name: str) -> bool:
        try:
            os.rename(self._folder / name, self._folder / f"{name}.done")
        except FileNotFoundError:
            return False
        return True

    def _do(self, kind: str, path: Path, step: int) -> None:
        if hasattr(self.job, "wait_confirmed"):
            # Else a death would cost one step more at times.
            self.job.wait_confirmed(step - 1, 60.0)
        match kind:
            case "hold":
                path.with_suffix(".held").touch()
                while not path.with_suffix(".release").exists():
                    time.sleep(0.01)
            case "segv":
                ctypes.string_at(0)
            case "raise":
                raise ValueError(f"rank {self._rank} does not like step {step}")
            case "exit":
                sys.exit(0)
            case "oom":
                # The driver has put this process under a limit by now.
                pieces = []
                while True:
                    pieces.append(bytearray(os.urandom(4096) * (PIECE_NBYTES // 4096)))
            case "lock":
                ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
            case "cut":
                registry = current_context().registry  # type: ignore[union-attr]
                shut([record.watch for record in registry.groups])
            case "skip":
                self.skip = True
            case "slow":
                self.slow = True
            case _:
                raise ValueError(f"no such order: {kind}")

    def last_step(self, most: int) -> int:
        """The number of the last step, as far as is known."""
        try:
            return int((self._folder / "stop").read_text())
        except (FileNotFoundError, ValueError):
            return most


def digest(model: nn.Module, optimizer: Any, seen: int) -> str:
    """One hash of everything that this rank must have the same bits of."""
    found = hashlib.sha256()
    for value in model.state_dict().values():
        found.update(value.contiguous().numpy().tobytes())
    state = getattr(optimizer, "optim", optimizer).state
    for group in optimizer.param_groups:
        found.update(repr(group["lr"]).encode())
        for parameter in group["params"]:
            for name, value in sorted(state.get(parameter, {}).items()):
                found.update(name.encode() + torch.as_tensor(value).numpy().tobytes())
    found.update(torch.get_rng_state().numpy().tobytes())
    found.update(repr((random.getstate(), np.random.get_state(), seen)).encode())
    return found.hexdigest()[:32]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("orders", type=Path)
    parser.add_argument("--layout", choices=["ddp", "zero"], default="zero")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--step-s", type=float, default=0.0, help="seconds a step takes at least")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    orders = Orders(args.orders, rank)
    record = os.open(args.orders / f"digests-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    was_here = args.orders / f"was-here-{rank}"
    if was_here.exists():
        orders.at(0, "build")
    was_here.touch()
    net = seeded_net(rank)
    model = DistributedDataParallel(net, bucket_cap_mb=0.01)
    side = dist.new_group(list(range(dist.get_world_size())))
    optimizer: torch.optim.Optimizer
    if args.layout == "zero":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1.0 / (1.0 + 0.01 * k))
    loader = seeded_loader()

    orders.job = job = deadpool.attach(model, optimizer, scheduler)
    job.state["seen"] = 0
    for step, (ids, inputs, targets) in job.steps(loader, max_steps=args.steps):
        with step:
            number = step.number
            started = time.monotonic()
            orders.at(number, "start")
            Marker.hook = partial(orders.at, number, "backward")
            scale = scale_of_step()
            loss = nn.functional.cross_entropy(model(inputs * scale), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            if orders.skip:
                orders.skip = False
            else:
                dist.all_reduce(torch.tensor([loss.item()]), group=side)
            optimizer.step()
            orders.at(number, "updated")
            scheduler.step()
            optimizer.zero_grad()
            job.state["seen"] = (job.state["seen"] * 31 + int(ids.sum())) % (1 << 61)
            at_least_s = args.step_s + (SLOW_S if orders.slow else 0.0)
            time.sleep(max(0.0, at_least_s - (time.monotonic() - started)))
            step.report(loss=loss.item())
            if number >= orders.last_step(args.steps):
                step.stop()
        if step.completed:
            line = f"{step.number} {digest(net, optimizer, job.state['seen'])}\n"
            os.write(record, line.encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
