"""A running job on the terminal: everything is there and nothing is wider than the terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from deadpool_launch.display import LiveDisplay, PlainDisplay, open_display, render
from deadpool_launch.view import RunView


def _view(ranks: int = 3) -> RunView:
    view = RunView()

    def write(at: float, kind: str, **fields: Any) -> None:
        view.apply({"at": at, "kind": kind, **fields})

    nodes = [f"node{number}" for number in range(ranks)]
    write(0.0, "job", active=nodes, spares=["spare"])
    write(0.1, "say", text="job 7: " + ", ".join(nodes) + "; a sentence that goes on and on" * 3)
    for rank, node in enumerate(nodes):
        write(1.0, "rank", rank=rank, node=node, pid=4_194_304 - rank, epoch=1)
        write(2.0, "step", rank=rank, step=10, epoch=1, duration_s=0.123, loss=2.5)
    write(3.0, "event", name="AgentLost", node="node1")
    write(3.0, "incident", number=1, phase="opened", detail="node1 lost")
    write(3.5, "say", text="node1 lost: its connection was closed; spare takes rank 1")
    return view


def _lines(view: RunView, width: int, max_ranks: int = 10) -> list[str]:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(render(view, "run with power-off:1@11", max_ranks, now=4.0))
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [80, 120])
def test_a_frame_fits_the_terminal(width: int) -> None:
    lines = _lines(_view(), width)
    assert max(len(line) for line in lines) <= width
    text = "\n".join(lines)
    assert "step 10, loss 2.5000   4.0 s" in text
    assert "node0 active, node1 lost, node2 active, spare spare" in text
    assert "4194303" in text
    assert "incident 1: detected" in text
    assert "node1 lost: its connection was closed" in text


def test_the_frame_that_stays_has_its_lines_whole() -> None:
    view = _view()
    reason = "node2 was lost as well and " + "no spare was left for any of its ranks, " * 3
    view.apply({"at": 4.0, "kind": "say", "text": f"stopped: {reason}the end"})
    assert "the end" not in " ".join(_lines(view, 80))
    view.apply({"at": 4.0, "kind": "end", "verdict": "stopped", "exit_code": 30, "reason": reason})
    lines = _lines(view, 80)
    assert max(len(line) for line in lines) <= 80
    assert f"stopped: {reason}the end" in " ".join(line[11:].strip() for line in lines)


def test_ranks_that_do_not_fit_are_counted() -> None:
    lines = _lines(_view(64), 80, max_ranks=3)
    assert any("61 more" in line for line in lines)
    assert "nodes: 63 active, 1 spare, 1 lost" in lines


def test_before_the_first_rank_the_nodes_that_are_ready_are_counted() -> None:
    view = RunView()
    view.apply({"at": 0.0, "kind": "job", "active": ["node0"], "spares": ["node1"]})
    view.apply({"at": 0.0, "kind": "event", "name": "AgentWarm", "node": "node1"})
    assert "starting: 1 of 2 nodes are ready" in _lines(view, 80)


def test_without_a_terminal_each_line_is_written_once() -> None:
    output = io.StringIO()
    console = Console(file=output, width=80)
    display = open_display(console, "a run")
    assert isinstance(display, PlainDisplay)
    view = _view()
    with display:
        display.show(view)
        display.show(view)
        view.apply({"at": 5.0, "kind": "say", "text": "going on"})
        display.show(view)
    text = output.getvalue()
    for once in ("== a run", "node1 lost: its connection", "step 10, loss 2.5000", "going on"):
        assert text.count(once) == 1, once


def test_the_loss_beside_a_step_is_that_of_the_step() -> None:
    """Ranks complete it one after the other, and the first of them go on meanwhile."""
    view = _view(2)
    for rank, step, loss in [(0, 11, 7.0), (0, 12, 9.0), (1, 11, 1.0)]:
        fields = {"rank": rank, "step": step, "epoch": 1, "loss": loss}
        view.apply({"at": 4.0, "kind": "step", **fields})
    assert any("step 11, loss 4.0000" in line for line in _lines(view, 80))


def test_a_terminal_is_redrawn_in_place() -> None:
    output = io.StringIO()
    console = Console(file=output, width=80, height=30, force_terminal=True)
    display = open_display(console, "a run")
    assert isinstance(display, LiveDisplay)
    with display:
        display.show(_view())
    assert "\x1b[" in output.getvalue()
