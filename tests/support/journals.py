"""Journals for tests: records made by hand, and jobs drawn by chance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deadpool_launch.journal import JOURNAL_NAME
from deadpool_launch.view import RunView

Records = list[dict[str, Any]]
RECORDED = Path(__file__).parents[1] / "report" / "recorded"


def record(at: float, kind: str, **fields: Any) -> dict[str, Any]:
    """One record."""
    return {"at": at, "kind": kind, **fields}


def step(at: float, rank: int, step: int, loss: float, epoch: int = 1) -> dict[str, Any]:
    """A rank completed a step, which took 0.1 s."""
    return record(
        at, "step", rank=rank, step=step, epoch=epoch, duration_s=0.1, blocked_s=0.0, loss=loss
    )


def two_nodes_and_a_spare() -> Records:
    """A job that has begun on ``a`` and ``b``; ``c`` is its spare."""
    return [
        record(1.0, "job", active=["a", "b"], spares=["c"], world_size=2),
        record(2.0, "rank", rank=0, node="a", pid=10, epoch=1),
        record(2.0, "rank", rank=1, node="b", pid=11, epoch=1),
    ]


def swap() -> Records:
    """Two steps, then ``b`` is lost after only rank 0 completed step 3; ``c`` takes its rank."""
    return [
        *two_nodes_and_a_spare(),
        *(step(3.0 + number, rank, number, 4.0 - number) for number in (1, 2) for rank in (0, 1)),
        step(6.0, 0, 3, 9.0),
        record(6.1, "fault", fault="power-off:b@3", node="b", rank=1, step=3),
        record(6.2, "event", name="AgentLost", node="b"),
        record(6.3, "incident", number=1, phase="opened", detail="b lost"),
        record(6.4, "rank", rank=1, node="c", pid=12, epoch=2),
        record(7.3, "incident", number=1, phase="state restored", detail="step 2"),
        *(step(8.0 + rank / 10, rank, 3, 1.0 + rank, epoch=2) for rank in (0, 1)),
        record(
            8.3,
            "incident",
            number=1,
            phase="closed",
            verdict="continued",
            detail="",
            replayed_steps=1,
        ),
        *(step(9.0, rank, 4, 0.5, epoch=2) for rank in (0, 1)),
        record(9.5, "end", verdict="done", exit_code=0, reason="all ranks ended"),
    ]


def view_of(records: Records) -> RunView:
    """What these records add up to."""
    view = RunView()
    view.apply_all(records)
    return view


def recorded(name: str) -> Records:
    """The journal of a real job, without what was of the machine that it ran on."""
    lines = (RECORDED / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def write(run_dir: Path, records: Records, torn: str = "") -> Path:
    """A run directory with this journal, and the beginning of one more line."""
    run_dir.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(each) + "\n" for each in records)
    (run_dir / JOURNAL_NAME).write_text(text + torn)
    return run_dir
