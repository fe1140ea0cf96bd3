"""What becomes worse about a node's GPUs is told, by the library's counts and the kernel's log."""

from __future__ import annotations

import os
import queue
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deadpool_launch.agent.devices import DeviceWatch, Gpu, KernelLog, Nvml, news
from deadpool_launch.classify.lines import XID
from deadpool_launch.classify.model import Kind, Observation, classify
from deadpool_launch.classify.rules import all_rules

WELL = Gpu("0000:3b:00", uncorrectable=4)
PATIENCE_S = 60.0


def kind_of(line: str) -> Kind | None:
    """What the packaged rules call it."""
    xids = frozenset(int(found) for found in XID.findall(line))
    verdict = classify(Observation(error=line, xids=xids), all_rules(None))
    return None if verdict is None else verdict.kind


@pytest.mark.parametrize(
    ("after", "line", "kind"),
    [
        (Gpu(WELL.place, lost=True, uncorrectable=4), "GPU is lost", Kind.PERMANENT),
        (Gpu(WELL.place, uncorrectable=6), "2 uncorrectable ECC errors", Kind.PERMANENT),
        (Gpu(WELL.place, uncorrectable=4, pending=True), "taken out of use at the next", None),
        (Gpu(WELL.place, uncorrectable=4, held_back="heat"), "held back by heat", None),
    ],
)
def test_what_became_worse_is_told_once_in_words_that_the_rules_know(
    after: Gpu, line: str, kind: Kind | None
) -> None:
    (told,) = news(WELL, after)
    assert told.startswith("GPU 0000:3b:00: ")
    assert line in told
    assert kind_of(told) is kind
    assert list(news(after, after)) == []


def test_errors_from_before_the_job_are_no_news() -> None:
    assert list(news(None, WELL)) == []
    assert len(list(news(None, Gpu(WELL.place, lost=True)))) == 1


XID_LINE = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus."


def kernel_log(folder: Path) -> tuple[KernelLog, int]:
    """A pipe stands in for /dev/kmsg, of which a read takes one message too."""
    path = folder / "kmsg"
    os.mkfifo(path)
    os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(path, os.O_WRONLY)
    log = KernelLog.__new__(KernelLog)
    log._handle = reader
    return log, writer


def test_lines_of_the_kernel_about_the_jobs_gpus_are_found(tmp_path: Path) -> None:
    log, writer = kernel_log(tmp_path)
    other = XID_LINE.replace("3b", "5e")
    os.write(writer, f"4,1,2,-;{XID_LINE}\n6,2,3,-;usb 1-1: new\n4,3,4,-;{other}\n".encode())
    assert log.lines(["00000000:3B:00.0"]) == [XID_LINE]
    assert log.lines([]) == []
    os.write(writer, f"4,1,2,-;{XID_LINE}\n4,3,4,-;{other}\n".encode())
    assert log.lines([]) == [XID_LINE, other]
    assert kind_of(XID_LINE) is Kind.PERMANENT
    log.close()
    os.close(writer)


def no_log() -> KernelLog:
    raise PermissionError(1, "Operation not permitted")


class Fake:
    """A library whose answers are given."""

    def __init__(self, *answers: Sequence[Gpu]) -> None:
        self._answers = list(answers)

    def gpus(self) -> Sequence[Gpu]:
        if not self._answers:
            raise OSError("the driver is gone")
        return self._answers.pop(0)


def test_watch_tells_news_and_what_is_missing() -> None:
    told: queue.Queue[object] = queue.Queue()

    def post(function: Any, argument: Any) -> None:
        function(argument)

    fake = Fake([WELL], [WELL], [Gpu(WELL.place, lost=True, uncorrectable=4)])
    watch = DeviceWatch(0.001, told.put, told.put, library=lambda: fake, kernel_log=no_log)
    watch.look()
    watch.start(post)
    said = [told.get(timeout=PATIENCE_S) for _ in range(3)]
    assert said == [
        "the kernel's log cannot be read (Operation not permitted): no XIDs are seen",
        ["GPU 0000:3b:00: GPU is lost"],
        "the state of the GPUs is not known (the driver is gone)",
    ]
    watch.close()


def test_nothing_is_looked_at_where_nothing_is_to_be() -> None:
    watch = DeviceWatch(0.0, print, print, library=lambda: 1 / 0, kernel_log=lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    watch.look()
    watch.start(print)
    watch.close()


def test_library_that_is_not_there_is_a_plain_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(OSError, match="pynvml is not installed"):
        Nvml()
