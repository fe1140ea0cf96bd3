"""The launcher's part in durable checkpoints: which are this job's, what cannot be committed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deadpool_launch import checkpoints
from deadpool_launch.checkpoints import Command
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


TRAIN = Command("/train.py", ("--lr", "3e-4"), 2)
EVALUATE = Command("/train.py", ("--evaluate",), 2)


def launched(
    directory: Path, command: Command = TRAIN, restarts: int = 0, name: str | None = None
) -> tuple[str, bool]:
    """The folder that a launch of job 7 takes, and whether an earlier one had it."""
    place = checkpoints.choose(directory, "7", name, command, restarts)
    checkpoints.take(place.folder, command, restarts)
    return place.folder.name, place.taken_up


def test_each_launch_of_a_job_has_a_folder_of_its_own(tmp_path: Path) -> None:
    """The same command too: it may have been given another seed in its environment."""
    assert launched(tmp_path) == ("7", False)
    assert launched(tmp_path) == ("7-2", False)
    assert launched(tmp_path, EVALUATE) == ("7-3", False)


def test_launches_of_a_requeued_job_take_up_their_folders_in_the_same_order(tmp_path: Path) -> None:
    for command in (TRAIN, TRAIN, EVALUATE):
        launched(tmp_path, command)
    assert launched(tmp_path, TRAIN, restarts=1) == ("7", True)
    assert launched(tmp_path, TRAIN, restarts=1) == ("7-2", True)
    assert launched(tmp_path, EVALUATE, restarts=1) == ("7-3", True)
    assert launched(tmp_path, TRAIN, restarts=1) == ("7-4", False)
    assert launched(tmp_path, TRAIN, restarts=2) == ("7", True)


@pytest.mark.parametrize(
    "other",
    [
        Command("/other.py", TRAIN.script_args, 2),
        Command("/train.py", ("--lr", "1e-3"), 2),
        Command("/train.py", TRAIN.script_args, 4),
    ],
)
def test_another_command_takes_up_nothing(tmp_path: Path, other: Command) -> None:
    launched(tmp_path)
    assert launched(tmp_path, other, restarts=1) == ("7-2", False)


def test_folder_that_says_nothing_of_its_launch_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7-2").mkdir()
    (tmp_path / "7-2" / checkpoints.LAUNCH_NAME).write_text("{")
    assert launched(tmp_path, restarts=1) == ("7-3", False)


def test_whoever_gives_the_name_goes_on_from_what_is_there(tmp_path: Path) -> None:
    assert launched(tmp_path, name="gpt") == ("gpt", False)
    assert launched(tmp_path, EVALUATE, name="gpt") == ("gpt", True)


def test_only_what_is_complete_and_of_as_many_ranks_is_found(tmp_path: Path) -> None:
    place = checkpoints.Place(tmp_path / "gpt", True)
    complete(place.folder, 10)
    complete(place.folder, 20, job_id="8")
    complete(place.folder, 40, world_size=4)
    index.step_directory(place.folder, 50).mkdir()
    assert checkpoints.found(place, 2) == (20, 10)
    assert checkpoints.found(place._replace(taken_up=False), 2) == ()
    assert checkpoints.found(checkpoints.Place(tmp_path / "none", True), 2) == ()
    with pytest.raises(
        UsageError,
        match=r"^--checkpoint-name gpt: the checkpoint of step 40 there is of 4 ranks and this job "
        r"has 3; run it with as many, or give another name$",
    ):
        checkpoints.found(place, 3)


def test_folder_that_cannot_be_made_is_told_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"^--checkpoint-dir \S+/file: cannot be used \(Not a dir"):
        checkpoints.make_directory(tmp_path / "file")


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
