"""The last check before an optimizer overwrites weights, and on what a body leaves behind.

One hook before every ``optimizer.step()`` of the process. It refuses the step when a peer was
lost (an aborted collective may have left garbage in the gradients), and holds it back until the
state before has been copied and its copy is safe (``state`` says why that is enough). That wait is
the runtime's only one.

Gradients are not saved, so none may carry from one body to the next: every body uses or clears
those that it computes, and no optimizer steps with one that an earlier body left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import TensorWeakRef

from deadpool_runtime import strangers
from deadpool_runtime.context import Link
from deadpool_runtime.control import Control
from deadpool_runtime.errors import Interrupted, Misuse
from deadpool_runtime.kinds import local_part
from deadpool_runtime.protocol import Note

Parameters = Callable[[], Iterable[tuple[str, torch.Tensor]]]


class StepGuard:
    """Watches the optimizers from the first step of the job to the last.

    ``parameters``: gives every parameter of the training state with its key. ``optimizers`` and
    ``schedulers``: those whose state is saved, the latter also among other objects. ``modules``:
    every module whose tensors are saved.
    ``wait_copied``: returns when the copy of a step has been made and the tensors may change.
    ``newest_replicated``: the newest step up to one of which there are to be replicas.
    ``confirm_timeout_s``: longest wait for a confirmation. It must be longer than the launcher
    takes to give up a silent node, or ranks run away from the steps that are safe meanwhile.
    """

    def __init__(
        self,
        control: Control,
        link: Link,
        parameters: Parameters = lambda: (),
        optimizers: Sequence[Optimizer] = (),
        schedulers: Sequence[Any] = (),
        *,
        modules: Callable[[], Iterable[tuple[str, torch.nn.Module]]] = lambda: (),
        wait_copied: Callable[[int], None] = lambda _: None,
        newest_replicated: Callable[[int], int] = lambda step: step,
        confirm_timeout_s: float,
    ) -> None:
        self._control = control
        self._link = link
        self._parameters = parameters
        self._optimizers = list(optimizers)
        self._schedulers = list(schedulers)
        self._modules = modules
        #: Optimizers that a scheduler drives, once it is known that the scheduler is attached.
        self._scheduled: set[int] = set()
        self._passing = strangers.Passing()
        self._wait_copied = wait_copied
        self._newest_replicated = newest_replicated
        self._confirm_timeout_s = confirm_timeout_s
        self._hook: Any = None
        self._replay: Any = None
        self._forget: list[Callable[[], None]] = []
        self._scalers: list[tuple[torch.amp.GradScaler, Any]] = []
        self._number: int | None = None
        self._epoch = 0
        self._checked = False
        self._gave_up_at: int | None = None
        #: By the parameter's id: the gradient it had when the body began, and its version.
        self._old: dict[int, tuple[TensorWeakRef, int]] = {}
        #: The ids of the parameters whose optimizer stepped in the present body.
        self._stepped: set[int] = set()
        #: Whether ``Interrupted`` was raised in the present body; the script may have caught it.
        self.interrupted = False
        #: The text of the ``Misuse`` that was raised in the present body, or nothing.
        self.misuse = ""
        #: Seconds the present step was held back until its predecessor's state was copied.
        self.copy_wait_s = 0.0
        #: Seconds it was held back until that copy was confirmed.
        self.confirm_wait_s = 0.0
        #: Steps that were let through without a confirmation.
        self.unprotected = 0

    def install(self) -> None:
        """Begin to watch."""
        self._hook = register_optimizer_step_pre_hook(self._before_optimizer)
        self._forget = [
            strangers.watch_scalers(self._before_scaler),
            strangers.watch_averages(self._before_average),
        ]
        self._replay = torch.cuda.CUDAGraph.replay
        torch.cuda.CUDAGraph.replay = self._replaying(self._replay)  # type: ignore[method-assign]

    def _replaying(self, replay: Any) -> Any:
        """A captured step of an optimizer calls no hooks when it is replayed."""

        def checked_replay(graph: Any) -> Any:
            if self._number is not None:
                self.check()
            return replay(graph)

        return checked_replay

    def remove(self) -> None:
        """Stop watching; the script's optimizers and scalers are its own again."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            while self._forget:
                self._forget.pop()()
            torch.cuda.CUDAGraph.replay = self._replay  # type: ignore[method-assign]
        while self._scalers:
            scaler, before = self._scalers.pop()
            if before is None:
                vars(scaler).pop("step", None)
            else:
                vars(scaler)["step"] = before

    def watch_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Let ``scaler.step(optimizer)`` count as a step of the optimizer even if it skips it."""
        self._scalers.append((scaler, vars(scaler).get("step")))
        step = scaler.step

        def noting_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._note_step(optimizer)
            return step(optimizer, *args, **kwargs)

        vars(scaler)["step"] = noting_step

    def _before_scaler(self, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        self._note_step(optimizer)
        known = strangers.parts_of(torch.amp.GradScaler, self._schedulers)
        if scaler.is_enabled() and all(scaler is not each for each in known):
            self.misuse = (
                f"A GradScaler that was not given to attach stepped in step {self._number}, so its "
                f'scale would be lost with a rank: attach(..., extras={{"scaler": scaler}}).'
            )
            raise Misuse(self.misuse)

    def _before_average(self, averages: torch.nn.Module) -> None:
        if self._number is None or any(module is averages for _, module in self._modules()):
            return
        self.misuse = (
            f"An AveragedModel that was not given to attach was updated in step {self._number}, so "
            f'its weights would be lost with a rank: attach(..., extras={{"ema": averages}}).'
        )
        raise Misuse(self.misuse)

    def begin(self, number: int, epoch: int) -> None:
        """The body of step ``number`` starts."""
        self._number, self._epoch = number, epoch
        self._checked = False
        self.interrupted, self.misuse = False, ""
        self._passing.begin()
        self._stepped.clear()
        self._old = {
            id(parameter): (TensorWeakRef(gradient), gradient._version)
            for _, parameter in self._parameters()
            if (gradient := _gradient_of(parameter)) is not None
        }
        self.copy_wait_s = self.confirm_wait_s = 0.0

    def end(self) -> None:
        """No body runs any more."""
        self._number = None
        self._old.clear()

    @property
    def blocked_s(self) -> float:
        """Seconds the present step was held back."""
        return self.copy_wait_s + self.confirm_wait_s

    def _note_step(self, optimizer: Optimizer) -> None:
        if self._hook is None:
            return
        if self._number is None:
            raise Misuse(
                "An optimizer stepped outside of `with step:`, where its effect would be lost "
                "when a rank is replaced: move it into the step's body."
            )
        self._stepped.update(map(id, _parameters_of(optimizer)))

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._note_step(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        try:
            self._require_attached(optimizer)
            if closure is None:  # it would clear the old gradients and compute new ones
                self._require_new_gradients(optimizer)
            self.check()
        except Misuse as error:
            self.misuse = str(error)
            raise

    def require_schedulers(self) -> None:
        """Raise ``Misuse`` if there is a scheduler for one of the optimizers that is not saved."""
        strangers.require_schedulers(self._optimizers, self._schedulers)

    def _require_attached(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._scheduled and hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            self.require_schedulers()
            self._scheduled.add(id(optimizer))
        if strangers.is_attached(optimizer, self._optimizers):
            return
        attached = {id(parameter) for _, parameter in self._parameters()}
        alone = attached.isdisjoint(map(id, _parameters_of(optimizer)))
        if not (alone and self._passing.may_step(optimizer)):
            raise Misuse(
                f"An optimizer ({type(optimizer).__qualname__}) that was not given to attach "
                f"stepped in step {self._number}, so its state would be lost with a rank: give "
                f"attach a list of all optimizers, and of the models that they train."
            )

    def _require_new_gradients(self, optimizer: Optimizer) -> None:
        for parameter in _parameters_of(optimizer) if self._old else ():
            gradient = _gradient_of(parameter)
            if gradient is None or self._is_new(parameter) or _is_zero(gradient):
                continue
            raise Misuse(
                f"An optimizer ({type(optimizer).__qualname__}) stepped in step {self._number} "
                f"with gradients that an earlier body computed, which are not saved: compute them "
                f"and step in the same `with step:`."
            )

    def _is_new(self, parameter: torch.Tensor) -> bool:
        """Whether the present body wrote to the parameter's gradient."""
        gradient = _gradient_of(parameter)
        if gradient is None:
            return False
        old = self._old.get(id(parameter))
        return old is None or old[0]() is not gradient or old[1] != gradient._version

    def require_used_gradients(self) -> None:
        """Raise ``Misuse`` if the body leaves gradients that no optimizer has stepped with, or
        caught a ``Misuse``."""
        if self.misuse:
            raise Misuse(self.misuse)
        for key, parameter in self._parameters():
            if id(parameter) not in self._stepped and self._is_new(parameter):
                raise Misuse(
                    f"The body of step {self._number} left a gradient in {key} without a step of "
                    f"its optimizer: gradient accumulation belongs inside one `with step:`, so let "
                    f"the optimizer step in the body or call its zero_grad() (the model's, if no "
                    f"optimizer has the parameter) at the end of it."
                )

    def check(self) -> None:
        """Raise ``Interrupted`` if a peer was lost, else wait until the step before is safe.

        Called before each optimizer step and once more before the state is copied, for bodies in
        which no optimizer steps (a loss scaler skips some).
        """
        self._require_peers()
        number = self._number
        if self._checked or number is None:
            return
        self._checked = True
        started = time.monotonic()
        self._wait_copied(number - 1)
        self.copy_wait_s = time.monotonic() - started
        wanted = self._newest_replicated(number - 1)
        if wanted < 1 or self._control.confirmed >= wanted:
            return
        if self._gave_up_at is not None and self._control.confirmed <= self._gave_up_at:
            self.unprotected += 1
            return
        started = time.monotonic()
        in_time = self._control.wait_confirmed(wanted, self._epoch, self._confirm_timeout_s)
        self.confirm_wait_s = time.monotonic() - started
        self._require_peers()
        if in_time:
            self._gave_up_at = None
            return
        self.unprotected += 1
        if self._control.given_up >= wanted:
            return  # why there is no replica of it was said; the next step's may be confirmed
        if self.unprotected == 1:
            self._link.send(
                Note(
                    f"Step {number} went on without confirmation of step {wanted} after "
                    f"{self._confirm_timeout_s:g} s; until confirmations catch up, a lost rank may "
                    f"cost more than it should."
                )
            )
        self._gave_up_at = self._control.confirmed

    def _require_peers(self) -> None:
        if self._control.disturbed(self._epoch):
            self.interrupted = True
            raise Interrupted("A peer was lost; this step is run again.")


def _parameters_of(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of the gradient: asking a DTensor for values is a collective."""
    return None if parameter.grad is None else local_part(parameter.grad)


def _is_zero(gradient: torch.Tensor) -> bool:
    values = gradient.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    return not bool(values.any())
