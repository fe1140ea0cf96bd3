"""What a script brings to its first step: nothing yet, or a state that steps were made in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from deadpool_runtime.kinds import is_zero


def brings_state(optimizers: Iterable[Any], schedulers: Iterable[Any]) -> bool:
    """Whether the script has loaded a state of its own, as from a checkpoint that it wrote: an
    optimizer or a scheduler has made steps before the first one.
    """
    return any(map(_has_stepped, optimizers)) or any(
        getattr(scheduler, "last_epoch", 0) > 0 for scheduler in schedulers
    )


def _has_stepped(optimizer: Any) -> bool:
    """Some make their state when they are made, and count no step in it then."""
    inner = optimizer.optim if is_zero(optimizer) else optimizer
    entries = [entry for entry in inner.state.values() if isinstance(entry, Mapping)]
    return any(float(entry["step"]) > 0 if "step" in entry else bool(entry) for entry in entries)
