"""The picture of a rehearsal is a real PNG of both runs."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deadpool_launch import plot
from deadpool_launch.errors import UsageError
from deadpool_launch.view import RunView

_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def _run(*, fault: bool) -> RunView:
    view = RunView()

    def write(at: float, kind: str, **fields: Any) -> None:
        view.apply({"at": at, "kind": kind, **fields})

    for rank in (0, 1):
        write(0.0, "rank", rank=rank, node=f"node{rank}", pid=rank, epoch=1)
    at, epoch = 1.0, 1
    for step in range(1, 31):
        if fault and step == 12:
            write(at, "incident", number=1, phase="opened", detail="node1 lost")
            at, epoch = at + 2.0, 2
        for rank in (0, 1):
            loss = 2.0 + 3.0 / step + 0.1 * rank
            write(at, "step", rank=rank, step=step, epoch=epoch, duration_s=0.1, loss=loss)
        if fault and step == 12:
            write(at, "incident", number=1, phase="closed", verdict="continued", replayed_steps=1)
        at += 0.1
    return view


def _size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(_PNG_MAGIC)
    assert data.rstrip().endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack("!II", data[16:24])
    return width, height


def test_both_runs_are_drawn_into_a_png(tmp_path: Path) -> None:
    path = tmp_path / "loss.png"
    plot.draw(_run(fault=False), _run(fault=True), path, "train.py with kill:1@12")
    width, height = _size(path)
    assert width >= 800
    assert height >= 500


def test_a_run_without_reference_or_without_losses_is_drawn_too(tmp_path: Path) -> None:
    plot.draw(None, _run(fault=True), tmp_path / "one.png", "one")
    plot.draw(RunView(), RunView(), tmp_path / "empty.png", "empty")
    assert _size(tmp_path / "one.png") == _size(tmp_path / "empty.png")


def test_without_matplotlib_the_sentence_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"install matplotlib \(pip install matplotlib\)$"):
        plot.require_matplotlib()


def test_the_picture_has_a_title_and_says_what_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    plot.draw(_run(fault=False), _run(fault=True), tmp_path / "x.png", "train.py with kill:1@12")
    (figure,) = drawn
    assert figure.get_suptitle() == "train.py with kill:1@12"
    assert figure.axes[0].get_legend_handles_labels()[1] == [
        "undisturbed",
        "with the fault",
        "interrupted step, run again",
    ]


@pytest.mark.parametrize("name", ["loss.pdf", "loss", "missing/loss.png"])
def test_a_path_that_cannot_be_drawn_to_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        plot.check_path(tmp_path / name)


def test_matplotlib_is_not_loaded_before_a_picture_is_drawn() -> None:
    code = "import sys; import deadpool_launch.rehearse; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
