"""``lightning`` (PyTorch Lightning 2) under ``deadpool-launch``.

    from deadpool_runtime.integrations.lightning import DeadpoolStrategy

    trainer = lightning.Trainer(strategy=DeadpoolStrategy(), ...)

It is a ``DDPStrategy`` and takes the same options; without a launcher it is nothing else.

Lightning's loops keep their place in counters and do one batch at a time when they are told to. So
the training loop is driven from here, one optimizer step in one body: its batches, what is logged,
the validation behind it, and the end of the epoch with its hooks after the last step of it. The
counters are saved with every step; to go on elsewhere is to set them.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from deadpool_runtime.context import current_context
from deadpool_runtime.errors import Misuse
from deadpool_runtime.integrations.step_loader import step_loader
from deadpool_runtime.job import Step
from deadpool_runtime.session import attach

try:
    from lightning.pytorch.loops import _FitLoop
    from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn

    from deadpool_runtime.integrations.lightning_counters import Counters
except ImportError as error:
    raise ImportError(
        "deadpool_runtime.integrations.lightning needs lightning 2: "
        "pip install 'deadpool-launch[lightning]'"
    ) from error


class DeadpoolStrategy(DDPStrategy):
    """``DistributedDataParallel`` that DEADPOOL protects."""

    strategy_name = "deadpool"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: The step whose body runs.
        self.step: Step | None = None
        #: The other ranks are at work already, and this one has not joined them yet.
        self.alone = False

    def setup_environment(self) -> None:
        """See ``DDPStrategy``."""
        context = current_context()
        self.alone = context is not None and context.replacement
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """See ``DDPStrategy``."""
        super().setup(trainer)
        if current_context() is not None and trainer.state.fn == TrainerFn.FITTING:
            _require_supported(trainer, self)
            # The same loop object: a checkpoint may have been loaded into it.
            trainer.fit_loop.__class__ = ProtectedFitLoop

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """See ``DDPStrategy``. What a process finds for itself must do until it has joined."""
        return obj if self.alone else super().broadcast(obj, src)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """See ``DDPStrategy``. Forward and backward pass come before the optimizer's own step, so
        that the state before is copied meanwhile."""
        if self.step is not None and not isinstance(_inner(optimizer), torch.optim.LBFGS):
            loss = closure()
            closure = partial(_given, loss)
            if isinstance(loss, torch.Tensor) and loss.device.type == "cpu":
                self.step.report(loss=loss.item())
        return super().optimizer_step(optimizer, closure, model, **kwargs)


class ProtectedFitLoop(_FitLoop):
    """Lightning's training loop, one optimizer step at a time."""

    _data_fetcher: Any

    def run(self) -> None:
        """See ``_FitLoop.run``."""
        self.setup_data()
        if self.skip:
            return
        if self.restarting:
            raise Misuse(
                "trainer.fit was given ckpt_path, which DeadpoolStrategy does not support under "
                "deadpool-launch: load the weights into the module before, or resume from the "
                "durable checkpoints of deadpool-launch."
            )
        self.reset()
        self.on_run_start()
        self._train()
        self._restarting = False
        self.on_run_end()

    def _train(self) -> None:
        trainer = self.trainer
        strategy = trainer.strategy
        loader = step_loader(
            _only_loader(self), trainer.accumulate_grad_batches, limit=int(self.max_batches)
        )
        self._data_fetcher.teardown()
        self._data_fetcher = _Given(int(self.max_batches))
        counters = Counters(trainer)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        _release_sigterm(trainer)
        job = attach(
            strategy.model,
            strategy.optimizers,
            [config.scheduler for config in trainer.lr_scheduler_configs],
            extras={"trainer": counters, **({} if scaler is None else {"scaler": scaler})},
        )
        for step, batches in job.steps(loader, max_steps=sys.maxsize):
            strategy.alone = False
            counters.settle()
            with step:
                strategy.step = step
                self._run_step(counters, batches)
                if self.done:
                    step.stop()
            strategy.step = None

    def _run_step(self, counters: Counters, batches: list[Any]) -> None:
        """One optimizer step and all that comes with it."""
        fetcher, loop = self._data_fetcher, self.epoch_loop
        if not counters.in_epoch:
            self.on_advance_start()
            loop.reset()
            loop.on_run_start(fetcher)
            counters.in_epoch = True
        fetcher.give(batches, loop.batch_progress.current.ready)
        while fetcher.given and not loop.done:
            try:
                loop.advance(fetcher)
            except StopIteration:
                raise Misuse(
                    "A hook (on_train_batch_start returns -1, or training_step raises "
                    "StopIteration) ended an epoch early, which cannot be followed in the data: "
                    "set trainer.should_stop, or limit_train_batches."
                ) from None
            loop.on_advance_end(fetcher)
            loop.on_iteration_done()
        if fetcher.given:  # told to stop between two of them
            self.trainer.lightning_module.zero_grad()
        if loop.done:
            self.on_advance_end()
            self.on_iteration_done()
            counters.in_epoch = False


