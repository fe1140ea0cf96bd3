"""Trains a tiny model in one of the parallel layouts of ``parallel_layouts``, under protection.

``--die RANK:STEP:PHASE`` kills the first process of a rank there; PHASE is ``forward`` or
``backward`` (in the middle of the model) or ``stepped`` (after the optimizer); ``--hold`` lets it
stand still there instead, once it has made the file ``hold-RANK-STEP`` in the run directory.
``--with`` adds what training scripts have: ``clip`` the gradients, ``average`` the weights,
``scale`` the loss.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import deadpool_runtime as deadpool

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
import parallel_layouts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("layout", choices=parallel_layouts.LAYOUTS)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--die", action="append", default=[])
    parser.add_argument("--hold", action="append", default=[])
    parser.add_argument("--with", dest="features", action="append", default=[])
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    program = parallel_layouts.build(args.layout)
    model, optimizer = program.model, program.optimizer
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    extras: dict[str, Any] = {}
    if "average" in args.features:
        average: Any = torch.optim.swa_utils.get_ema_multi_avg_fn  # untyped
        extras["average"] = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average(0.9))
    if "scale" in args.features:
        extras["scaler"] = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        program.train = scaled(program.train, extras["scaler"])
    torch.manual_seed(100 + program.data_rank)

    job = deadpool.attach(model, optimizer, scheduler, extras=extras)
    job.state["losses"] = {}
    for step, number in job.steps(range(1, args.steps + 1)):

        def mark(phase: str, number: int = number) -> None:
            place = f"{rank}:{number}:{phase}"
            if place in [*args.die, *args.hold] and fuse(args.out / f"fuse-{rank}"):
                job.wait_confirmed(number - 1, 60.0)  # type: ignore[attr-defined]
                if place in args.die:
                    os.kill(os.getpid(), signal.SIGKILL)
                (Path(os.environ["DEADPOOL_RUN_DIR"]) / f"hold-{rank}-{number}").touch()
                time.sleep(3600)

        parallel_layouts.Mark.seen = mark
        with step:
            inputs, targets = parallel_layouts.batch(number, program.data_rank)
            optimizer.zero_grad()
            loss = program.train(inputs, targets)
            if "clip" in args.features:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if "scale" in args.features:
                extras["scaler"].step(optimizer)
                extras["scaler"].update()
            else:
                optimizer.step()
            scheduler.step()
            if "average" in args.features:
                extras["average"].update_parameters(model)
            mark("stepped")
            program.after(inputs, targets)
            job.state["losses"][str(number)] = loss
    (args.out / f"{rank}.json").write_text(json.dumps(job.state["losses"]))
    dist.destroy_process_group()


def scaled(train: Any, scaler: torch.amp.GradScaler) -> Any:
    """The same pass with the loss multiplied by the scaler's factor."""
    plain = parallel_layouts._loss

    def run(inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        parallel_layouts._loss = lambda output, target: scaler.scale(plain(output, target))
        try:
            return train(inputs, targets)
        finally:
            parallel_layouts._loss = plain

    return run


def fuse(path: Path) -> bool:
    """True the first time in the job's life."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    main()
