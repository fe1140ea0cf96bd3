"""Durable checkpoints under real ranks: when a rank is lost with all its copies, the job goes on
from the disk and ends with the bits that it would have had.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from one_rank import Launcher, Training, run_body

from deadpool_runtime import context, protocol
from deadpool_runtime.durable import index, saving
from deadpool_runtime.testing import FakeLauncher, JobFailed, ParkedProcess

#: Layouts in which some state is on one rank alone, with few ranks and with several dimensions.
LAYOUTS = ("zero", pytest.param("fsdp_tp", marks=pytest.mark.matrix))
#: Many, so that a slow disk gets some of the checkpoints done while they are run.
RUN, EVERY = ("--steps=60",), 4


class LoseBoth:
    """Powers off rank 1's node and that of its replica's holder, once so many checkpoints are
    complete and rank 1 goes on.
    """

    def __init__(self, checkpoints: int) -> None:
        self.checkpoints = checkpoints
        self.struck_at: int | None = None

    def __call__(self, launcher: Any, rank: int, message: Any) -> None:
        if self.struck_at is not None or not isinstance(message, protocol.StepDone) or rank != 1:
            return
        if len(launcher.outcome.committed) < self.checkpoints:
            return
        self.struck_at = message.step
        held_by = launcher.holder(1).name
        size = range(launcher.world_size)
        holder = next(other for other in size if launcher.node(other).name == held_by)
        launcher.power_off(1)
        launcher.power_off(holder)


class DamagedNewest(FakeLauncher):
    """The newest checkpoint is damaged when it is needed for the first time."""

    count = 1

    def _read_checkpoint(self, lacking: Any) -> None:
        if not self.outcome.from_disk:
            assert self._checkpoint_dir is not None
            for step in index.list_complete(self._checkpoint_dir)[: self.count]:
                flip_a_byte(self._checkpoint_dir, step)
        super()._read_checkpoint(lacking)


class DamagedAll(DamagedNewest):
    """All checkpoints are."""

    count = 2


def flip_a_byte(directory: Path, step: int) -> None:
    """Damage what rank 1 wrote: the largest of its files."""
    folder = index.rank_directory(directory, step, 1)
    path = max(
        folder.iterdir(), key=lambda path: (path.name != index.RANK_INDEX, path.stat().st_size)
    )
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_is_lost_with_its_holder_comes_back_from_disk(
    run_layout: Callable[..., Any],
    undisturbed_layout: Callable[..., Any],
    tmp_path: Path,
    layout: str,
) -> None:
    strike = LoseBoth(1)
    outcome, numbers = run_layout(
        layout, *RUN, on_message=strike, checkpoint_dir=tmp_path, checkpoint_every=EVERY
    )
    assert strike.struck_at is not None
    assert outcome.from_disk == outcome.plans
    ((_, step),) = outcome.from_disk
    assert step in outcome.committed
    assert numbers == undisturbed_layout(layout, *RUN)
    # Who reads a checkpoint does not write it anew: others may still be reading it.
    again = [each for each in outcome.messages(protocol.Saved) if each.epoch > 1]
    assert all(each.step > step for each in again)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    run_layout: Callable[..., Any], undisturbed_layout: Callable[..., Any], tmp_path: Path
) -> None:
    strike = LoseBoth(2)
    outcome, numbers = run_layout(
        "zero",
        *RUN,
        kind=DamagedNewest,
        on_message=strike,
        checkpoint_dir=tmp_path,
        checkpoint_every=EVERY,
    )
    assert strike.struck_at is not None
    newest, before = [step for _, step in outcome.from_disk]
    assert newest > before
    assert {message.step for message in outcome.messages(protocol.RestoreFailed)} == {newest}
    assert numbers == undisturbed_layout("zero", *RUN)


def test_without_a_checkpoint_that_is_good_nothing_is_made_up(
    run_layout: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(JobFailed, match=r"no step is whole.*damaged checkpoints: \[\d+, \d+\]"):
        run_layout(
            "zero",
            *RUN,
            kind=DamagedAll,
            on_message=LoseBoth(2),
            checkpoint_dir=tmp_path,
            checkpoint_every=EVERY,
        )


def test_the_steps_end_though_the_disk_of_a_checkpoint_answers_nothing(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    present = context.current_context()
    assert present is not None
    changed = replace(present, checkpoint_dir=str(tmp_path / "disk"), checkpoint_every=5)
    monkeypatch.setattr(context, "_current", changed)
    monkeypatch.setattr(saving, "STALL_S", 0.01)
    answers = threading.Event()
    monkeypatch.setattr(saving, "write", lambda *_: answers.wait())
    training = Training()
    run_body(training, lambda _, batch: training(batch))
    answers.set()
    notes = [message.text for message in launcher.said if isinstance(message, protocol.Note)]
    assert notes == [
        "The durable checkpoint of step 5 was given up at the end of the steps: nothing of it "
        f"could be written to {tmp_path / 'disk'} for 0.01 s."
    ]


BREAKING = """
import atexit, sys, threading
import torch
import deadpool_runtime as deadpool
from deadpool_runtime.durable import saving

ended = threading.Event()
write = saving.write

def write_at_the_end(*args):
    assert ended.wait(60)
    return write(*args)

saving.write = write_at_the_end
atexit.register(ended.set)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = deadpool.attach(model, optimizer)
for step, batch in job.steps([torch.ones(1, 2)], max_steps=9):
    with step:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if step.number == 2:
        break
"""


def test_a_checkpoint_under_way_is_complete_when_the_script_left_the_loop_by_break(
    parked: ParkedProcess, tmp_path: Path
) -> None:
    """Here it is begun no earlier than the script's exit handlers run."""
    script, directory = tmp_path / "breaking.py", tmp_path / "checkpoints"
    script.write_text(BREAKING)
    outcome = FakeLauncher(
        parked,
        str(script),
        [],
        world_size=1,
        run_dir=tmp_path,
        checkpoint_dir=directory,
        checkpoint_every=2,
    ).run()
    assert outcome.committed == [2]
    assert index.list_complete(directory) == [2]
