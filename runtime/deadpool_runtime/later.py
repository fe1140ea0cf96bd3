"""Parts of the own part that lie on a device, taken without waiting for it.

The training thread takes the own part between two steps. What of it lies on a device is copied
there, in the order of the script's own work, which costs no wait; where a number or a decision
follows from it, a ``Later`` stands in its place. The copier's thread fetches the copies and makes
bytes of it all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from deadpool_runtime.encoding import detached_copy, encode

#: In the place of a value that is to be left out, with its key.
OMITTED = object()


@dataclass(frozen=True, eq=False)
class Later:
    """``settle`` makes the value of ``tensor``, and waits for the device; it may be ``OMITTED``."""

    tensor: torch.Tensor
    settle: Callable[[torch.Tensor], Any]


def is_remote(tensor: torch.Tensor) -> bool:
    """Whether looking at the tensor's value means to wait for a device."""
    return tensor.device.type != "cpu"


def devices_in(value: Any) -> set[torch.device]:
    """Where the tensors of a plain value are, those in ``Later`` included."""
    return {tensor.device for tensor in tensors_in(value)}


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a plain value, those in ``Later`` included."""
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, Later):
            each = each.tensor
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, Mapping):
            pending += each.values()
        elif isinstance(each, list | tuple | set):
            pending += each


def settled(value: Any) -> Any:
    """The value with every ``Later`` in its dicts settled."""
    if isinstance(value, Later):
        return value.settle(value.tensor)
    if type(value) is dict:
        pairs = [(key, settled(each)) for key, each in value.items()]
        if all(each is value[key] for key, each in pairs):
            return value  # one dict in two places stays one
        return {key: each for key, each in pairs if each is not OMITTED}
    return value


def encode_own(own: dict[str, Any]) -> bytes:
    """The own part as bytes; waits for whatever device a part of it lies on."""
    return encode(settled(own), "job.state")


def state_of_extra(extra: Any) -> Any:
    """``state_dict`` of an extra, detached from it; of torch's ``GradScaler`` without the wait for
    its two numbers."""
    scale = getattr(extra, "_scale", None)
    if (
        not isinstance(extra, torch.amp.GradScaler)
        or type(extra).state_dict is not torch.amp.GradScaler.state_dict
        or not isinstance(scale, torch.Tensor)
        or not is_remote(scale)
    ):
        return detached_copy(extra.state_dict())
    # One that has not scaled yet says the same of its options, and has no tensors to ask.
    unused: Any = object.__new__(type(extra))
    vars(unused).update(vars(extra), _scale=None, _growth_tracker=None)
    state = detached_copy(unused.state_dict())
    for name, attribute in (("scale", "_scale"), ("_growth_tracker", "_growth_tracker")):
        tensor = getattr(extra, attribute)
        if name in state and isinstance(tensor, torch.Tensor):
            state[name] = Later(detached_copy(tensor), _number)
    return state


def _number(tensor: torch.Tensor) -> Any:
    return tensor.item()