class _Given(_DataFetcher):
    """Hands out the batches of one step after the other. ``length``: batches in an epoch."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.given: list[Any] = []

    def give(self, batches: list[Any], fetched: int) -> None:
        """``fetched``: how many batches of the epoch there were before."""
        self.given = list(batches)
        self.fetched = fetched
        self.done = False

    def setup(self, combined_loader: Any) -> None:
        """Nothing is read from the loader here."""

    def __iter__(self) -> _Given:
        self.fetched, self.done = 0, False
        return self

    def __next__(self) -> tuple[Any, int, int]:
        batch = self.given.pop(0)
        self.fetched += 1
        self.done = self.fetched >= self.length
        return batch, self.fetched - 1, 0

    def reset(self) -> None:
        """Keep the length, which does not change."""
        self.given = []


def _given(value: Any) -> Any:
    return value


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "_optimizer", optimizer)


def _only_loader(loop: Any) -> Any:
    combined = loop._combined_loader
    if not isinstance(combined.iterables, DataLoader):
        raise Misuse(
            f"The training data are a {type(combined.iterables).__qualname__}: under "
            f"deadpool-launch DeadpoolStrategy reads one DataLoader, so let train_dataloader() "
            f"return that."
        )
    if loop.max_batches == float("inf"):
        raise Misuse(
            "The training DataLoader has no length, so no place can be found again in it after a "
            "recovery: use a map-style dataset."
        )
    return combined.flattened[0]


def _release_sigterm(trainer: Any) -> None:
    """Undo Lightning's handler, which ends training with an exception: Slurm sends SIGTERM to every
    process while the launcher has the last checkpoint written."""
    handlers = getattr(trainer._signal_connector, "_original_handlers", {})
    before = handlers.get(signal.SIGTERM)
    if before is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def _require_supported(trainer: Any, strategy: Any) -> None:
    """Raise ``Misuse`` for what could not be brought back after a fault."""
    fetcher = getattr(trainer.fit_loop, "_data_fetcher", None)
    callbacks = {type(each).__name__ for each in trainer.callbacks}
    hooks: Iterable[str] = ("GradientAccumulationScheduler", "StochasticWeightAveraging")
    refused = {
        "manual optimization": not trainer.lightning_module.automatic_optimization,
        "a communication hook": strategy._ddp_comm_hook is not None,
        "model averaging": strategy._model_averaging_period is not None,
        "reload_dataloaders_every_n_epochs": bool(trainer.reload_dataloaders_every_n_epochs),
        "training_step(dataloader_iter)": fetcher is not None
        and not isinstance(fetcher, _PrefetchDataFetcher),
        **{f"the callback {name}": name in callbacks for name in hooks},
    }
    for what, is_there in refused.items():
        if is_there:
            raise Misuse(
                f"The trainer uses {what}, which DeadpoolStrategy does not support under "
                f"deadpool-launch: leave it out, or write the loop yourself with "
                f"deadpool_runtime.attach."
            )
