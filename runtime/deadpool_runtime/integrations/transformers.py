"""``transformers.Trainer`` under ``deadpool-launch``.

    from deadpool_runtime.integrations.transformers import DeadpoolTrainer as Trainer

``DeadpoolMixin`` does the same for another trainer: ``class MyTrainer(DeadpoolMixin, SFTTrainer)``.
Without a launcher both change nothing.

The trainer owns its loop, and asks for the batches of each optimizer step by one call of
``get_batch_samples``. There a body ends and the next begins. So logging, evaluation, checkpoints
and callbacks of a step are in its body, and so is the end of an epoch, after its last step. After a
fault the trainer's loop is left by an exception and entered again at the step that comes next, as
it would be entered to resume from a checkpoint; a replacement enters it there for the first time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from deadpool_runtime.context import current_context
from deadpool_runtime.errors import Misuse
from deadpool_runtime.integrations.step_loader import step_loader
from deadpool_runtime.integrations.trainer_counters import Counters
from deadpool_runtime.job import Step
from deadpool_runtime.session import attach

try:
    from transformers import Trainer
except ImportError as error:
    raise ImportError(
        "deadpool_runtime.integrations.transformers needs transformers 5: "
        "pip install 'deadpool-launch[transformers]'"
    ) from error
if not hasattr(Trainer, "_run_epoch"):
    raise ImportError(
        "deadpool_runtime.integrations.transformers needs a transformers whose Trainer runs its "
        "epochs by _run_epoch: pip install 'deadpool-launch[transformers]'"
    )

#: Stands for the checkpoint that the trainer's loop would resume from: our own memory.
_MEMORY = "deadpool"


class _Elsewhere(Exception):
    """The step that comes next is not the one that the trainer's loop is at."""


class DeadpoolMixin:
    """Puts the training of a ``transformers.Trainer`` under protection."""

    _deadpool: _Protected | None = None

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """See ``Trainer.train``."""
        if current_context() is not None:
            _require_supported(self, resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def _run_epoch(self, **given: Any) -> None:
        if current_context() is None:
            super()._run_epoch(**given)  # type: ignore[misc]
            return
        self._deadpool = _Protected(self, super()._run_epoch, given)  # type: ignore[misc]
        self._deadpool.run()

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """See ``Trainer.get_batch_samples``: the place between two steps."""
        if self._deadpool is not None:
            epoch_iterator = iter(self._deadpool.next_batches(num_batches))
        return super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """See ``Trainer.log``; the launcher gets the loss too."""
        if self._deadpool is not None and "loss" in logs:
            self._deadpool.report(logs["loss"])
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: Any) -> None:
        if checkpoint != _MEMORY:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        context = current_context()
        if self._deadpool is None and context is not None and context.replacement:
            return {}  # eval_on_start: its peers did that long ago
        return super()._evaluate(*args, **kwargs)  # type: ignore[misc]


class DeadpoolTrainer(DeadpoolMixin, Trainer):
    """A ``transformers.Trainer`` that DEADPOOL protects."""


