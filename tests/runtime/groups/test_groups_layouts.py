"""A killed rank is replaced in every parallel layout, and training goes on bit for bit.

A worker here writes its state to a file after every step, and every rank, a replacement too,
reads its own. The product fetches it from other ranks; what is tested is that groups, wrappers
and the keys of tensors allow it, and that ranks which say they have bytes in common have.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import parallel_layouts
import pytest
import torch
import torch.distributed as dist
from trainees import Death, Trainee, play

from deadpool_runtime.groups.engines import Engines
from deadpool_runtime.replication.classes import ranks_in_common
from deadpool_runtime.tensors import TensorMap

STEPS = 4


class Training(Trainee):
    """One rank's process, whose state is in files."""

    def __init__(
        self,
        crew: Any,
        folder: Path,
        layout: str,
        deaths: list[Death],
        rank: int,
        incarnation: int,
        epoch: int,
    ) -> None:
        size, _ = parallel_layouts.LAYOUTS[layout]
        super().__init__(crew, rank, size, incarnation, epoch)
        self.folder = folder
        self.death = next(
            (death for death in deaths if (death.rank, death.incarnation) == (rank, incarnation)),
            None,
        )
        self.program = parallel_layouts.build(layout)
        model, optimizer = self.program.model, self.program.optimizer
        self.engines = Engines([model], [optimizer])
        self.tensors = TensorMap([model], [optimizer], {})
        self.registry.seal()
        self.objects = [id(record.living()) for record in self.registry.groups]
        self.losses: dict[int, float | None] = {}
        if incarnation == 0:
            self._save(0)

    def run(self) -> dict[str, Any]:
        self.train(STEPS)
        assert [id(record.living()) for record in self.registry.groups] == self.objects
        classes = ranks_in_common(self.tensors, [self.program.model], self.rank)
        everything = self.tensors.everything()
        assert classes.keys() == everything.keys()
        return {
            "losses": self.losses,
            "layout": self.engines.layout,
            "hashes": {key: _hash(tensor) for key, tensor in everything.items()},
            "classes": classes,
        }

    def step(self, step: int) -> None:
        torch.manual_seed(1000 * step + self.program.data_rank)
        self._count = 0
        parallel_layouts.Mark.seen = lambda phase: self._die_at(step, phase)
        self.program.optimizer.zero_grad()
        batch = parallel_layouts.batch(step, self.program.data_rank)
        loss = self.program.train(*batch)
        self.program.optimizer.step()
        self._die_at(step, "stepped")
        self.program.after(*batch)
        self.losses[step] = loss
        self.done = step
        self._save(step)

    def recover(self, store: dist.Store) -> None:
        newest = max(int(path.suffix[1:]) for path in self.folder.glob(f"{self.rank}.*"))
        store.set(f"newest/{self.epoch}/{self.rank}", str(newest))
        self.registry.rebuild(self.epoch, store)
        # What a rank had not saved when it died is lost, so all go back to what everybody has.
        self.done = min(int(store.get(f"newest/{self.epoch}/{rank}")) for rank in range(self.size))
        self._restore(self.done)

    def _save(self, step: int) -> None:
        state = {key: tensor.detach().clone() for key, tensor in self.tensors.everything().items()}
        written = self.folder / f"writing-{self.rank}"
        torch.save((state, self.tensors.wrapped_state()), written)
        written.rename(self.folder / f"{self.rank}.{step}")

    @torch.no_grad()
    def _restore(self, step: int) -> None:
        state, wrapped = torch.load(self.folder / f"{self.rank}.{step}")
        self.tensors.forget_optimizer_state(set(state))
        for key, tensor in state.items():
            if key.startswith("o/"):
                self.tensors.make_state(key, tensor, wrapped=key in wrapped, on_cpu=False)
        live = self.tensors.everything()
        assert live.keys() == state.keys()
        for key, tensor in state.items():
            live[key].copy_(tensor)
        assert self.tensors.wrapped_state() == wrapped

    def _die_at(self, step: int, phase: str) -> None:
        death = self.death
        if death is not None and (death.step, death.phase) == (step, phase):
            if self._count == death.count:
                os.kill(os.getpid(), signal.SIGKILL)
            self._count += 1


