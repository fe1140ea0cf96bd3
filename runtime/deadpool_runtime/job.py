"""What a training script holds: the job and, for the length of a step's body, the step.

Both classes here do what they say without protecting anything. ``offline`` uses them as they are;
``session`` adds the protection under ``deadpool-launch``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

from deadpool_runtime.errors import Misuse
from deadpool_runtime.user_state import put_back


class Step:
    """One training step; use it as ``with step:`` around the whole body, once.

    The body is everything that changes the training state: forward, backward (all micro-batches of
    it), optimizer, scheduler, scaler, the script's own counters in ``job.state``.
    """

    def __init__(self, number: int) -> None:
        #: 1 for the first step of the job, whatever happened since.
        self.number = number
        #: The body ended, and its effects stand. False after a step that a lost peer undid:
        #: it will be yielded again, so what follows the ``with`` block should look at this.
        self.completed = False
        #: What ``report`` was given last.
        self.loss: float | None = None
        self.is_last = False

    def report(self, *, loss: float) -> None:
        """Tell the launcher this step's loss, for its display and its journal."""
        self.loss = float(loss)

    def stop(self) -> None:
        """Make this the last step. Every rank must call it in the same step.

        Leaving the loop by ``break`` works too, but a rank lost after that cannot be replaced.
        """
        self.is_last = True

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        self.completed = error is None
        return None


class Job(ABC):
    """The training run as the script sees it; made by ``attach``."""

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}
        self._has_steps = False

    @property
    def state(self) -> dict[str, Any]:
        """Plain values of the script's own (numbers, text, bytes, tensors, lists, tuples, dicts).

        They belong to this rank, are saved with every step, and roll back with it: the lists,
        dicts and tensors in it stay the same objects then.
        """
        return self._state

    @state.setter
    def state(self, values: dict[str, Any]) -> None:
        self._set_state(dict(values))

    @property
    @abstractmethod
    def world_size(self) -> int:
        """How many ranks take part in the present step. Smaller than at the start while ranks are
        set aside because no spare was left for them."""

    @property
    def stopping(self) -> bool:
        """The job is stopped at the end of this step, before its time limit: the same on every
        rank from the beginning of its last step on. Save a checkpoint of your own behind the body
        then; the process ends when the next step is asked for.
        """
        return False

    def _set_state(self, values: dict[str, Any]) -> None:
        # The same dict stays: the script may have a name for it.
        self._state.clear()
        self._state.update(values)

    def _put_state_back(self, saved: dict[str, Any]) -> None:
        """Make ``state`` what it was; the script's names for what is in it stay true."""
        put_back(self._state, saved)

    @abstractmethod
    def steps(
        self, loader: Iterable[Any], *, max_steps: int | None = None, epochs: int | None = None
    ) -> Iterator[tuple[Step, Any]]:
        """Yield each step and its batch; call it once per job.

        ``epochs``: how often to go through the loader (1 unless given). ``max_steps``: stop after
        so many steps instead, going through the loader as often as that takes. Give one of them.
        A sampler with ``set_epoch`` is told the epoch, from 0.
        """

    def _begin_steps(self, max_steps: int | None, epochs: int | None) -> tuple[int | None, int]:
        """Check a call of ``steps``; returns the limits, with ``epochs`` -1 for no limit."""
        if self._has_steps:
            raise Misuse(
                "job.steps was called a second time: let one call make all passes, with epochs= "
                "or max_steps=."
            )
        if max_steps is not None and epochs is not None:
            raise Misuse("job.steps takes max_steps= or epochs=, not both.")
        for name, value in (("max_steps", max_steps), ("epochs", epochs)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise Misuse(f"job.steps was given {name}={value!r}, which is no positive number.")
        self._has_steps = True
        return max_steps, -1 if max_steps is not None else (epochs or 1)
