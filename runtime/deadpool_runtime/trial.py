"""A training of a few seconds on CPUs, by which ``deadpool preflight --self-test`` tries a site.

``--hold RANK:STEP``: the first process of the rank stands still in that step, until it is killed.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import deadpool_runtime as deadpool

_SAMPLES, _WIDTH, _BATCH = 64, 16, 4
#: A copy is confirmed sooner.
_CONFIRMED_S = 60.0


def _loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(_SAMPLES, _WIDTH, generator=generator)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return DataLoader(data, batch_size=_BATCH, sampler=DistributedSampler(data, seed=2))


def _hold() -> None:
    """Wait for the end, once in a job."""
    try:
        (Path(os.environ["DEADPOOL_RUN_DIR"]) / "held").touch(exist_ok=False)
    except (KeyError, FileExistsError):
        return
    while True:
        time.sleep(3600)


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hold", default=":", metavar="RANK:STEP")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    layers = nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 1)
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job = deadpool.attach(model, optimizer)
    for step, (inputs, targets) in job.steps(_loader(), max_steps=options.steps):
        with step:
            if options.hold == f"{dist.get_rank()}:{step.number}":
                # Nothing to wait for where the script runs by itself.
                if wait := getattr(job, "wait_confirmed", None):
                    wait(step.number - 1, _CONFIRMED_S)
                _hold()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            step.report(loss=loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
