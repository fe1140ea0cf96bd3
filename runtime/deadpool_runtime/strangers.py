"""Optimizers, schedulers and the like that take part in training but were not given to attach.

Nobody saves what they hold, so a body in which one of them steps is refused.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from deadpool_runtime.errors import Misuse
from deadpool_runtime.kinds import is_zero

_Part = TypeVar("_Part")


def parts_of(kind: type[_Part], values: Iterable[Any]) -> list[_Part]:
    """Every object of that kind among ``values`` and in what they consist of."""
    found: list[_Part] = []
    seen: set[int] = set()
    pending = list(values)
    while pending:
        each = pending.pop()
        if id(each) in seen or isinstance(each, Optimizer | torch.nn.Module | torch.Tensor):
            continue
        seen.add(id(each))
        if isinstance(each, kind):
            found.append(each)
        if isinstance(each, list | tuple):
            pending += each
        elif isinstance(each, dict):
            pending += each.values()
        elif hasattr(each, "state_dict"):
            pending += vars(each).values() if hasattr(each, "__dict__") else ()
    return found


def require_schedulers(optimizers: Iterable[Optimizer], given: Sequence[Any]) -> None:
    """Raise ``Misuse`` if there is a scheduler for one of the optimizers that is not in ``given``
    or in what these consist of."""
    driven = set(map(id, optimizers))

    def unknown() -> bool:
        attached = {id(each) for each in parts_of(LRScheduler, given)}
        return any(
            issubclass(type(each), LRScheduler)
            and id(each) not in attached
            and id(getattr(each, "optimizer", None)) in driven
            for each in gc.get_objects()
        )

    if unknown():
        gc.collect()  # one that nobody uses any more may be left
        if unknown():
            raise Misuse(
                "A learning-rate scheduler drives an optimizer but was not given to attach: "
                "attach(model, optimizer, scheduler)."
            )


class Passing:
    """Optimizers that came and went in one body, as an inner loop makes them.

    Such a one leaves nothing behind that a later body could miss, unless it trains a parameter of
    an attached model.
    """

    def __init__(self) -> None:
        self._bodies = 0
        self._seen: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def begin(self) -> None:
        """A body starts, be it one that is run again."""
        self._bodies += 1

    def may_step(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer, which steps now, has stepped in no other body."""
        return self._seen.setdefault(optimizer, self._bodies) == self._bodies


def is_attached(optimizer: Any, attached: Iterable[Any]) -> bool:
    """Whether the optimizer is one of the attached, or wraps one and has the same state."""
    for each in attached:
        inner = each.optim if is_zero(each) else each
        if optimizer is each or optimizer is inner or optimizer.state is each.state:
            return True
    return False


def watch_scalers(stepping: Callable[[Any, Optimizer], None]) -> Callable[[], None]:
    """Call ``stepping(scaler, optimizer)`` before every ``step`` of a torch ``GradScaler``; returns
    what ends that."""
    kind: Any = torch.amp.GradScaler
    step = kind.step

    def told_step(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        stepping(scaler, optimizer)
        return step(scaler, optimizer, *args, **kwargs)

    def end() -> None:
        if kind.step is told_step:
            kind.step = step

    kind.step = told_step
    return end


def watch_averages(updating: Callable[[Any], None]) -> Callable[[], None]:
    """Call ``updating(averages)`` before every ``update_parameters`` of a torch ``AveragedModel``;
    returns what ends that."""
    kind: Any = AveragedModel
    update = kind.update_parameters

    def told_update(averages: Any, model: Any) -> Any:
        updating(averages)
        return update(averages, model)

    def end() -> None:
        if kind.update_parameters is told_update:
            kind.update_parameters = update

    kind.update_parameters = told_update
    return end


def is_open(scaler: torch.amp.GradScaler) -> bool:
    """Whether it has unscaled or stepped since its last ``update``."""
    return bool(getattr(scaler, "_per_optimizer_states", None))


def close(scaler: torch.amp.GradScaler) -> None:
    """Forget what it did since its last ``update``, which its ``state_dict`` does not have."""
    getattr(scaler, "_per_optimizer_states", {}).clear()
