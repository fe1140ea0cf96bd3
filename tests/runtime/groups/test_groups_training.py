"""A killed peer is replaced under a living DDP, and training goes on bit for bit.

A worker here keeps copies of its own state and restores them by itself; the product does that
elsewhere. What is tested is that groups and wrappers allow it.
"""

from __future__ import annotations

import copy
import hashlib
import os
import pickle
import signal
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trainees import PATIENCE, Death, Trainee, play

from deadpool_runtime.groups.engines import Engines
from deadpool_runtime.groups.registry import GroupRegistry

#: Three, since the order of summing two numbers does not show.
WORLD_SIZE = 3
STEPS = 5


class Model(nn.Module):
    """Several buckets, dropout, buffers, and a branch that some steps leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.norm = nn.BatchNorm1d(32)
        self.branch = nn.Linear(32, 32)
        self.dropout = nn.Dropout(0.3)
        self.last = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, with_branch: bool) -> torch.Tensor:
        x = self.dropout(torch.relu(self.norm(self.first(x))))
        if with_branch:
            x = x + torch.tanh(self.branch(x))
        result: torch.Tensor = self.last(x)
        return result


class Training(Trainee):
    """One rank's process, which keeps copies of its state."""

    def __init__(
        self,
        crew: Any,
        rank: int,
        options: dict[str, Any],
        deaths: list[Death],
        accumulate: int,
        incarnation: int,
        epoch: int,
    ) -> None:
        super().__init__(crew, rank, WORLD_SIZE, incarnation, epoch)
        self.deaths, self.accumulate, self.options = deaths, accumulate, options
        torch.manual_seed(1)
        self.model = DistributedDataParallel(Model(), bucket_cap_mb=0.002, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.engines = Engines([self.model], [self.optimizer])
        self.group = dist.group.WORLD
        self.losses: dict[int, float] = {}
        self.saved: dict[int, Any] = {}
        self._save(0)

    def run(self) -> dict[str, Any]:
        self.train(STEPS)
        assert dist.group.WORLD is self.group
        assert self.model.process_group is self.group
        assert len(self.registry.groups) == 1
        return {"losses": self.losses, "hash": _digest(self._state()), "buckets": self._buckets()}

    def step(self, step: int) -> None:
        torch.manual_seed(1000 * step + self.rank)
        data = torch.Generator().manual_seed(5000 * step + self.rank)
        self.optimizer.zero_grad()
        total = 0.0
        for part in range(self.accumulate):
            inputs = torch.randn(6, 8, generator=data)
            is_last = part == self.accumulate - 1
            with nullcontext() if is_last else self.model.no_sync():
                with_branch = not self.options.get("find_unused_parameters") or step % 2 == 0
                loss = self.model(inputs, with_branch).square().mean()
                if is_last or self.accumulate == 1:
                    self._die_at(step, "forward")
                with self._dying_in_backward(step):
                    loss.backward()
            total += loss.item()
        self.optimizer.step()
        self._die_at(step, "stepped")
        self.losses[step] = total
        self.done = step
        self._save(step)

    def recover(self, store: dist.Store) -> None:
        has_state = self.incarnation == 0 or not self.registry.detached
        # What a rank had not saved when it died is lost, so all go back to what everybody has.
        newest = str(self.done) if has_state else store.get(f"saved/{self.rank}").decode()
        store.set(f"newest/{self.epoch}/{self.rank}", newest)
        store.set(f"has_state/{self.epoch}/{self.rank}", str(has_state))
        self.registry.rebuild(self.epoch, store)
        ranks = range(WORLD_SIZE)
        step = min(int(store.get(f"newest/{self.epoch}/{rank}")) for rank in ranks)
        donor = next(
            rank for rank in ranks if store.get(f"has_state/{self.epoch}/{rank}") == b"True"
        )
        box: list[Any] = [self.saved[step] if self.rank == donor else None]
        dist.broadcast_object_list(box, src=donor)
        if not has_state:
            # Every rank has batch statistics of its own; the rest is the same everywhere.
            self.saved = {step: box[0]}
            self._restore(box[0])
            buffers = pickle.loads(store.get(f"buffers/{self.rank}/{step}"))
            self.model.load_state_dict(buffers, strict=False)
            self._save(step)
        self._restore(self.saved[step])
        self.done = step

    def _save(self, step: int) -> None:
        if not self.registry.detached:
            buffers = pickle.dumps(dict(self.model.named_buffers()))
            self.client.set(f"buffers/{self.rank}/{step}", buffers)
            self.client.set(f"saved/{self.rank}", str(step))
        self.saved[step] = self._state()
        self.saved.pop(step - 3, None)

    def _state(self) -> dict[str, Any]:
        return copy.deepcopy(
            {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        )

    def _restore(self, state: dict[str, Any]) -> None:
        state = copy.deepcopy(state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _buckets(self) -> list[int]:
        return [bucket.buffer().numel() for bucket in self._reducer._get_zeros_like_grad_buckets()]

    @property
    def _reducer(self) -> Any:
        return self.model.reducer

    def _die_at(self, step: int, phase: str) -> None:
        if Death(self.rank, step, phase, incarnation=self.incarnation) in self.deaths:
            os.kill(os.getpid(), signal.SIGKILL)

    def _dying_in_backward(self, step: int) -> Any:
        if Death(self.rank, step, "backward", incarnation=self.incarnation) not in self.deaths:
            return nullcontext()
        weight = self.model.module.norm.weight
        weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        return nullcontext()


def train(
    crew: Any, options: dict[str, Any], deaths: list[Death], accumulate: int = 1
) -> list[dict[str, Any]]:
    """Train in ``WORLD_SIZE`` processes, replacing those that die, and return what each reports."""

    def body(rank: int, incarnation: int, epoch: int) -> dict[str, Any]:
        return Training(crew, rank, options, deaths, accumulate, incarnation, epoch).run()

    return play(crew, WORLD_SIZE, deaths, body, park_s=10.0)


VARIANTS: dict[str, tuple[dict[str, Any], int]] = {
    "default": ({}, 1),
    "bucket_view": ({"gradient_as_bucket_view": True}, 1),
    "find_unused": ({"find_unused_parameters": True}, 1),
    "find_unused_bucket_view": (
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        1,
    ),
    "accumulation": ({}, 3),
    "accumulation_bucket_view": ({"gradient_as_bucket_view": True}, 3),
}
DEATHS: dict[str, list[Death]] = {
    "first_step": [Death(1, 1, "backward")],
    "forward": [Death(0, 3, "forward")],
    "backward": [Death(2, 3, "backward")],
    "stepped": [Death(1, 3, "stepped")],
    "replacement_too": [Death(1, 2, "backward"), Death(1, 4, "stepped", incarnation=1)],
    "another_rank_too": [Death(2, 2, "forward"), Death(0, 2, "stepped")],
}


#: What every rank reports of a run in which nobody died, by variant.
_undisturbed: dict[str, list[dict[str, Any]]] = {}


@pytest.mark.parametrize("when", DEATHS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_training_continues_bit_for_bit(
    new_crew: Callable[[], Any], variant: str, when: str
) -> None:
    options, accumulate = VARIANTS[variant]
    if variant not in _undisturbed:
        _undisturbed[variant] = train(new_crew(), options, [], accumulate)
    expected = _undisturbed[variant]
    found = train(new_crew(), options, DEATHS[when], accumulate)
    for rank in range(WORLD_SIZE):
        assert found[rank]["hash"] == expected[rank]["hash"]
        assert found[rank]["losses"].items() <= expected[rank]["losses"].items()
        assert found[rank]["buckets"] == expected[rank]["buckets"]
        assert len(found[rank]["buckets"]) > 1


@pytest.mark.parametrize("freeze", [False, True])
def test_frozen_buckets_are_never_laid_out_anew(crew: Any, freeze: bool) -> None:
    """Unfrozen, DDP does lay them out anew, or the test would show nothing."""

    def body(rank: int) -> tuple[list[int], list[int], bool]:
        registry = GroupRegistry()
        registry.install(detached=False)
        store = registry.open_store("127.0.0.1", crew.port, PATIENCE)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=PATIENCE)
        model: Any = DistributedDataParallel(Model(), bucket_cap_mb=0.002)
        engines = Engines([model]) if freeze else None

        def buckets() -> list[int]:
            zeros = model.reducer._get_zeros_like_grad_buckets()
            return [bucket.buffer().numel() for bucket in zeros]

        before = buckets()
        for _ in range(3):
            model(torch.randn(6, 8), True).sum().backward()
        if engines is not None:
            engines.reset()
            model(torch.randn(6, 8), True).sum().backward()
        return before, buckets(), model._has_rebuilt_buckets

    for before, after, has_rebuilt in crew.run(2, body):
        assert has_rebuilt is not freeze
        assert (before == after) is freeze
        assert (len(before) > 1) is freeze


def _digest(state: Any) -> str:
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            digest.update(value.contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                digest.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        else:
            digest.update(repr(value).encode())

    add(state)
    return digest.hexdigest()