def train(crew: Any, folder: Path, layout: str, deaths: list[Death]) -> list[dict[str, Any]]:
    """Train, replacing those that die, and return what each rank reports."""
    size, _ = parallel_layouts.LAYOUTS[layout]
    folder.mkdir()

    def body(rank: int, incarnation: int, epoch: int) -> dict[str, Any]:
        return Training(crew, folder, layout, deaths, rank, incarnation, epoch).run()

    return play(crew, size, deaths, body, park_s=20.0)


#: Part of the everyday tests, as the layouts that test_session_layouts.py leaves out.
EVERYDAY: dict[str, list[Death]] = {
    "hsdp": [Death(2, 3, "backward")],
    "replicate_tp": [Death(2, 3, "backward")],
    "fsdp_gpipe": [Death(1, 3, "forward", count=2)],
}
#: The same for the others.
MORE: dict[str, list[Death]] = {
    "zero": [Death(1, 3, "backward")],
    "fsdp": [Death(1, 3, "backward")],
    "ddp_tp": [Death(3, 3, "backward")],
    "fsdp_tp": [Death(1, 2, "forward")],
    "ddp_1f1b": [Death(2, 3, "backward", count=2)],
    "fsdp_1f1b_tp": [Death(6, 3, "backward", count=1)],
}
DEATHS: dict[str, list[Death]] = {
    "first_step": [Death(1, 1, "backward")],
    "first_rank": [Death(0, 3, "forward")],
    "stepped": [Death(1, 3, "stepped")],
    "replacement_too": [Death(1, 2, "backward"), Death(1, 4, "forward", incarnation=1)],
    "another_rank_too": [Death(1, 2, "forward"), Death(0, 2, "stepped")],
}

#: What every rank reports of a run in which nobody died, by layout.
_undisturbed: dict[str, list[dict[str, Any]]] = {}


@pytest.mark.parametrize("layout", EVERYDAY)
def test_layout_continues_bit_for_bit(
    new_crew: Callable[[], Any], tmp_path: Path, layout: str
) -> None:
    _compare(new_crew, tmp_path, layout, EVERYDAY[layout])


@pytest.mark.matrix
@pytest.mark.parametrize("layout", MORE)
def test_further_layout_continues_bit_for_bit(
    new_crew: Callable[[], Any], tmp_path: Path, layout: str
) -> None:
    _compare(new_crew, tmp_path, layout, MORE[layout])


@pytest.mark.matrix
@pytest.mark.parametrize("when", DEATHS)
@pytest.mark.parametrize("layout", parallel_layouts.LAYOUTS)
def test_every_layout_and_death(
    new_crew: Callable[[], Any], tmp_path: Path, layout: str, when: str
) -> None:
    _compare(new_crew, tmp_path, layout, DEATHS[when])


def _compare(new_crew: Callable[[], Any], folder: Path, layout: str, deaths: list[Death]) -> None:
    if layout not in _undisturbed:
        _undisturbed[layout] = train(new_crew(), folder / "undisturbed", layout, [])
        _require_classes_hold(_undisturbed[layout])
    expected = _undisturbed[layout]
    found = train(new_crew(), folder / "disturbed", layout, deaths)
    for rank, report in enumerate(found):
        assert report["hashes"] == expected[rank]["hashes"]
        assert report["classes"] == expected[rank]["classes"]
        assert report["losses"].items() <= expected[rank]["losses"].items()


def _require_classes_hold(reports: list[dict[str, Any]]) -> None:
    """Every rank of a class names the same class, and has the same bytes."""
    for rank, report in enumerate(reports):
        for key, ranks in report["classes"].items():
            assert rank in ranks
            for other in ranks:
                assert reports[other]["classes"][key] == ranks
                assert reports[other]["hashes"][key] == report["hashes"][key], key


def _hash(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()
