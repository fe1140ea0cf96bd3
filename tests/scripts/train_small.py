"""A tiny data-parallel training that uses every kind of state a rank can have, for tests.

``--hold RANK:STEP:WHERE`` makes the first process of a rank stand still inside that step, where
WHERE is ``forward``, ``backward`` or ``optimizer`` (after the update, before the step ends): it
makes the file ``<run dir>/hold-RANK-STEP`` and waits to be killed or for ``release-RANK-STEP``, so
that a test knows exactly where a fault lands. ``--hold-replacement RANK`` does the same while a
later process of that rank builds its model (as step 0).

``--hang RANK:STEP:HOW`` makes that step go wrong in that rank, the first time or, with HOW ending
in ``-twice`` or ``-always``, the second time or every time too: ``skip`` leaves out the collective
of the side group, ``lock`` reads with Python's lock held what never comes, ``cut`` breaks the
rank's own connections. ``all`` stands for every rank.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_net import Marker, scale_of_step, seeded_loader, seeded_net
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import deadpool_runtime as deadpool
from deadpool_runtime.context import current_context
from deadpool_runtime.groups.sockets import shut


def hold(name: str, job: Any = None, step: int = 0) -> None:
    """Say that the place is reached, then wait to be killed or released.

    Once per run: a later process goes straight on. The state before is in a safe place first, so
    that a death here costs the same each time.
    """
    if hasattr(job, "wait_confirmed"):
        job.wait_confirmed(step - 1, 60.0)
    path = Path(os.environ["DEADPOOL_RUN_DIR"]) / f"hold-{name}"
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return
    released = path.with_name(f"release-{name}")
    while not released.exists():
        time.sleep(0.02)


def first_time(name: str) -> bool:
    """Whether this place of the run was not reached before."""
    try:
        (Path(os.environ["DEADPOOL_RUN_DIR"]) / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def later_process(rank: int) -> bool:
    """Whether another process of this rank ran before this one."""
    return not first_time(f"was-here-{rank}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "sgd"])
    parser.add_argument("--ddp", default="plain", choices=["plain", "bucket-view", "unused"])
    parser.add_argument(
        "--step-s", type=float, default=0.0, help="seconds each step takes at least"
    )
    parser.add_argument("--slow", metavar="RANK:SECONDS", default=":0", help="in each forward")
    parser.add_argument("--hold", action="append", default=[], metavar="RANK:STEP:WHERE")
    parser.add_argument("--hang", metavar="RANK:STEP:HOW", default="::")
    parser.add_argument("--hold-replacement", type=int, metavar="RANK")
    parser.add_argument("--raise-at", metavar="RANK:STEP")
    parser.add_argument("--side-group", action="store_true")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    slow_rank, _, slow_s = args.slow.partition(":")
    hang_rank, hang_step, hang_how = args.hang.split(":")
    holds = {tuple(text.split(":")) for text in args.hold}
    if args.hold_replacement == rank and later_process(rank):
        hold(f"{rank}-0")
    net = seeded_net(rank, args.width)
    options: dict[str, Any] = {
        "plain": {},
        "bucket-view": {"gradient_as_bucket_view": True},
        "unused": {"find_unused_parameters": True},
    }[args.ddp]
    model = DistributedDataParallel(net, bucket_cap_mb=0.01, **options)
    side = dist.new_group(list(range(dist.get_world_size()))) if args.side_group else None
    optimizer: torch.optim.Optimizer
    if args.optimizer == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, (k + 1) / 5))
    loader = seeded_loader()

    job = deadpool.attach(model, optimizer, scheduler)
    job.state["samples"] = []
    for step, (ids, inputs, targets) in job.steps(loader, max_steps=args.steps):
        with step:
            place = {where for r, k, where in holds if (int(r), int(k)) == (rank, step.number)}
            name = f"{rank}-{step.number}"
            stop = partial(hold, name, job, step.number)
            Marker.hook = stop if "backward" in place else None
            if args.raise_at == f"{rank}:{step.number}":
                raise ValueError(f"rank {rank} does not like step {step.number}")
            how = ""
            if (hang_rank in ("all", str(rank)) and hang_step == str(step.number)) and (
                hang_how.endswith("-always")
                or first_time(f"hang-{name}")
                or (hang_how.endswith("-twice") and first_time(f"hang-{name}-again"))
            ):
                how = hang_how.removesuffix("-always").removesuffix("-twice")
            started = time.monotonic()
            if "forward" in place:
                stop()
            if slow_rank == str(rank):
                time.sleep(float(slow_s))
            scale = scale_of_step()
            losses = []
            for half in (slice(0, 4), slice(4, 8)):
                context = model.no_sync() if half.start == 0 else torch.enable_grad()
                with context:
                    loss = nn.functional.cross_entropy(model(inputs[half] * scale), targets[half])
                    (loss / 2).backward()  # type: ignore[no-untyped-call]
                losses.append(loss.item())
            if how == "cut":
                registry = current_context().registry  # type: ignore[union-attr]
                shut([record.watch for record in registry.groups])
            if how == "lock":
                ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
            if side is not None and how != "skip":
                dist.all_reduce(torch.tensor(losses), group=side)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            job.state["samples"] = [*job.state["samples"], *ids.tolist()]
            if "optimizer" in place:
                stop()
            time.sleep(max(0.0, args.step_s - (time.monotonic() - started)))
            step.report(loss=sum(losses) / 2)
    print(f"rank {rank} saw {len(job.state['samples'])} samples")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
