"""One rank of the training that is struck in ``bench/recovery.py``; every system runs this script.

A step consists of parts with a forward and a backward pass, an all-reduce of the gradients and a
sleep each, so that it takes about ``--step-s`` on a machine that has nothing else to do. What every
rank completed, and when, goes to ``rank-N.jsonl`` in the folder ``--out``: ``begun`` once a process
is about to train, ``step`` for each completed one, ``broken`` for what an exception says.

Under DEADPOOL the runtime keeps the state. Elsewhere rank 0 writes a checkpoint every ``--every``
steps, and every process begins with the newest one: what a script does that counts on being started
again.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from train_sized import build

import deadpool_runtime as deadpool
from deadpool_runtime.context import current_context
from deadpool_runtime.groups.sockets import shut

PARTS = 5
TOKENS = 8


class Diary:
    """Lines that outlive the process."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank = rank
        self._file = os.open(
            folder / f"rank-{rank}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644
        )

    def write(self, kind: str, **fields: Any) -> None:
        """Add a line, in one piece."""
        line = json.dumps({"kind": kind, "at": time.time(), "rank": self._rank, **fields})
        os.write(self._file, f"{line}\n".encode())


def load(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Take over the newest checkpoint; returns its step, 0 without any."""
    path = folder / "checkpoint.pt"
    if not path.exists():
        return 0
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def save(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write a checkpoint that is there whole or not at all."""
    begun = folder / "checkpoint.begun"
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, begun
    )
    begun.rename(folder / "checkpoint.pt")


def cut_connections() -> None:
    """Break this rank's own connections to the others."""
    context = current_context()
    assert context is not None
    shut([record.watch for record in context.registry.groups])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--timeout", type=float, default=600.0, help="of a collective, in seconds")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--cut", metavar="RANK:STEP", default=":", help="break connections there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    protected = "DEADPOOL_RUN_DIR" in os.environ
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout))
    rank = dist.get_rank()
    diary = Diary(options.out, rank)
    model, optimizer = build("ddp", options.width, options.layers)
    generator = torch.Generator().manual_seed(rank)
    batch = torch.randn(TOKENS, options.width, generator=generator)
    job: Any = deadpool.attach(model, optimizer)
    first = 0 if protected else load(options.out, model, optimizer)

    def steps() -> Iterator[tuple[int, AbstractContextManager[Any]]]:
        if protected:
            for step, _ in job.steps([batch], max_steps=options.steps):
                yield step.number, step
        else:
            for number in range(first + 1, options.steps + 1):
                yield number, nullcontext()

    diary.write("begun", node=socket.gethostname(), pid=os.getpid(), first=first + 1)
    try:
        for number, guard in steps():
            with guard:
                optimizer.zero_grad()
                for part in range(PARTS):
                    if (
                        options.cut == f"{rank}:{number}"
                        and part == PARTS // 2
                        and first_time(options.out)
                    ):
                        diary.write("struck")
                        cut_connections()
                    loss = model(batch).square().mean() / PARTS
                    loss.backward()
                    time.sleep(options.step_s / PARTS)
                optimizer.step()
                diary.write("step", step=number, loss=loss.item().hex())
            if not protected and rank == 0 and number % options.every == 0:
                save(options.out, model, optimizer, number)
    except Exception as error:
        diary.write("broken", why=f"{type(error).__name__}: {error}"[:200])
        raise
    dist.destroy_process_group()


def first_time(folder: Path) -> bool:
    """Whether nobody asked before."""
    try:
        (folder / "cut").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    main()
