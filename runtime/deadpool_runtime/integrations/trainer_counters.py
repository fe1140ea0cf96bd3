"""What a ``transformers.Trainer`` counts besides model, optimizer and scheduler."""

from __future__ import annotations

from typing import Any

import torch

#: What training changes in the trainer's state; the rest of it follows from the script's arguments.
_STATE = (
    *("epoch", "global_step", "num_input_tokens_seen", "total_flos", "log_history"),
    *("best_metric", "best_global_step", "best_model_checkpoint"),
)
#: Numbers in attributes of the trainer.
_NUMBERS = ("_total_loss_scalar", "_globalstep_last_logged", "current_flos")


class Counters:
    """Saves and brings back the trainer's counters, its log and its callbacks' states.

    ``epoch`` and ``update``: where the trainer's loop is to begin. A callback's state is what it
    exports (``ExportableState``), or what its ``state_dict`` gives.
    """

    def __init__(self, trainer: Any, epoch: int, update: int) -> None:
        self._trainer = trainer
        self._epoch = epoch
        self._update = update
        self._began = False

    @property
    def place(self) -> tuple[int, int]:
        """Epoch and number, from 0, of the optimizer step that is asked for next."""
        return self._epoch, self._update

    def begin_epoch(self, epoch: int, update: int) -> None:
        """The trainer is about to ask for that update of an epoch."""
        self._epoch, self._update, self._began = epoch, update, False

    def begin(self) -> None:
        """The update begins."""
        self._began = True

    def end(self) -> None:
        """The update that began, if there is one, has ended."""
        self._update += self._began
        self._began = False

    def state_dict(self) -> dict[str, Any]:
        """All of it, in plain values."""
        trainer = self._trainer
        return {
            "place": [self._epoch, self._update],
            "state": {name: plain(getattr(trainer.state, name)) for name in _STATE},
            "control": {name: bool(value) for name, value in vars(trainer.control).items()},
            "numbers": {name: plain(getattr(trainer, name)) for name in _NUMBERS},
            "loss": trainer._tr_loss.detach().clone(),
            "callbacks": [plain(_exported(each)) for each in self._callbacks()],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Bring it back into the objects that are there."""
        trainer = self._trainer
        self._epoch, self._update = saved["place"]
        self._began = False
        for holder, values in (
            (trainer.state, saved["state"]),
            (trainer.control, saved["control"]),
            (trainer, saved["numbers"]),
        ):
            for name, value in values.items():
                present = getattr(holder, name, None)
                if isinstance(present, list) and isinstance(value, list):
                    present[:] = value
                else:
                    setattr(holder, name, value)
        with torch.no_grad():
            trainer._tr_loss.copy_(saved["loss"])
        for callback, exported in zip(self._callbacks(), saved["callbacks"], strict=True):
            if hasattr(callback, "load_state_dict"):
                callback.load_state_dict(exported)
            else:
                vars(callback).update(exported["attributes"])

    def _callbacks(self) -> list[Any]:
        return [
            each
            for each in self._trainer.callback_handler.callbacks
            if hasattr(each, "load_state_dict") or hasattr(each, "from_state")
        ]


def _exported(callback: Any) -> Any:
    if hasattr(callback, "load_state_dict"):
        return callback.state_dict()
    return {"attributes": callback.state()["attributes"]}


def plain(value: Any) -> Any:
    """The value with numpy's numbers as Python's, in containers too."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    return value
