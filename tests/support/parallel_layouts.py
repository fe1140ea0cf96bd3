"""Tiny models in every parallel layout, each as a program would build it.

``LAYOUTS`` maps a name to the number of ranks and a function that builds one rank's part. Import
this before forking: it loads all of torch's parallel libraries, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

# Measurements set these to other values before they build anything.
WIDTH = 12  # divisible by 2 and 4, and no power of two, so that sums round
BATCH = 8
MICROBATCHES = 4
BUCKET_MB = 0.002  # so small that there are several


class Mark(torch.autograd.Function):
    """Tells ``Mark.seen`` that a forward or backward pass has come to the middle of the model."""

    seen: ClassVar[Callable[[str], None]] = staticmethod(lambda _: None)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Mark.seen("forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        Mark.seen("backward")
        return gradients[0]


class Block(nn.Module):
    """Something to split by columns and rows, something to leave whole, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.down(torch.tanh(self.up(self.norm(x))))
        result: torch.Tensor = x + self.dropout(inner)
        return result


class Model(nn.Module):
    """A stack of blocks, marked in its middle; also one stage of a pipeline."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == len(self.blocks) // 2 - 1:
                x = Mark.apply(x)  # type: ignore[no-untyped-call]
        result: torch.Tensor = self.head(x) * self.scale
        return result


@dataclass
class Program:
    """What a training script holds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    #: Which part of the data this rank trains on.
    data_rank: int
    #: Forward and backward pass over one batch; the loss where it is known.
    train: Callable[[torch.Tensor, torch.Tensor], float | None]
    #: What follows the optimizer's step, such as an evaluation.
    after: Callable[[torch.Tensor, torch.Tensor], object] = lambda inputs, targets: None


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.float() - target).square().mean()


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _zero(parameters: Any) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.01)


