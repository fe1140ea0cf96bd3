"""An agent tells of a rank only when its step lasts long, and of every change until it goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deadpool_launch.agent import stacks
from deadpool_launch.agent.stacks import NoStack, take_stack
from deadpool_launch.agent.watch import LATE, LEAST_STEPS, ProgressWatch, look_interval_s
from deadpool_runtime.groups.progress import Recorder, record_path
from deadpool_runtime.protocol import Paces, Standings

TIMEOUT_S = 1e-6  # every step is late at once
LONG_S = 1e6


def watching(arena: Path, timeout_s: float) -> tuple[ProgressWatch, list[Standings]]:
    told: list[Standings] = []
    return ProgressWatch(arena, timeout_s, told.append), told  # type: ignore[arg-type]


def test_nothing_is_told_of_a_rank_in_time(tmp_path: Path) -> None:
    watch, told = watching(tmp_path, LONG_S)
    watch.look([(0, 1)], 0.0)  # it has made no record yet
    Recorder(record_path(tmp_path, 0, 1)).stepping(1, 4)
    watch.look([(0, 1)], 10.0)
    assert told == []
    watch.answer([(0, 1)], 7)
    (answer,) = told
    assert answer.asked == 7
    assert [standing.step for standing in answer.standings] == [5]


def test_late_rank_is_told_of_once_again_with_each_change_and_when_it_goes_on(
    tmp_path: Path,
) -> None:
    watch, told = watching(tmp_path, TIMEOUT_S)
    recorder = Recorder(record_path(tmp_path, 0, 1))
    recorder.stepping(1, 4)
    for now in (1.0, 2.0):
        watch.look([(0, 1)], now)
    assert [(s.rank, s.step) for message in told for s in message.standings] == [(0, 5)]
    recorder.stepping(1, 5)
    watch.look([(0, 1)], 3.0)
    assert told[-1].standings[0].step == 6
    recorder.resting()
    for now in (4.0, 5.0):
        watch.look([(0, 1)], now)
    assert (told[-1].standings, told[-1].moved) == ([], [(0, 1)])
    assert len(told) == 3


def test_paces_are_told_rarely_and_of_enough_steps(tmp_path: Path) -> None:
    told: list[Standings | Paces] = []
    watch = ProgressWatch(tmp_path, LONG_S, told.append, pace_s=5.0)
    recorder = Recorder(record_path(tmp_path, 0, 1))
    for step in range(LEAST_STEPS):  # the first is where the clock starts
        recorder.stepping(1, step)
    watch.look([(0, 1)], 0.0)
    assert told == []
    recorder.stepping(1, LEAST_STEPS)
    for now in (1.0, 4.9):
        watch.look([(0, 1)], now)
    assert told == []
    for now in (5.1, 5.7, 10.2):
        watch.look([(0, 1)], now)
    (paces,) = told
    assert isinstance(paces, Paces)
    (pace,) = paces.paces
    assert (pace.rank, pace.born, pace.epoch, pace.steps) == (0, 1, 1, LEAST_STEPS)
    assert 0 < pace.low_s <= pace.own_s <= pace.step_s


def test_record_goes_with_its_process(tmp_path: Path) -> None:
    watch, told = watching(tmp_path, TIMEOUT_S)
    Recorder(record_path(tmp_path, 0, 1)).stepping(1, 4)
    watch.look([(0, 1)], 1.0)
    watch.forget((0, 1))
    assert list(tmp_path.iterdir()) == []
    watch.look([], 2.0)
    assert len(told) == 1


def test_short_deadlines_are_looked_at_more_often() -> None:
    assert look_interval_s(300.0) == 0.5
    assert look_interval_s(3.0) <= 3.0 * (1 - LATE) / 3


HOLDS_THE_LOCK = """
import ctypes, os, sys
from pathlib import Path
from deadpool_runtime import stacks

def stuck(pipe):
    ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)

reader, writer = os.pipe()
stacks.answer_signal(stacks.stack_path(Path(sys.argv[1]), 3, 1))
print("ready", flush=True)
stuck(reader)
"""


def test_stack_of_a_process_that_holds_the_lock_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", HOLDS_THE_LOCK, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            target = tmp_path / "rank.stack"
            until = time.monotonic() + 60
            while "in stuck" not in (target.read_text() if target.exists() else ""):
                assert time.monotonic() < until
                asyncio.run(take_stack(tmp_path, 3, 1, process.pid, target))
            for _ in range(2):
                asyncio.run(take_stack(tmp_path, 3, 1, process.pid, target))
                text = target.read_text()
                assert text.count("in stuck") == 1
                assert f"kernel thread {process.pid} (python" in text
            os.kill(process.pid, signal.SIGSTOP)
            monkeypatch.setattr(stacks, "STACK_S", 0.2)
            with pytest.raises(NoStack, match=r"wrote nothing within 0.2 s"):
                asyncio.run(take_stack(tmp_path, 3, 1, process.pid, target))
            assert f"kernel thread {process.pid}" in target.read_text()
        finally:
            process.kill()


def test_process_that_does_not_answer_the_signal_is_not_sent_it(tmp_path: Path) -> None:
    with pytest.raises(NoStack, match="the process cannot be asked: No such file"):
        asyncio.run(take_stack(tmp_path, 3, 1, os.getpid(), tmp_path / "rank.stack"))
