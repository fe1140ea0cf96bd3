"""What the first values of a tensor are: a drawing with a generator of its own, or a copy of one.

A recipe depends on nothing but itself, so it can be carried out at any later time, any number of
times, and gives the same bits. Who holds recipes for which tensors is in ``deferred``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Geometry:
    """How a tensor lies in its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """That of ``tensor``."""
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        return cls(size, stride, int(tensor.storage_offset()), tensor.dtype, tensor.device)

    def empty(self) -> torch.Tensor:
        """A tensor like it, alone in its storage."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor that lies so in ``storage``."""
        tensor = torch.empty(0, dtype=self.dtype, device=self.device)
        return tensor.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class Drawn:
    """What ``function``, one of ``torch.nn.init``, draws from a generator that starts at
    ``seed``."""

    function: Callable[..., torch.Tensor]
    options: dict[str, Any]
    seed: int
    geometry: Geometry

    def fill(self, tensor: torch.Tensor) -> None:
        """Draw ``tensor``."""
        generator = torch.Generator(tensor.device).manual_seed(self.seed)
        self.function(tensor, **self.options, generator=generator)

    def is_constant(self) -> bool:
        """Whether its options cannot change between now and later."""
        return all(isinstance(value, int | float | str | None) for value in self.options.values())


@dataclass(frozen=True)
class Copied:
    """A copy of the part that lies at ``view`` in what ``source`` makes."""

    source: Recipe
    view: Geometry
    geometry: Geometry

    def fill(self, tensor: torch.Tensor) -> None:
        """Make the source once more, and copy."""
        source = self.source.geometry.empty()
        self.source.fill(source)
        tensor.copy_(source.as_strided(self.view.size, self.view.stride, self.view.offset))


Recipe = Drawn | Copied


def is_plain(tensor: object) -> bool:
    """Whether it is a tensor of this process alone, with memory, of floating-point numbers."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and isinstance(tensor, torch.Tensor)
        and tensor.layout == torch.strided
        and tensor.dtype in _FLOATS
        and tensor.device.type in _DEVICES
        and tensor.numel() > 0
    )


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether each element of its storage is one element of the tensor."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.storage_offset():
        return False
    if tensor.numel() * tensor.element_size() != tensor.untyped_storage().nbytes():
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
