"""A loop of the shape of Megatron-LM's ``train()``, with the lines that docs/recipes.md puts in it.

Stands in for what the recipe leans on: the loader whose sampler begins at ``consumed_samples``, the
counters in ``args``, the learning rate that follows from samples, and the state machine that asks
whether a step has run already.
"""

from __future__ import annotations

import itertools
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import deadpool_runtime as deadpool

SAMPLES, MICRO_BATCH, MICRO_BATCHES = 160, 2, 2


# --8<-- [start:steps]
class Steps:
    def __init__(self, loader: Any, per_step: int) -> None:
        self.loader, self.per_step, self.taken = loader, per_step, 0
        self.first = loader.batch_sampler.consumed_samples

    def __iter__(self) -> Iterator[Any]:
        sampler = self.loader.batch_sampler
        width = self.per_step * sampler.micro_batch_times_data_parallel_size
        sampler.consumed_samples = self.first + self.taken * width
        # At once: a DataLoader draws a random number when its iterator is made.
        return self.groups(iter(self.loader))

    def groups(self, batches: Iterator[Any]) -> Iterator[Any]:
        while len(group := list(itertools.islice(batches, self.per_step))) == self.per_step:
            self.taken += 1
            yield group

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


class Counts:
    NAMES = ("consumed_train_samples", "skipped_train_samples")

    def __init__(self, args: Any) -> None:
        self.args = args

    def state_dict(self) -> dict[str, int]:
        return {name: getattr(self.args, name) for name in self.NAMES}

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self.args).update(state)


# --8<-- [end:steps]


class Sampler:
    """As ``MegatronPretrainingSampler``."""

    def __init__(self, consumed_samples: int, rank: int, world_size: int) -> None:
        self.consumed_samples = consumed_samples
        self.rank = rank
        self.micro_batch_times_data_parallel_size = MICRO_BATCH * world_size

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[list[int]]:
        width, first = self.micro_batch_times_data_parallel_size, self.rank * MICRO_BATCH
        for at in range(self.consumed_samples, SAMPLES - width + 1, width):
            yield list(range(at + first, at + first + MICRO_BATCH))


class Reruns:
    """As ``RerunStateMachine`` when it is disabled: true once, then false, and so on."""

    def __init__(self) -> None:
        self.state = "not running yet"

    def should_run_forward_backward(self) -> bool:
        begins = self.state == "not running yet"
        self.state = "initial run" if begins else "not running yet"
        return begins


class Scheduler:
    """As ``OptimizerParamScheduler``: what it goes by is samples."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.num_steps = optimizer, 0

    def step(self, increment: int) -> None:
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 / (1 + self.num_steps / 50)

    def state_dict(self) -> dict[str, int]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_steps = state["num_steps"]
        self.step(0)


def main() -> None:
    """Train, and tell what is the same in a run that lost nothing."""
    torch.distributed.init_process_group("gloo")
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    data = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    args = Namespace(iteration=0, train_iters=8, consumed_train_samples=0, skipped_train_samples=0)
    loader = DataLoader(
        TensorDataset(data), batch_sampler=Sampler(args.consumed_train_samples, rank, world_size)
    )
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 8))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler, reruns = Scheduler(optimizer), Reruns()
    batch_size = MICRO_BATCH * MICRO_BATCHES * world_size

    start = args.iteration
    job = deadpool.attach([model], [optimizer], extras={"lr": scheduler, "counts": Counts(args)})
    for step, batches in job.steps(
        Steps(loader, MICRO_BATCHES), max_steps=args.train_iters - start
    ):
        with step:
            if "--keep-state" not in sys.argv:
                reruns.state = "not running yet"
            data_iterator = iter(batches)
            while reruns.should_run_forward_backward():
                optimizer.zero_grad()
                for _ in range(MICRO_BATCHES):
                    (samples,) = next(data_iterator)
                    (model(samples) - samples).square().mean().backward()
            optimizer.step()
            scheduler.step(batch_size)
            args.consumed_train_samples += batch_size
    told = {"rank": rank, "args": vars(args), "samples": scheduler.num_steps, "step": step.number}
    print("TOLD", json.dumps(told), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
