"""The launcher's part in durable checkpoints: which are this job's, what cannot be committed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from deadpool_launch import checkpoints
from deadpool_launch.controller.checkpoints import earlier, newest_usable
from deadpool_launch.controller.config import Config
from deadpool_launch.controller.states import initial_state
from deadpool_launch.errors import UsageError
from deadpool_runtime.durable import index
from deadpool_runtime.durable.hashing import sum_of


def complete(directory: Path, step: int, job_id: str = "7", world_size: int = 2) -> None:
    """A checkpoint as far as the launcher looks at it."""
    sums = tuple(sum_of(b"") for _ in range(world_size))
    content = index.Complete(index.FORMAT, job_id, world_size, step, 1, sums)
    folder = index.step_directory(directory, step)
    folder.mkdir(parents=True)
    index.write_file(folder / index.COMPLETE, index.seal(content))


def test_only_what_this_very_job_left_is_found(tmp_path: Path) -> None:
    complete(tmp_path, 10)
    complete(tmp_path, 20)
    complete(tmp_path, 30, job_id="8")
    complete(tmp_path, 40, world_size=4)
    index.step_directory(tmp_path, 50).mkdir()
    assert checkpoints.found(tmp_path, "7", 2) == (20, 10)
    assert checkpoints.found(tmp_path / "none", "7", 2) == ()


def test_each_job_has_a_folder_of_its_own(tmp_path: Path) -> None:
    for job_id in ("7", "run.1a2b"):
        checkpoints.make_directory(tmp_path / "new", job_id)
    assert sorted(os.listdir(tmp_path / "new")) == ["7", "run.1a2b"]
    assert os.listdir(tmp_path / "new" / "7") == []


def test_folder_that_cannot_be_made_is_told_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"^--checkpoint-dir \S+/file: cannot be used \(Not a dir"):
        checkpoints.make_directory(tmp_path / "file", "7")


def test_what_lacks_a_part_is_not_committed(tmp_path: Path) -> None:
    complete(tmp_path, 10)
    with pytest.raises(checkpoints.NotCommitted, match=r"rank-00000/deadpool.json is missing"):
        checkpoints.commit(tmp_path, 20, 1, 2, keep=2)
    assert index.list_complete(tmp_path) == [10]


def test_those_of_an_earlier_launch_are_older_than_all_of_this_one(tmp_path: Path) -> None:
    for step in (60, 80, 20):
        complete(tmp_path, step)
    assert index.prune(tmp_path, 2, earlier={60, 80}) == [60]
    assert index.list_complete(tmp_path) == [80, 20]
    complete(tmp_path, 40)
    assert index.prune(tmp_path, 2, earlier={80}) == [80]
    assert index.list_complete(tmp_path) == [40, 20]


def test_one_of_this_launch_is_gone_back_to_before_any_of_an_earlier_one() -> None:
    state = initial_state(Config(("n1",), (), 1, checkpoints=(80, 60)))
    assert newest_usable(state) == 80
    state = replace(state, checkpoints={80: 0, 60: 0, 20: 3})
    assert newest_usable(state) == 20
    assert earlier(state) == {80, 60}
