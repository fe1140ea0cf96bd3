"""Where a training script's tensors are, found once and read anew at every step.

Keys say what a tensor is, the same on every rank: ``p/0/NAME`` a parameter of the first model,
``b/0/NAME`` a buffer, ``o/0/G/P/NAME`` state of the first optimizer for parameter P of group G,
``q/0/G/P`` a parameter only the optimizer knows, ``xp/…`` and ``xb/…`` those of modules among
the extras.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deadpool_runtime.errors import Misuse, UnsupportedState

#: The first part of a key -> the name under which ``FinalState`` reports it.
PARTS = {
    "p": "parameters",
    "q": "parameters",
    "b": "buffers",
    "o": "optimizer",
    "xp": "extras",
    "xb": "extras",
}


@dataclass(frozen=True)
class _Place:
    """A dict of a module (``_parameters`` or ``_buffers``) and the entry in it."""

    key: str
    home: dict[str, Any]
    name: str


class TensorMap:
    """Finds every tensor that belongs to the training state.

    The modules' structure is taken as fixed from here on; the tensors in it may be exchanged.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        extra_modules: dict[str, nn.Module],
    ) -> None:
        self.optimizers = list(optimizers)
        self._parameters: list[_Place] = []
        self._buffers: list[_Place] = []
        self._known: set[int] = set()
        self._modules: dict[int, nn.Module] = {}
        for index, model in enumerate(models):
            self._add_module("", str(index), model)
        for name, module in extra_modules.items():
            self._add_module("x", name, module)

    def _add_module(self, prefix: str, label: str, root: nn.Module) -> None:
        for path, module in root.named_modules():
            self._modules[id(module)] = module
            dot = f"{path}." if path else ""
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in self._known:
                    self._known.add(id(parameter))
                    key = f"{prefix}p/{label}/{dot}{name}"
                    self._parameters.append(_Place(key, module._parameters, name))
            for name, buffer in module._buffers.items():
                if buffer is None or id(buffer) not in self._known:
                    self._known.add(id(buffer))
                    key = f"{prefix}b/{label}/{dot}{name}"
                    self._buffers.append(_Place(key, module._buffers, name))

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter once, those of the extras included."""
        for place in self._parameters:
            yield place.key, place.home[place.name]
        for oi, gi, pi, parameter in self.optimized():
            if id(parameter) not in self._known:
                yield f"q/{oi}/{gi}/{pi}", parameter

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every buffer that is there at present."""
        for place in self._buffers:
            buffer = place.home.get(place.name)
            if buffer is not None:
                yield place.key, buffer

    def buffer_keys(self) -> list[str]:
        """The keys of all places for buffers, whether one is there or not."""
        return [place.key for place in self._buffers]

    def fit_buffer(self, key: str, like: torch.Tensor | None) -> None:
        """Put a new tensor in the place of a buffer whose shape or type is not that of ``like``,
        or none at all if that is None."""
        place = next(place for place in self._buffers if place.key == key)
        present = place.home.get(place.name)
        if like is None:
            place.home[place.name] = None
        elif present is None or present.shape != like.shape or present.dtype != like.dtype:
            device = "cpu" if present is None else present.device
            place.home[place.name] = torch.empty_like(like, device=device)

    def modes(self) -> dict[str, bytes]:
        """Each module's ``training`` and each parameter's ``requires_grad``, one byte a flag."""
        return {
            "training": bytes(module.training for module in self._modules.values()),
            "requires_grad": bytes(tensor.requires_grad for _, tensor in self.parameters()),
        }

    def restore_modes(self, modes: dict[str, bytes]) -> None:
        """Set what ``modes`` returned."""
        parameters = [tensor for _, tensor in self.parameters()]
        if [len(self._modules), len(parameters)] != [len(flags) for flags in modes.values()]:
            raise Misuse("The models of this process have other modules than those saved.")
        for module, flag in zip(self._modules.values(), modes["training"], strict=True):
            module.training = bool(flag)
        for tensor, flag in zip(parameters, modes["requires_grad"], strict=True):
            if tensor.requires_grad != bool(flag):
                tensor.requires_grad_(bool(flag))

    def optimized(self) -> Iterator[tuple[int, int, int, torch.Tensor]]:
        """Optimizer, group and index in the group of every optimized parameter."""
        for oi, optimizer in enumerate(self.optimizers):
            for gi, group in enumerate(optimizer.param_groups):
                for pi, parameter in enumerate(group["params"]):
                    yield oi, gi, pi, parameter

    def optimizer_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the optimizers' state."""
        for prefix, state in self._states():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield f"{prefix}{name}", value

    def optimizer_plain(self) -> dict[str, Any]:
        """The optimizers' state that is no tensor (step counts, lists), by the same keys."""
        return {
            f"{prefix}{name}": value
            for prefix, state in self._states()
            for name, value in state.items()
            if not isinstance(value, torch.Tensor)
        }

    def _states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for oi, gi, pi, parameter in self.optimized():
            state = self.optimizers[oi].state
            # ``state`` is a defaultdict: asking it with [] would create the entry.
            if parameter in state:
                yield f"o/{oi}/{gi}/{pi}/", state[parameter]

    def everything(self) -> dict[str, torch.Tensor]:
        """All of the above that is tensors, in an order that is the same on every rank."""
        found = dict(self.parameters())
        found.update(self.buffers())
        found.update(self.optimizer_state())
        return found

    def parameter_of(self, key: str) -> tuple[dict[str, Any], torch.Tensor, str]:
        """For a key of optimizer state: the state dict it lies in (made if need be), the
        parameter, and the entry's name."""
        _, oi, gi, pi, name = key.split("/", 4)
        optimizer = self.optimizers[int(oi)]
        parameter = optimizer.param_groups[int(gi)]["params"][int(pi)]
        return optimizer.state[parameter], parameter, name

    def forget_optimizer_state(self, keep: set[str]) -> None:
        """Delete every entry of the optimizers' state whose key is not in ``keep``."""
        for oi, gi, pi, parameter in self.optimized():
            state = self.optimizers[oi].state
            if parameter not in state:
                continue
            for name in list(state[parameter]):
                if f"o/{oi}/{gi}/{pi}/{name}" not in keep:
                    del state[parameter][name]
            if not state[parameter]:
                del state[parameter]


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """The part of an expanded tensor that owns memory, so that it can be written to."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def require_dense(name: str, tensor: torch.Tensor) -> None:
    """Refuse tensors that have no plain memory to copy."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise UnsupportedState(f"{name} is not a plain dense tensor ({tensor.layout}).")
