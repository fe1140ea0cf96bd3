"""The last check before an optimizer overwrites weights, and on what a body leaves behind.

One hook before every ``optimizer.step()`` of the process. It refuses the step when a peer was
lost (an aborted collective may have left garbage in the gradients), and holds it back until the
state before is safe (``state`` says why that is enough). That wait is the runtime's only one.

Gradients are not saved, so none may carry from one body to the next: every body uses or clears
those that it computes, and no optimizer steps with one that an earlier body left.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import TensorWeakRef

from deadpool_runtime.context import Link
from deadpool_runtime.control import Control
from deadpool_runtime.errors import Interrupted, Misuse
from deadpool_runtime.protocol import Note

Parameters = Callable[[], Iterable[tuple[str, torch.Tensor]]]


class StepGuard:
    """Watches the optimizers from the first step of the job to the last.

    ``parameters``: gives every parameter of the training state with its key. ``optimizers`` and
    ``schedulers``: those whose state is saved, the latter also among other objects.
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
        confirm_timeout_s: float,
    ) -> None:
        self._control = control
        self._link = link
        self._parameters = parameters
        self._optimizers = list(optimizers)
        self._schedulers = list(schedulers)
        #: Optimizers that a scheduler drives, once it is known that the scheduler is attached.
        self._scheduled: set[int] = set()
        self._confirm_timeout_s = confirm_timeout_s
        self._hook: Any = None
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
        #: Seconds the present step was held back.
        self.blocked_s = 0.0
        #: Steps that were let through without a confirmation.
        self.unprotected = 0

    def install(self) -> None:
        """Begin to watch."""
        self._hook = register_optimizer_step_pre_hook(self._before_optimizer)

    def remove(self) -> None:
        """Stop watching; the script's optimizers and scalers are its own again."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
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

    def begin(self, number: int, epoch: int) -> None:
        """The body of step ``number`` starts."""
        self._number, self._epoch = number, epoch
        self._checked = False
        self.interrupted, self.misuse = False, ""
        self._stepped.clear()
        self._old = {
            id(parameter): (TensorWeakRef(parameter.grad), parameter.grad._version)
            for _, parameter in self._parameters()
            if parameter.grad is not None
        }
        self.blocked_s = 0.0

    def end(self) -> None:
        """No body runs any more."""
        self._number = None
        self._old.clear()

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
        optimizers = set(map(id, self._optimizers))

        def unknown() -> bool:
            attached = {id(each) for each in _schedulers_in(self._schedulers)}
            return any(
                issubclass(type(each), LRScheduler)
                and id(each) not in attached
                and id(getattr(each, "optimizer", None)) in optimizers
                for each in gc.get_objects()
            )

        if unknown():
            gc.collect()  # one that nobody uses any more may be left
            if unknown():
                raise Misuse(
                    "A learning-rate scheduler drives an optimizer but was not given to attach: "
                    "attach(model, optimizer, scheduler)."
                )

    def _require_attached(self, optimizer: Optimizer) -> None:
        """A wrapper around an attached optimizer will do, if both have the same state."""
        if id(optimizer) not in self._scheduled and hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            self.require_schedulers()
            self._scheduled.add(id(optimizer))
        if any(optimizer is each or optimizer.state is each.state for each in self._optimizers):
            return
        attached = {id(parameter) for _, parameter in self._parameters()}
        if not attached.isdisjoint(map(id, _parameters_of(optimizer))):
            raise Misuse(
                f"An optimizer ({type(optimizer).__qualname__}) that was not given to attach "
                f"stepped in step {self._number}, so its state would be lost with a rank."
            )

    def _require_new_gradients(self, optimizer: Optimizer) -> None:
        for parameter in _parameters_of(optimizer):
            gradient = parameter.grad
            if gradient is None or self._is_new(parameter) or _is_zero(gradient):
                continue
            raise Misuse(
                f"An optimizer ({type(optimizer).__qualname__}) stepped in step {self._number} "
                f"with gradients that an earlier body computed, which are not saved: compute them "
                f"and step in the same `with step:`."
            )

    def _is_new(self, parameter: torch.Tensor) -> bool:
        """Whether the present body wrote to the parameter's gradient."""
        gradient = parameter.grad
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
        if number < 2 or self._control.confirmed >= number - 1:
            return
        if self._gave_up_at is not None and self._control.confirmed <= self._gave_up_at:
            self.unprotected += 1
            return
        started = time.monotonic()
        in_time = self._control.wait_confirmed(number - 1, self._epoch, self._confirm_timeout_s)
        self.blocked_s += time.monotonic() - started
        self._require_peers()
        if in_time:
            self._gave_up_at = None
            return
        if self.unprotected == 0:
            self._link.send(
                Note(
                    f"Step {number} went on without confirmation of step {number - 1} after "
                    f"{self._confirm_timeout_s:g} s; until confirmations catch up, a lost rank may "
                    f"cost more than one step."
                )
            )
        self.unprotected += 1
        self._gave_up_at = self._control.confirmed

    def _require_peers(self) -> None:
        if self._control.disturbed(self._epoch):
            self.interrupted = True
            raise Interrupted("A peer was lost; this step is run again.")


def _schedulers_in(values: Iterable[Any]) -> list[LRScheduler]:
    """Every scheduler among ``values`` and in what they consist of."""
    found: list[LRScheduler] = []
    seen: set[int] = set()
    pending = list(values)
    while pending:
        each = pending.pop()
        if id(each) in seen or isinstance(each, Optimizer | torch.nn.Module | torch.Tensor):
            continue
        seen.add(id(each))
        if isinstance(each, LRScheduler):
            found.append(each)
        if isinstance(each, list | tuple):
            pending += each
        elif isinstance(each, dict):
            pending += each.values()
        elif hasattr(each, "state_dict"):
            pending += vars(each).values() if hasattr(each, "__dict__") else ()
    return found


def _parameters_of(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _is_zero(gradient: torch.Tensor) -> bool:
    values = gradient.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    return not bool(values.any())
