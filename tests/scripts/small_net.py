"""What the small trainings of tests share: model, data, and how each rank draws numbers."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

_SAMPLES = 96


class Marker(torch.autograd.Function):
    """Does nothing but call ``hook`` in the middle of the backward pass."""

    hook: Callable[[], None] | None = None

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        if Marker.hook is not None:
            Marker.hook()
        return grad


class Net(nn.Module):
    """Two layers with dropout and a buffer that changes every step (BatchNorm's statistics)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.2)
        self.second = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(torch.relu(self.norm(self.first(x))))
        out: torch.Tensor = self.second(Marker.apply(x))  # type: ignore[no-untyped-call]
        return out


def seeded_net(rank: int, width: int = 32) -> Net:
    """The same weights on every rank; what the rank draws from then on is its own."""
    torch.manual_seed(1234)
    net = Net(width)
    torch.manual_seed(100 + rank)
    random.seed(200 + rank)
    np.random.seed(300 + rank)
    return net


def seeded_loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    """Batches of numbers of samples, inputs and targets, in an order that changes every epoch."""
    generator = torch.Generator().manual_seed(7)
    data = TensorDataset(
        torch.arange(_SAMPLES),
        torch.randn(_SAMPLES, 16, generator=generator),
        torch.randint(0, 4, (_SAMPLES,), generator=generator),
    )
    return DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=True, seed=5))


def scale_of_step() -> float:
    """A number that shows whether Python's and numpy's states came back."""
    return 1.0 + 0.01 * random.random() + 0.01 * float(np.random.rand())
