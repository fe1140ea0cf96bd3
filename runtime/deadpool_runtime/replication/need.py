"""How much state an optimizer will make, found out before its first step.

A stand-in of the same class takes one step on tiny parameters with zero gradients. What it then
holds for them tells which tensors have the parameter's shape (or a shape made of the parameter's
dimensions and ones, as Adafactor's) and which are the same for every parameter.

Only classes of torch's own are tried out: a step of the script's own might change things that it
shares with others, or wait for other ranks. For a class that is derived from one of torch's, that
one is tried out; should it hold more, its first copy takes more room.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

#: Sizes of the dimensions of two tiny parameters: a dimension of the state that is equal to the
#: parameter's in both is that dimension, as no size occurs twice.
_SIZES = ((2, 5, 11, 17, 23, 31), (3, 7, 13, 19, 29, 37))


@dataclass(frozen=True)
class StateTensor:
    """A tensor that the optimizer will hold for a parameter, under ``name``.

    ``on_cpu``: on the CPU whatever the parameter's device.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    on_cpu: bool

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Prediction:
    """``states``: what there will be for parameter ``[group, index]``; None if that cannot be
    measured. ``reason`` says why, or what is not certain.
    """

    states: dict[tuple[int, int], tuple[StateTensor, ...]] | None
    reason: str = ""


class _Unmeasurable(Exception):
    """The message says why."""


@dataclass(frozen=True)
class _Rule:
    """How a tensor of the state follows from its parameter: each dimension is either one of the
    parameter's (by its index, as a negative number: -1 is the first) or a fixed size.
    """

    name: str
    dtype: torch.dtype
    dims: tuple[int, ...]
    on_cpu: bool

    def apply(self, shape: tuple[int, ...]) -> StateTensor:
        dims = tuple(shape[-1 - dim] if dim < 0 else dim for dim in self.dims)
        return StateTensor(self.name, self.dtype, dims, self.on_cpu)


def predict_state(
    optimizer: Optimizer, local: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
) -> Prediction:
    """The tensors that ``optimizer`` will hold for each of its parameters after a step in which all
    of those that require gradients have them.

    ``local``: this rank's part of a parameter. A parameter that has state already keeps what it
    has. Changes nothing of the optimizer or of the random generators, and runs no hook.
    """
    name, kind = type(optimizer).__qualname__, _torchs_class(optimizer)
    if kind is Optimizer:
        return Prediction(None, f"{name} is not one of torch's own, so it is not tried out.")
    if _needs_closure(kind):
        return Prediction(None, f"{name}.step needs a closure, so it cannot be tried out.")
    reason = ""
    if kind is not type(optimizer):
        reason = f"{name} is taken to hold what {kind.__qualname__} does."
    states: dict[tuple[int, int], tuple[StateTensor, ...]] = {}
    rules: dict[object, tuple[_Rule, ...]] = {}
    try:
        for gi, group in enumerate(optimizer.param_groups):
            for pi, parameter in enumerate(group["params"]):
                if optimizer.state.get(parameter):
                    states[gi, pi] = tuple(_present(optimizer.state[parameter], local))
                    continue
                if not parameter.requires_grad:
                    states[gi, pi] = ()
                    continue
                part = local(parameter.detach())
                like = (gi, part.dtype, part.device, part.dim())
                if like not in rules:
                    rules[like] = _measure(optimizer, kind, group, part)
                states[gi, pi] = tuple(rule.apply(tuple(part.shape)) for rule in rules[like])
    except _Unmeasurable as error:
        return Prediction(None, str(error))
    return Prediction(states, reason)


def _torchs_class(optimizer: Optimizer) -> type[Optimizer]:
    """The class of the optimizer if that is torch's own, or the nearest such base of it."""
    for kind in type(optimizer).__mro__:
        if kind.__module__.startswith("torch.optim") and issubclass(kind, Optimizer):
            return kind
    return Optimizer


def _needs_closure(kind: type[Optimizer]) -> bool:
    """Whether ``step`` cannot be called without arguments."""
    code: Any = kind.step
    while hasattr(code, "__wrapped__"):
        code = code.__wrapped__
    names = code.__code__.co_varnames[1 : code.__code__.co_argcount]
    return len(names) > len(code.__defaults__ or ())


