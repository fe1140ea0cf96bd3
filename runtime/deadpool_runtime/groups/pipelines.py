"""Pipeline schedules: found as they are made, and brought to rest.

A schedule is not reachable from the model that the program hands over, so its construction is
watched. And it initialises its stage in its first step by an exchange with the neighbours, which
a process that joins later would begin alone. With the shapes given by the program that exchange
decides nothing, so after an interruption each process does the same for itself.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch import nn

from deadpool_runtime.groups.errors import UnsupportedLayout
from deadpool_runtime.groups.watching import Watch

_MODULE = "torch.distributed.pipelining.schedules"
_SUPPORTED = ("ScheduleGPipe", "Schedule1F1B")

#: Every living schedule of this process.
_schedules = Watch(
    "A pipeline schedule was made after the first step, where it cannot be reset after "
    "an interruption: make it before attach."
)


def watch() -> None:
    """Note every schedule that this process makes from here on."""
    _schedules.open()
    if _MODULE in sys.modules:
        _watch_class(sys.modules[_MODULE])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def seal() -> None:
    """Refuse schedules from here on, since nobody would reset them."""
    _schedules.seal()


def schedules_of(modules: Iterable[nn.Module]) -> list[Any]:
    """The living schedules, whose stages must be of these modules."""
    parts = {id(part) for module in modules for part in module.modules()}
    if any(id(stage.submod) not in parts for each in _schedules.living for stage in _stages(each)):
        gc.collect()  # one that the program has dropped may be waiting for this
    found = list(_schedules.living)
    if any(id(stage.submod) not in parts for each in found for stage in _stages(each)):
        raise UnsupportedLayout(
            "The module of a pipeline stage was not given to attach: give it the very module that "
            "PipelineStage was given."
        )
    return found


def require_supported(schedules: list[Any]) -> None:
    """Refuse what cannot be initialised by one process alone."""
    for schedule in schedules:
        kind = type(schedule).__name__
        if kind not in _SUPPORTED:
            raise UnsupportedLayout(
                f"Recovery in place does not support the pipeline schedule {kind}: use one of "
                f"{', '.join(_SUPPORTED)}."
            )
        stage = schedule._stage
        if type(stage).__name__ != "PipelineStage" or not hasattr(stage, "_inference_mode"):
            raise UnsupportedLayout(
                "Recovery in place supports pipeline stages made with PipelineStage of torch 2.13 "
                "or newer, not those that pipeline() traces."
            )
        if getattr(stage, "p2p_per_direction", False):
            raise UnsupportedLayout(
                "torch.distributed.config.pipeline_per_direction_p2p makes groups that cannot be "
                "rebuilt in place: turn it off."
            )
        if _inference_mode().needs_dynamic(stage._user_meta, schedule._has_backward):
            raise UnsupportedLayout(
                "Recovery in place needs to know a pipeline stage's shapes beforehand: give "
                "PipelineStage the arguments input_args and output_args (and, where those are "
                "DTensors, input_grads and output_grads)."
            )
    stages = [id(schedule._stage) for schedule in schedules]
    if len(set(stages)) < len(stages):
        raise UnsupportedLayout(
            "Two pipeline schedules share one stage, and each would undo the other's "
            "initialisation: use one schedule, and its eval() to evaluate."
        )


def reset(schedule: Any) -> None:
    """Forget the interrupted step, and leave the stage as the first step would have left it."""
    stage = schedule._stage
    stage.clear_runtime_states()
    for cache in (stage.bwd_cache, stage.backward_state, stage.dw_runner):
        cache.clear()
    # The next step would take the loss of a microbatch of this one for its own.
    schedule._internal_losses.clear()
    _initialise(schedule)


def _initialise(schedule: Any) -> None:
    stage, trains = schedule._stage, schedule._has_backward
    stage.has_backward = trains
    stage._inference_mode = _inference_mode().STATIC
    stage._prepare_forward_infra(schedule._n_microbatches, None, None, has_backward=trains)
    if trains:
        stage._prepare_backward_infra(schedule._n_microbatches, loss_fn=schedule._loss_fn)
    schedule._stage_forward_initialized = True
    schedule._stage_backward_initialized = trains


def _stages(schedule: Any) -> list[Any]:
    return list(getattr(schedule, "_stages", None) or [schedule._stage])


def _inference_mode() -> Any:
    return sys.modules["torch.distributed.pipelining.stage"].InferenceMode


def _watch_class(module: ModuleType) -> None:
    _schedules.follow(module._PipelineSchedule)


class _Finder:
    """Lets torch's module be found as ever, and watches its class once it has been executed.

    Importing the module at the start instead would cost every program a second or more.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_watch(module: ModuleType) -> None:
                execute(module)
                _watch_class(module)

            loader.exec_module = execute_and_watch
        return spec