class _Protected:
    """The training of one trainer, from its first step to its last.

    ``run_epoch``: the trainer's own. ``given``: what the first call of it was given.
    """

    def __init__(self, trainer: Any, run_epoch: Any, given: dict[str, Any]) -> None:
        self._trainer = trainer
        self._run_epoch = run_epoch
        self._given = given
        per_step = trainer.args.gradient_accumulation_steps
        skip = given["steps_trained_in_current_epoch"]
        resumes = given["resume_from_checkpoint"] is not None
        self._counters = Counters(trainer, given["epoch"], skip // per_step if resumes else 0)
        #: Where the training begins.
        self._first = self._counters.place
        extras: dict[str, Any] = {"trainer": self._counters}
        if trainer.accelerator.scaler is not None:
            extras["scaler"] = trainer.accelerator.scaler
        loader = step_loader(
            _repeatable(given["train_dataloader"]),
            per_step,
            first_epoch=given["epoch"],
            skip=skip if resumes else 0,
        )
        optimizer = trainer.optimizer
        job = attach(
            given["model"],
            getattr(optimizer, "optimizer", optimizer),
            trainer.lr_scheduler,
            extras=extras,
        )
        self._steps: Iterator[tuple[Step, Any]] = job.steps(loader, max_steps=sys.maxsize)
        self._step: Step | None = None
        #: The step that was fetched while the loop was elsewhere, and its batches.
        self._ahead: tuple[Step, Any] | None = None
        self._number = 0
        # What the trainer's loop iterates over: nothing is read from it, and no seed is drawn for
        # it from the global generator.
        self._no_data: DataLoader[Any] = DataLoader(
            TensorDataset(torch.zeros(1)), generator=torch.Generator()
        )

    def run(self) -> None:
        """All epochs; the trainer's own loop over them then finds that training is to stop."""
        trainer = self._trainer
        trainer.args.ignore_data_skip = False  # it would lose count of the steps
        ended = False
        while not ended:
            try:
                self._run_from(*self._counters.place)
                ended = self._finish()
            except _Elsewhere:
                ended = self._ahead is None
            except BaseException as error:
                step, self._step = self._step, None
                if step is None or not step.__exit__(type(error), error, error.__traceback__):
                    raise
                self._clean_up()
                ended = not self._fetch()
        trainer.control.should_training_stop = True
        trainer._deadpool = None

    def _run_from(self, epoch: int, update: int) -> None:
        """Let the trainer run from the given update of an epoch on."""
        trainer, given = self._trainer, self._given
        starts = (epoch, update) == self._first
        place = {
            "resume_from_checkpoint": given["resume_from_checkpoint"] if starts else _MEMORY,
            "epochs_trained": epoch,
            "steps_trained_in_current_epoch": update * trainer.args.gradient_accumulation_steps,
        }
        for each in count(epoch):
            if each >= trainer.state.num_train_epochs:
                return
            if each > epoch:
                trainer.control = trainer.callback_handler.on_epoch_begin(
                    trainer.args, trainer.state, trainer.control
                )
            self._counters.begin_epoch(each, update if each == epoch else 0)
            self._run_epoch(**{**given, **place, "epoch": each, "train_dataloader": self._no_data})
            if trainer.control.should_training_stop:
                return
            if trainer.control.should_epoch_stop:
                raise Misuse(
                    "A callback of the trainer ended an epoch early (should_epoch_stop), which "
                    "cannot be followed in the data: let it set should_training_stop, or give the "
                    "trainer a shorter dataset."
                )

    def next_batches(self, expected: int) -> list[Any]:
        """End the body of the step before and begin the next; returns its batches.

        Raises ``_Elsewhere`` if that is another step than the one that the loop is at.
        """
        if self._ahead is None:
            self._close()
            if not self._fetch() or self._is_elsewhere():
                raise _Elsewhere
        assert self._ahead is not None
        (step, batches), self._ahead = self._ahead, None
        self._number = step.number
        self._step = step
        self._counters.begin()
        step.__enter__()
        if len(batches) != expected:
            raise Misuse(
                f"The trainer expects {expected} batches in step {step.number}, but its loader "
                f"has {len(batches)} left: len() of the training loader must be what it gives."
            )
        return list(batches)

    def report(self, loss: float) -> None:
        """Tell the launcher the loss that the trainer logs."""
        if self._step is not None:
            self._step.report(loss=loss)

    def _fetch(self) -> bool:
        """Ask for the next step; false if there is none."""
        self._ahead = next(self._steps, None)
        return self._ahead is not None

    def _is_elsewhere(self) -> bool:
        assert self._ahead is not None
        return self._ahead[0].number != self._number + 1

    def _close(self) -> None:
        self._counters.end()
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)

    def _finish(self) -> bool:
        """End the last body; false if a step is to be run again all the same."""
        if self._step is not None:
            self._step.stop()
        self._close()
        return not self._fetch()

    def _clean_up(self) -> None:
        """Forget loaders that an evaluation was reading when it was cut short."""
        state = self._trainer.accelerator.gradient_state
        while (loader := state.active_dataloader) is not None:
            state._remove_dataloader(loader)


def _repeatable(loader: Any) -> Any:
    """The trainer's loader, if its order needs no word from other ranks."""
    if isinstance(loader.dataset, IterableDataset):
        return loader  # refused for that, whoever reads it
    if getattr(loader, "rng_types", None):
        raise Misuse(
            "The trainer's sampler takes its seed from rank 0 in every epoch, which a replaced "
            "rank cannot be told again: leave use_seedable_sampler=True in accelerator_config, and "
            "give samplers of your own a seed."
        )
    if hasattr(loader, "split_batches") or getattr(loader, "use_stateful_dataloader", False):
        raise Misuse(
            "The trainer's loader takes its batches from rank 0, or keeps its own place "
            "(dispatch_batches, use_stateful_dataloader): set both to False in accelerator_config."
        )
    return loader


def _require_supported(trainer: Any, resume_from_checkpoint: Any) -> None:
    """Raise ``Misuse`` for what could not be brought back after a fault."""
    args, accelerator = trainer.args, trainer.accelerator
    mesh = getattr(accelerator, "parallelism_config", None)
    refused = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP through accelerate": trainer.is_fsdp_enabled,
        "a model that transformers sharded": getattr(
            trainer, "is_distributed_loading_by_transformers", False
        ),
        "accelerate's parallelism_config": mesh is not None and mesh.total_size > 1,
        "auto_find_batch_size": args.auto_find_batch_size,
        "a model spread over the devices of one process": args.n_gpu > 1
        or trainer.is_model_parallel,
        "ignore_data_skip": args.ignore_data_skip and bool(resume_from_checkpoint),
        "train() a second time in one process": trainer.is_in_train or trainer.state.global_step,
    }
    for what, is_there in refused.items():
        if is_there:
            raise Misuse(
                f"The trainer uses {what}, which DeadpoolTrainer does not support under "
                f"deadpool-launch: use DistributedDataParallel (the trainer's default), or a loop "
                f"of your own with deadpool_runtime.attach."
            )
    if resume_from_checkpoint is True:
        raise Misuse(
            "train(resume_from_checkpoint=True) would find another checkpoint in a replacement "
            "that starts later: name the checkpoint's folder, or resume from the durable "
            "checkpoints of deadpool-launch."
        )