def _finish(model: Any, data_rank: int, make_optimizer: Any = _adamw) -> Program:
    def train(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        loss = _loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    return Program(model, make_optimizer(model.parameters()), data_rank, train)


def _ddp(rank: int, size: int, make_optimizer: Any = _adamw, **options: Any) -> Program:
    model = DistributedDataParallel(Model(), bucket_cap_mb=BUCKET_MB, **options)
    return _finish(model, rank, make_optimizer)


def _shard(model: Any, mesh: Any, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _fsdp(rank: int, size: int, make_optimizer: Any = _adamw, **options: Any) -> Program:
    mesh = init_device_mesh("cpu", (size,))
    return _finish(_shard(Model(), mesh, **options), rank, make_optimizer)


def _accumulated(rank: int, size: int) -> Program:
    program = _fsdp(rank, size)
    model: Any = program.model

    def train(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        total = 0.0
        parts = list(zip(inputs.chunk(2), targets.chunk(2), strict=True))
        for index, (part, target) in enumerate(parts):
            model.set_requires_gradient_sync(index == len(parts) - 1)
            loss = _loss(model(part), target)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return total

    program.train = train
    return program


def _evaluated(rank: int, size: int) -> Program:
    """Leaves the parameters of the root whole between two steps."""
    program = _fsdp(rank, size)
    program.after = torch.no_grad()(lambda inputs, targets: program.model(inputs))
    return program


def _hsdp(rank: int, size: int) -> Program:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    return _finish(_shard(Model(), mesh), rank)


def _split(model: Any, mesh: Any, *, sequence: bool = False) -> Any:
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        plan["norm"] = SequenceParallel(sequence_dim=0, use_local_output=True)
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def _replicate(model: Any, mesh: Any) -> Any:
    for block in model.blocks:
        replicate(block, mesh=mesh)
    return replicate(model, mesh=mesh)


def _over(kind: str, model: Any, mesh: Any, **options: Any) -> Any:
    """The model, trained by the ranks of a mesh of one dimension on different data."""
    if kind == "fsdp":
        return _shard(model, mesh)
    if kind == "replicate":
        return _replicate(model, mesh)
    return DistributedDataParallel(model, device_mesh=mesh, bucket_cap_mb=BUCKET_MB)


def _tensor_parallel(kind: str, rank: int, size: int) -> Program:
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
    model = _split(Model(), mesh["tensor"])
    return _finish(_over(kind, model, mesh["data"]), rank // 2)


def _pipeline(
    kind: str, schedule_class: Any, rank: int, size: int, tensor: int = 1, evaluate: bool = False
) -> Program:
    data = size // (2 * tensor)
    mesh = init_device_mesh("cpu", (2, data, tensor), mesh_dim_names=("pipe", "data", "tensor"))
    index, data_rank, _ = mesh.get_coordinate() or (0, 0, 0)
    torch.manual_seed(1 + index)
    model: Any = Model(2)
    if tensor > 1:
        model = _split(model, mesh["tensor"])
    if data > 1:
        model = _over(kind, model, mesh["data"])
    activation = torch.zeros(BATCH // MICROBATCHES, WIDTH)
    stage = PipelineStage(
        model,
        index,
        2,
        torch.device("cpu"),
        input_args=activation.clone().requires_grad_(index > 0),
        output_args=activation.clone().requires_grad_(),
        group=mesh.get_group("pipe"),
    )
    schedule = schedule_class(stage, MICROBATCHES, loss_fn=_loss)

    def train(inputs: torch.Tensor, targets: torch.Tensor) -> float | None:
        if index == 0:
            schedule.step(inputs)
            result = None
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=targets, losses=losses)
            result = sum(loss.item() for loss in losses)
        return result

    program = Program(model, _adamw(model.parameters()), data_rank, train)
    if evaluate:
        program.after = torch.no_grad()(
            lambda inputs, targets: (
                schedule.eval(inputs) if index == 0 else schedule.eval(target=targets)
            )
        )
    return program


Build = Callable[[int, int], Program]
LAYOUTS: dict[str, tuple[int, Build]] = {
    "ddp": (3, _ddp),
    "zero": (3, partial(_ddp, make_optimizer=_zero)),
    "fsdp": (3, _fsdp),
    "hsdp": (4, _hsdp),
    "ddp_tp": (4, partial(_tensor_parallel, "ddp")),
    "fsdp_tp": (4, partial(_tensor_parallel, "fsdp")),
    "replicate_tp": (4, partial(_tensor_parallel, "replicate")),
    "ddp_1f1b": (4, partial(_pipeline, "ddp", Schedule1F1B)),
    "fsdp_1f1b": (4, partial(_pipeline, "fsdp", Schedule1F1B)),
    "ddp_gpipe": (4, partial(_pipeline, "ddp", ScheduleGPipe)),
    "fsdp_gpipe": (4, partial(_pipeline, "fsdp", ScheduleGPipe)),
    "pipe_only": (2, partial(_pipeline, "ddp", Schedule1F1B)),
    "pipe_with_eval": (4, partial(_pipeline, "ddp", Schedule1F1B, evaluate=True)),
    "fsdp_1f1b_tp": (8, partial(_pipeline, "fsdp", Schedule1F1B, tensor=2)),
    "ddp_1f1b_tp": (8, partial(_pipeline, "ddp", Schedule1F1B, tensor=2)),
    "zero_momentum": (
        3,
        partial(
            _ddp,
            make_optimizer=lambda p: ZeroRedundancyOptimizer(
                p, torch.optim.SGD, lr=0.05, momentum=0.9
            ),
        ),
    ),
    "ddp_momentum": (3, partial(_ddp, make_optimizer=_momentum)),
    "fsdp_momentum": (3, partial(_fsdp, make_optimizer=_momentum)),
    "fsdp_accumulated": (3, _accumulated),
    "fsdp_with_eval": (3, _evaluated),
    "fsdp_bf16": (3, partial(_fsdp, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))),
    "fsdp_kept_whole": (3, partial(_fsdp, reshard_after_forward=False)),
}


def build(name: str) -> Program:
    """This rank's part of a layout; the default group must be there."""
    _, make = LAYOUTS[name]
    torch.manual_seed(1)
    return make(dist.get_rank(), dist.get_world_size())


def batch(step: int, data_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one step, the same for all ranks that share a part of the data."""
    generator = torch.Generator().manual_seed(5000 * step + data_rank)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(
        BATCH, WIDTH, generator=generator
    )
