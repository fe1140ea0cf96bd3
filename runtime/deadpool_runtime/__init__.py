"""The half of DEADPOOL that runs inside every rank.

What a training script calls:

    import deadpool_runtime as deadpool

    with deadpool.initial_weights():  # optional
        model = ...
    job = deadpool.attach(model, optimizer, scheduler)
    for step, batch in job.steps(loader):
        with step:
            ...

The names are looked up on first use, so that importing the package (which the launcher does, for
the messages) does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deadpool_runtime.job import Job, Step
    from deadpool_runtime.session import attach
    from deadpool_runtime.weights import initial_weights

__all__ = ["Job", "Step", "attach", "initial_weights"]

_HOMES = {
    "Job": "deadpool_runtime.job",
    "Step": "deadpool_runtime.job",
    "attach": "deadpool_runtime.session",
    "initial_weights": "deadpool_runtime.weights",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
