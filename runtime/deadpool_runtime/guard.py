"""The last check before an optimizer overwrites weights.

One hook before every ``optimizer.step()`` of the process. It refuses the step when a peer was
lost (an aborted collective may have left garbage in the gradients), and holds it back until the
state before is safe (``state`` says why that is enough). That wait is the runtime's only one.
"""

from __future__ import annotations

import time
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from deadpool_runtime.context import Link
from deadpool_runtime.control import Control
from deadpool_runtime.errors import Interrupted, Misuse
from deadpool_runtime.protocol import Note

#: Longest wait for a confirmation; protection never stalls training for longer than this.
CONFIRM_TIMEOUT_S = 2.0


class StepGuard:
    """Watches the optimizers from the first step of the job to the last."""

    def __init__(
        self, control: Control, link: Link, confirm_timeout_s: float = CONFIRM_TIMEOUT_S
    ) -> None:
        self._control = control
        self._link = link
        self._confirm_timeout_s = confirm_timeout_s
        self._hook: Any = None
        self._number: int | None = None
        self._epoch = 0
        self._checked = False
        self._gave_up_at: int | None = None
        #: Whether an optimizer stepped in the present body.
        self.stepped = False
        #: Seconds the present step was held back.
        self.blocked_s = 0.0
        #: Steps that were let through without a confirmation.
        self.unprotected = 0

    def install(self) -> None:
        """Begin to watch."""
        self._hook = register_optimizer_step_pre_hook(self._before_optimizer)

    def remove(self) -> None:
        """Stop watching; the script's optimizers are its own again."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def begin(self, number: int, epoch: int) -> None:
        """The body of step ``number`` starts."""
        self._number, self._epoch = number, epoch
        self._checked = self.stepped = False
        self.blocked_s = 0.0

    def end(self) -> None:
        """No body runs any more."""
        self._number = None

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._number is None:
            raise Misuse(
                "An optimizer stepped outside of `with step:`, where its effect would be lost "
                "when a rank is replaced: move it into the step's body."
            )
        self.stepped = True
        self.check()

    def check(self) -> None:
        """Raise ``Interrupted`` if a peer was lost, else wait until the step before is safe.

        Called before each optimizer step and once more before the state is copied, for bodies in
        which no optimizer steps (a loss scaler skips some).
        """
        if self._control.disturbed(self._epoch):
            raise Interrupted("A peer was lost; this step is run again.")
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
        if self._control.disturbed(self._epoch):
            raise Interrupted("A peer was lost; this step is run again.")
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
