"""One rank in this process, and a link that answers as a launcher would."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deadpool_runtime import context, protocol, session
from deadpool_runtime.control import Control
from deadpool_runtime.job import Job, Step
from deadpool_runtime.replication.arena import inventory

STORE = protocol.Address("127.0.0.1", 1)


class NoGroups:
    """A registry of a process without any group."""

    groups: tuple[()] = ()
    sealed = False

    def seal(self) -> None:
        self.sealed = True

    def abort(self, epoch: int | None = None) -> int:
        return 0

    def open_store(self, host: str, port: int, timeout: Any) -> Any:
        return dist.HashStore()

    def rebuild(self, epoch: int, store: Any, *, aside: Collection[int] = ()) -> None:
        return None


class Launcher:
    """The link's other end: protects, plans for the newest copy (or ``step``), ends."""

    def __init__(self, arena: Path) -> None:
        self.arena = arena
        self.said: list[Any] = []
        self.control = Control(self, NoGroups())
        self.step: int | None = None
        self.at_end: Callable[[], None] | None = None
        self.verdict = True

    def start(self, on_message: Callable[[Any], None]) -> None:
        raise AssertionError

    def send(self, message: Any) -> None:
        self.said.append(message)
        tell = self.control.on_message
        match message:
            case protocol.Attached():
                tell(protocol.Protect(1, None))
            case protocol.Parked(epoch=epoch):
                newest = max(copy.step for copy in inventory(self.arena))
                step = newest if self.step is None else self.step
                tell(protocol.Plan(epoch, step, STORE, [], None))
            case protocol.Restored(epoch=epoch):
                tell(protocol.Resume(epoch))
            case protocol.StepRaised(step=step) if self.verdict:
                tell(protocol.RaiseIt(step))
            case protocol.StepsEnded():
                act, self.at_end = self.at_end, None
                if act is not None:
                    act()
                else:
                    tell(protocol.AllEnded())
            case _:
                pass

    def kinds(self) -> list[str]:
        return [type(message).__name__ for message in self.said]

    def revoke(self) -> None:
        self.control.on_message(protocol.Revoke(self.control.newest + 1))


def install(monkeypatch: pytest.MonkeyPatch, arena: Path, world_size: int = 1) -> Launcher:
    """A new launcher, and a process that has not attached yet. ``arena``: an empty folder."""
    launcher = Launcher(arena)
    launcher.control.on_message(protocol.Begin(1, STORE, False, 0))
    made = context.RankContext(
        rank=0,
        local_rank=0,
        world_size=world_size,
        born=1,
        epoch=1,
        replacement=False,
        attempt=0,
        link=launcher,
        control=launcher.control,
        registry=NoGroups(),  # type: ignore[arg-type]
        store=STORE,
        record_final_state=True,
        fault_step=None,
        run_dir="",
        arena=str(arena),
        confirm_timeout_s=2.0,
    )
    monkeypatch.setattr(context, "_current", made)
    monkeypatch.setattr(session, "_attached", False)
    return launcher


class Training:
    """A small model under protection; calling it runs one body."""

    def __init__(self, **extras: Any) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.job: Job = session.attach(self.model, self.optimizer, extras=extras)

    def __call__(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(batch).sum().backward()
        self.optimizer.step()

    def weights(self) -> list[Any]:
        return [parameter.tolist() for parameter in self.model.parameters()]


BATCHES = [torch.randn(3, 2, generator=torch.Generator().manual_seed(i)) for i in range(5)]


def run_body(training: Training, body: Callable[[Step, Any], None]) -> None:
    for step, batch in training.job.steps(BATCHES):
        with step:
            body(step, batch)


def raising(error: BaseException) -> Callable[[Step, Any], None]:
    def body(step: Step, batch: Any) -> None:
        raise error

    return body
