"""A protected job: what ``attach`` returns under ``deadpool-launch``.

The generator ``_run`` is the job's time line. Between two yields the script's body runs inside
``with step:``. A body that ends well leaves a copy of the replicated state; the generator then
fetches the next batch and seals the copy with the rank's own part. A body that a lost peer cut
short recovers inside ``__exit__``; the generator then yields the step after the restored state.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deadpool_runtime import protocol, rng
from deadpool_runtime.context import RankContext, current_context
from deadpool_runtime.control import Verdict
from deadpool_runtime.data import Batches, Fetched
from deadpool_runtime.encoding import check_round_trip, detached_copy, digest_of, encode
from deadpool_runtime.errors import CorruptState, Interrupted, Misuse, UnsupportedState
from deadpool_runtime.groups import engines
from deadpool_runtime.groups.errors import UnsupportedLayout
from deadpool_runtime.guard import StepGuard
from deadpool_runtime.job import Job, Step
from deadpool_runtime.offline import OfflineJob
from deadpool_runtime.recovery import Recovered, Recovery, clear_frames
from deadpool_runtime.state import TrainingState, types_in

#: How long an exception waits for the launcher's word before it is taken for the script's own.
VERDICT_TIMEOUT_S = 120.0
#: How long an epoch that is being revoked may take to be published.
REVOKE_TIMEOUT_S = 60.0
#: An own part larger than this (bytes) is worth a note: it travels with every step.
LARGE_OWN_NBYTES = 8 << 20

_attached = False


def attach(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    scheduler: Any = None,
    *,
    extras: Mapping[str, Any] | None = None,
) -> Job:
    """Put a training run under protection; without a launcher, return a job that does nothing.

    Call it once, after the model is wrapped and everything is constructed, before any step.
    ``model``, ``optimizer`` and ``scheduler`` may be lists. ``extras``: by name, whatever else
    changes in a step and has ``state_dict`` and ``load_state_dict`` (a loss scaler, averaged
    weights). Modules among them are taken to be the same on every rank, others to be this rank's
    own. Raises ``UnsupportedLayout`` or ``UnsupportedState`` for what could not be recovered.
    """
    global _attached
    context = current_context()
    if context is None:
        return OfflineJob()
    if _attached:
        raise Misuse("attach was called a second time: give it lists of models and optimizers.")
    models, optimizers = _listed(model), _listed(optimizer)
    _require_kind(models, nn.Module, "a model")
    _require_kind(optimizers, torch.optim.Optimizer, "an optimizer")
    job = ProtectedJob(context, models, optimizers, _listed(scheduler), dict(extras or {}))
    _attached = True
    context.registry.seal()
    return job


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _require_kind(values: list[Any], kind: type, spoken: str) -> None:
    for value in values:
        if not isinstance(value, kind):
            raise Misuse(
                f"attach takes (model, optimizer, scheduler), each of them or a list of them: a "
                f"{type(value).__qualname__} was given for {spoken}."
            )


class GuardedStep(Step):
    """A step whose body is watched."""

    def __init__(self, number: int, job: ProtectedJob) -> None:
        super().__init__(number)
        self._job = job
        self.entered = False

    def __enter__(self) -> Step:
        if self.entered:
            raise Misuse(f"`with step:` was entered twice for step {self.number}.")
        self.entered = True
        self._job._enter(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if error is None:
            self._job._leave(self)
            return False
        return self._job._leave_by(self, error)


class ProtectedJob(Job):
    """The job of one rank under a launcher."""

    def __init__(
        self,
        context: RankContext,
        models: list[nn.Module],
        optimizers: list[torch.optim.Optimizer],
        schedulers: list[Any],
        extras: dict[str, Any],
    ) -> None:
        super().__init__()
        wrapped = [
            part
            for model in models
            for part in model.modules()
            if isinstance(part, DistributedDataParallel)
        ]
        engines.require_supported(models, optimizers)
        if context.world_size > 1 and not wrapped:
            raise UnsupportedLayout(
                "attach was given a model without DistributedDataParallel in a job of "
                f"{context.world_size} ranks: wrap the model first."
            )
        for model in models:
            engines.freeze_ddp(model)
        self._layout = "DistributedDataParallel" if wrapped else "one process"
        self._context = context
        self._control = context.control
        self._link = context.link
        self._training = TrainingState(models, optimizers, schedulers, extras)
        self._recovery = Recovery(context, self._training, models, optimizers)
        self._guard = StepGuard(
            context.control,
            context.link,
            self._training.tensors.parameters,
            optimizers,
            [*schedulers, *extras.values()],
            confirm_timeout_s=context.confirm_timeout_s,
        )
        self._guard.require_schedulers()
        for extra in extras.values():
            if isinstance(extra, torch.amp.GradScaler):
                self._guard.watch_scaler(extra)
        self._batches: Batches | None = None
        self._epoch = context.epoch
        #: The newest step whose state is in place.
        self._completed = 0
        self._recovered: Recovered | None = None
        self._fault_due = context.fault_step if not context.replacement else None
        self._started = 0.0
        self._duration_s = 0.0
        self._noted_size = False
        #: Types that were seen in ``job.state`` and came through a round trip.
        self._good_types: set[type] = set()

    # ------------------------------------------------------------ the time line

    def steps(
        self, loader: Iterable[Any], *, max_steps: int | None = None, epochs: int | None = None
    ) -> Iterator[tuple[Step, Any]]:
        """See ``Job.steps``."""
        most_steps, most_epochs = self._begin_steps(max_steps, epochs)
        self._batches = Batches(loader, max_steps=most_steps, epochs=most_epochs, remember=True)
        return self._run(self._batches)

    def _run(self, batches: Batches) -> Iterator[tuple[Step, Any]]:
        if self._context.replacement:
            self._recover()
        else:
            self._link.send(protocol.Attached(self._layout))
            self._training.copy(0)
        step: GuardedStep | None = None
        self._guard.install()
        try:
            while True:
                fetched = self._next(batches, step)
                if fetched.ended:
                    self._link.send(protocol.StepsEnded(self._epoch, self._completed))
                    if self._control.wait_end(self._epoch):
                        break
                    self._recover()
                    continue
                if self._control.disturbed(self._epoch):
                    self._recover_when_published()
                    continue
                step = GuardedStep(self._completed + 1, self)
                try:
                    yield step, fetched.take()
                except GeneratorExit:
                    self._abandon(batches, step)
                    raise
                if not step.entered:
                    raise Misuse(
                        f"The body of step {step.number} ran outside of `with step:`, where it "
                        f"cannot be recovered: put the whole body, and any `continue`, inside it."
                    )
                if not step.completed and self._recovered is None:
                    raise Misuse(
                        f"An exception left the body of step {step.number} and was caught outside "
                        f"of `with step:`: catch it inside the body, or let it end the script."
                    )
        finally:
            self._guard.remove()
        self._report_final_state()

    def _next(self, batches: Batches, step: GuardedStep | None) -> Fetched:
        """The batch after the present state, with the random generators as they are after it."""
        recovered, self._recovered = self._recovered, None
        number = self._completed + 1
        if recovered is None:
            return self._finish(batches, number, step)
        # Once more: code between the body and here ran although its step was undone.
        self._set_state(detached_copy(recovered.own["user"]))
        self._training.restore_modes(recovered.own["modes"])
        return batches.rewind(number, recovered.own["data"], recovered.own["rng"])

    def _finish(self, batches: Batches, number: int, step: GuardedStep | None) -> Fetched:
        """Fetch the next batch and seal the state before it, which was copied already."""
        fetched = batches.obtain(number, last=step is not None and step.is_last)
        started = time.monotonic()
        own = {
            "step": self._completed,
            "sample": self._training.sample(self._completed),
            "rng": fetched.before,
            "data": fetched.position,
            "user": detached_copy(self._state),
            **self._training.own_part(),
        }
        types = types_in(own["user"])
        if not types <= self._good_types:
            check_round_trip(own["user"], "job.state")
            self._good_types |= types
        if step is None or not step.is_last:
            self._training.require_unchanged(self._completed)
        data = encode(own, "job.state")
        if len(data) > LARGE_OWN_NBYTES and not self._noted_size:
            self._noted_size = True
            self._link.send(
                protocol.Note(
                    f"{len(data) >> 20} MiB of this rank's state (job.state, extras, changed "
                    f"buffers) no peer has; they are sent to the launcher with every step."
                )
            )
        self._training.seal(self._completed, data)
        digest = self._training.replicated_digest() if self._completed <= 1 else ""
        sealing_s = time.monotonic() - started
        self._link.send(
            protocol.StepDone(
                epoch=self._epoch,
                step=self._completed,
                own=data,
                digest=digest,
                duration_s=self._duration_s + sealing_s,
                blocked_s=self._guard.blocked_s + sealing_s,
                loss=step.loss if step is not None else None,
            )
        )
        return fetched

    def _abandon(self, batches: Batches, step: GuardedStep) -> None:
        """The script left the loop by ``break``, or by an exception outside of a body.

        Nothing waits here: in the second case the launcher hears of the exception next.
        """
        if step.completed and self._recovered is None:
            step.is_last = True
            self._finish(batches, self._completed + 1, step)
            self._link.send(protocol.StepsEnded(self._epoch, self._completed))
            self._report_final_state()

    def _report_final_state(self) -> None:
        if not self._context.record_final_state:
            return
        parts = self._training.part_digests()
        parts["rng"] = digest_of(rng.capture(), "the random generators")
        assert self._batches is not None
        parts["data"] = digest_of(self._batches.position(), "the data position")
        parts["user"] = digest_of(self._state, "job.state")
        self._link.send(protocol.FinalState(self._completed, parts))

    # ------------------------------------------------------------ the step's body

    def _enter(self, step: GuardedStep) -> None:
        if self._fault_due == step.number:
            self._fault_due = None
            self._link.send(protocol.FaultPoint(step.number))
            while True:
                time.sleep(3600)
        self._guard.begin(step.number, self._epoch)
        self._started = time.monotonic()

    def _leave(self, step: GuardedStep) -> None:
        """The body ended without an exception."""
        # That proves nothing once a peer is lost: the script may have caught the exception of a
        # broken collective or of the guard, and an aborted NCCL collective raises none. So the
        # state counts only if nothing was aborted until it was copied.
        if not self._is_void():
            try:
                self._guard.require_used_gradients()
                self._guard.check()
            except Misuse as error:
                # Half a backward pass leaves gradients too, if its exception was caught.
                if not self._is_explained(step, error):
                    raise
            except Interrupted:
                pass
        self._guard.end()
        started = time.monotonic()
        if not self._is_void():
            self._training.copy(step.number)
        if self._is_void():
            self._recover_when_published()
            return
        self._completed = step.number
        ended = time.monotonic()
        self._guard.blocked_s += ended - started
        self._duration_s = ended - self._started
        step.completed = True

    def _is_void(self) -> bool:
        """Whether the present body must be run again."""
        return self._guard.interrupted or self._control.disturbed(self._epoch)

    def _leave_by(self, step: GuardedStep, error: BaseException) -> bool:
        """An exception left the body. True if a lost peer explains it and all is well again."""
        self._guard.end()
        # Ctrl-C, sys.exit and misuse of this API need nobody's word.
        if not isinstance(error, Exception) or isinstance(error, Misuse | UnsupportedState):
            return False
        if not self._is_explained(step, error):
            return False
        clear_frames(error)
        self._recover_when_published()
        return True

    def _is_explained(self, step: GuardedStep, error: Exception) -> bool:
        """Whether a lost peer explains ``error``; the launcher has the last word on that."""
        if self._control.disturbed(self._epoch):
            return True
        text = f"{type(error).__name__}: {error}"
        text = text.encode(errors="backslashreplace").decode()  # messages are UTF-8
        self._link.send(protocol.StepRaised(self._epoch, step.number, text))
        verdict = self._control.wait_verdict(step.number, self._epoch, VERDICT_TIMEOUT_S)
        return verdict is Verdict.REVOKED

    def _recover_when_published(self) -> None:
        """Recover from an epoch that is being revoked, once its successor is published."""
        if not self._control.wait_newer(self._epoch, REVOKE_TIMEOUT_S):
            raise RuntimeError("The groups were being aborted, but that did not come to an end.")
        self._recover()

    def _recover(self) -> None:
        recovered = self._recovery.run()
        if recovered.own["step"] != recovered.step:
            raise CorruptState(
                f"The own part that came for step {recovered.step} is of {recovered.own['step']}."
            )
        self._epoch, self._completed = recovered.epoch, recovered.step
        self._recovered = recovered
        self._set_state(detached_copy(recovered.own["user"]))
