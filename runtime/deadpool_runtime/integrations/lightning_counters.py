"""What a ``lightning.Trainer`` counts and collects besides model, optimizers and schedulers."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)

from deadpool_runtime.errors import UnsupportedState

_CONNECTOR = ("_first_loop_iter", "_current_fx")
_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
#: What says how a value is logged, and what has been collected of it.
_META = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)
_COLLECTED = (
    *("has_reset", "value", "cumulated_batch_size"),
    *("_forward_cache", "_computed", "_update_count"),
)


#: Callbacks whose state is the time that has passed.
_CLOCKS = frozenset({"Timer"})


class Counters:
    """Saves and brings back the loops' counters, logged values of the epoch, callbacks' states."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        #: Whether an epoch has begun and not ended.
        self.in_epoch = False

    def settle(self) -> None:
        """Before a body: let the trainer know that it trains, wherever an earlier one was left."""
        self._trainer.training = True
        self._trainer.lightning_module._current_fx_name = None

    def state_dict(self) -> dict[str, Any]:
        """All of it, in plain values."""
        trainer = self._trainer
        connector = trainer._logger_connector
        results = trainer.fit_loop.epoch_loop._results
        return {
            "in_epoch": self.in_epoch,
            "should_stop": bool(trainer.should_stop),
            "loops": trainer.fit_loop.state_dict(),
            "connector": {name: getattr(connector, name) for name in _CONNECTOR},
            "metrics": {name: dict(getattr(connector, name)) for name in _METRICS},
            "results": {key: _saved(key, each) for key, each in results.items()},
            "callbacks": [_plain(each.state_dict()) for each in self._callbacks()],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Bring it back into the objects that are there."""
        trainer = self._trainer
        connector, loop = trainer._logger_connector, trainer.fit_loop
        self.in_epoch = saved["in_epoch"]
        trainer.should_stop = saved["should_stop"]
        loop.load_state_dict(saved["loops"])
        _go_on(loop)
        for name, value in (saved["connector"] | saved["metrics"]).items():
            setattr(connector, name, value)
        results = loop.epoch_loop._results
        results.clear()
        results.batch = results.batch_size = None
        for key, each in saved["results"].items():
            results[key] = _made(each, trainer)
        for callback, state in zip(self._callbacks(), saved["callbacks"], strict=True):
            if "dirpath" in state and hasattr(callback, "dirpath"):
                callback.dirpath = state["dirpath"]  # a later process would number another one
            if state:
                callback.load_state_dict(state)

    def _callbacks(self) -> list[Any]:
        return [each for each in self._trainer.callbacks if type(each).__name__ not in _CLOCKS]


def _go_on(loop: Any) -> None:
    """Let a loop whose counters were set take that for its own doing, not for a restart."""
    inner = [each for each in vars(loop).values() if hasattr(each, "on_iteration_done")]
    for each in (loop, *inner):
        each.on_iteration_done()
        if each is not loop:
            _go_on(each)


def _saved(key: str, metric: Any) -> dict[str, Any]:
    meta = metric.meta
    if meta.sync.group is not None:
        raise UnsupportedState(
            f"The value logged as {key} is summed up over a process group of its own "
            f"(sync_dist_group), which DeadpoolStrategy cannot bring back: log it over all ranks."
        )
    names = [name for name in _COLLECTED if name in vars(metric)]
    if not metric.is_tensor:  # the module has its value
        if meta.metric_attribute is None:
            raise UnsupportedState(
                f"The metric logged as {key} is no attribute of the LightningModule, so a replaced "
                f"rank would not have it: assign it to self."
            )
        names.remove("value")
    return {
        "is_tensor": metric.is_tensor,
        "meta": {name: getattr(meta, name) for name in _META},
        "reduce": meta.reduce_fx.__name__,
        "sync": [meta.sync.should, meta.sync.rank_zero_only, meta.sync.op],
        "collected": {name: _plain(vars(metric)[name]) for name in names},
    }


def _made(saved: dict[str, Any], trainer: Any) -> Any:
    meta = _Metadata(**saved["meta"], reduce_fx=saved["reduce"])
    should, rank_zero_only, op = saved["sync"]
    meta.sync = _Sync(
        fn=trainer.strategy.reduce, _should=should, rank_zero_only=rank_zero_only, _op=op
    )
    metric = _ResultMetric(meta, saved["is_tensor"])
    if not saved["is_tensor"]:
        metric.value = operator.attrgetter(meta.metric_attribute)(trainer.lightning_module)
    for name, value in saved["collected"].items():
        setattr(metric, name, value)
    return metric


def _plain(value: Any) -> Any:
    """The value with numpy's numbers as Python's, and tensors without their graph."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    if isinstance(value, torch.Tensor):
        return value.detach()
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    return value