def _present(
    state: dict[str, Any], local: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[StateTensor]:
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            part = local(value.detach())
            yield StateTensor(name, part.dtype, tuple(part.shape), part.device.type == "cpu")


def _measure(
    optimizer: Optimizer, kind: type[Optimizer], group: dict[str, Any], like: torch.Tensor
) -> tuple[_Rule, ...]:
    if like.dim() > len(_SIZES[0]):
        raise _Unmeasurable(f"A parameter of {like.dim()} dimensions cannot be tried out.")
    shapes = [sizes[: like.dim()] for sizes in _SIZES]
    with _random_unchanged(like.device):
        first, second = (_state_after_step(optimizer, kind, group, like, shape) for shape in shapes)
    if first.keys() != second.keys():
        raise _Unmeasurable(_unclear(optimizer, "names"))
    rules = []
    for name, one in first.items():
        two = second[name]
        if (one.dtype, one.dim(), one.device) != (two.dtype, two.dim(), two.device):
            raise _Unmeasurable(_unclear(optimizer, name))
        dims = []
        for a, b in zip(one.shape, two.shape, strict=True):
            if a == b:
                dims.append(a)
            elif a in shapes[0] and shapes[1][shapes[0].index(a)] == b:
                dims.append(-1 - shapes[0].index(a))
            else:
                raise _Unmeasurable(_unclear(optimizer, name))
        rules.append(_Rule(name, one.dtype, tuple(dims), one.device.type == "cpu"))
    return tuple(rules)


def _unclear(optimizer: Optimizer, what: str) -> str:
    return (
        f"How {type(optimizer).__qualname__}'s state ({what}) depends on the size of a parameter "
        f"could not be found out."
    )


def _state_after_step(
    optimizer: Optimizer,
    kind: type[Optimizer],
    group: dict[str, Any],
    like: torch.Tensor,
    shape: tuple[int, ...],
) -> dict[str, torch.Tensor]:
    """The tensors that a stand-in holds for a parameter of that shape after one step."""
    parameter = torch.zeros(shape, dtype=like.dtype, device=like.device, requires_grad=True)
    parameter.grad = torch.zeros_like(parameter)
    stand_in = kind.__new__(kind)
    options = {name: _private(value) for name, value in group.items() if name != "params"}
    own = ("defaults", *vars(torch.optim.SGD([parameter], lr=0.0)))
    attributes = {
        name: _private(value)
        for name, value in vars(optimizer).items()
        if name not in ("state", "param_groups", "step")
        and not name.endswith("_hooks")
        and (name in own or value is None or isinstance(value, bool | int | float | torch.Tensor))
    }
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer | torch.distributed.ProcessGroup):
            raise _Unmeasurable(
                f"{type(optimizer).__qualname__} works through something else ({name}), so it "
                f"cannot be tried out by itself."
            )
    attributes["_optimizer_step_pre_hooks"] = OrderedDict()
    attributes["_optimizer_step_post_hooks"] = OrderedDict()
    try:
        stand_in.__setstate__(
            {
                **attributes,
                "state": defaultdict(dict),
                "param_groups": [{**options, "params": [parameter]}],
            }
        )
        _bare_step(kind)(stand_in)
    except Exception as error:
        raise _Unmeasurable(
            f"{kind.__qualname__} could not be tried out ({type(error).__name__}: {error})."
        ) from None
    state = stand_in.state.get(parameter, {})
    return {name: each for name, each in state.items() if isinstance(each, torch.Tensor)}


def _bare_step(kind: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """The class's ``step`` without the wrapper that runs the hooks of all optimizers."""
    step: Any = kind.step
    while getattr(step, "hooked", None) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


def _private(value: Any) -> Any:
    """A copy of what a step might change; objects of other kinds are shared."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict | list | tuple | set):
        try:
            return copy.deepcopy(value)
        except Exception:
            return value
    return value


@contextmanager
def _random_unchanged(device: torch.device) -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    before = random.getstate(), numpy.random.get_state() if numpy is not None else None
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(before[0])
        if numpy is not None:
            numpy.random.set_state(before[1])
