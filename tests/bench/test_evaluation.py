"""The page of figures is that of the results, and what is said of results holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import compare
import evaluation
import everything
import pictures
import prediction
import pytest
import records
import struck
from overhead import against_plain

PAGE = records.ROOT / "docs" / "evaluation.md"
CONDITIONS = {"command": "python x.py", "cpus": 2, "machine": "m", "python": "3", "torch": "2"}


def _run(pause_s: float, replayed: int, last: int = 15) -> dict[str, Any]:
    """A run that lost exactly the cut-short step, the pause, and what was replayed."""
    step_s, into_s = 0.5, 0.25
    return {
        "detected_s": 0.1,
        "restarted_s": None,
        "resumed_s": pause_s + step_s,
        "new_step_s": pause_s + (replayed + 1) * step_s,
        "replayed_steps": replayed,
        "lost_s": into_s + pause_s + replayed * step_s,
        "standstill_s": into_s + pause_s,
        "step_s": step_s,
        "last_step": last,
        "into_step_s": into_s,
        "same_numbers": True,
    }


def _case(system: str, fault: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "system": system,
        "fault": fault,
        "runs": runs,
        "summary": struck.summary(runs),
        "same_numbers": True,
    }


def _recovery(swap_s: float = 0.2, restart_s: float = 5.0) -> dict[str, Any]:
    swap = _case("DEADPOOL, spare at-start", "vanish", [_run(swap_s, 0), _run(swap_s + 0.02, 0)])
    restart = _case(
        "torchrun, standby agent", "vanish", [_run(restart_s, 5), _run(restart_s + 0.1, 5)]
    )
    return {
        **CONDITIONS,
        "step_s": 0.5,
        "checkpoint_every": 10,
        "settings": {"torchrun, standby agent": "as it is"},
        "results": {"swap": swap, "restart": restart},
    }


def test_page_is_that_of_the_results() -> None:
    assert PAGE.read_text() == evaluation.page(evaluation.found()), (
        "write it anew: python bench/evaluation.py > docs/evaluation.md"
    )


def test_what_was_not_measured_is_named_with_its_command() -> None:
    page = evaluation.page({})
    for part in ("recovery.py", "overhead.py", "rebuild.py", "scale.py", "paper.py"):
        assert f"Not measured yet: `python bench/{part}" in page


def test_recovery_is_shown_with_its_goals_and_predictions() -> None:
    page = evaluation.page({"recovery": _recovery()})
    assert "| vanish | torchrun, standby agent | 17.0 | 5, reached |" in page
    assert "2 of 2 cases are within 15 %" in page
    assert "bit for bit." in page
    slow = _recovery(swap_s=3.0)
    slow["results"]["swap"]["same_numbers"] = False
    page = evaluation.page({"recovery": slow})
    assert "5, **missed** |" in page
    assert "**Some losses differ from those of an undisturbed run**: swap." in page


@pytest.mark.parametrize(("system", "replayed"), [("DEADPOOL", 0), ("sbatch --requeue", 5)])
def test_a_run_is_foretold_from_the_standstill_of_the_others(system: str, replayed: int) -> None:
    runs = [_run(2.0, replayed), _run(2.0, replayed), _run(2.0, replayed)]
    found = prediction.checked(_case(system, "kill", runs), every=10)
    assert found["predicted_s"] == found["measured_s"] == 2.25 + 0.5 * replayed
    # A fault at another place loses other steps, which nobody told the simulator.
    later = [_run(2.0, 3, last=23) for _ in range(3)]
    if replayed:
        assert prediction.checked(_case(system, "kill", later), every=10)["off"] == 0.0


def test_results_disagree_if_their_ranges_do_not_meet() -> None:
    assert compare.disagreements("recovery", _recovery(), _recovery(swap_s=0.21)) == []
    wrong = compare.disagreements("recovery", _recovery(), _recovery(swap_s=0.5))
    assert len(wrong) == 2
    assert all(sentence.startswith("recovery, swap: ") for sentence in wrong)


def test_every_file_of_results_that_is_there_agrees_with_itself() -> None:
    for name in compare.FILES:
        path = records.RESULTS / f"{name}.json"
        if path.exists():
            record = records.read(path)
            assert list(compare.spreads(name, record))
            assert compare.disagreements(name, record, record) == []


def test_a_kind_of_steps_is_set_against_plain_ones_alone() -> None:
    kinds = ["copies"] * 2 + ["plain"] * 2 + ["disk"] * 2 + ["plain"] * 2
    found = against_plain([2.0, 2.0, 1.0, 1.0, 9.0, 9.0, 1.0, 1.0], kinds, "copies", settling=0)
    assert (found["ratio_of_means"], found["median_step_s"]) == (2.0, 1.0)


def test_results_stay_beside_those_of_other_cases(tmp_path: Path) -> None:
    path = tmp_path / "some" / "results.json"
    records.keep(path, "one", {"a": 1})
    records.keep(path, "two", {"b": 2}, settings="s")
    found = records.read(path)
    assert (found["results"], found["command"], found["settings"]) == ({"a": 1, "b": 2}, "two", "s")
    records.keep(path, "three", {"c": 3}, beside=False)
    assert records.read(path)["results"] == {"c": 3}


def test_parts_of_make_bench_exist_and_take_an_hour_at_most() -> None:
    assert sum(part.minutes for part in everything.PARTS) <= 60
    for part in everything.PARTS:
        _, program, *_, out = part.command(Path("/elsewhere"), quick=True)
        assert Path(program).is_file()
        assert out.startswith("/elsewhere/")


@pytest.mark.matrix
def test_pictures_are_drawn(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    pictures.recovery(figure.subplots(), _recovery()["results"])
    figure.savefig(tmp_path / "recovery.png")
    assert (tmp_path / "recovery.png").stat().st_size > 1000


@pytest.mark.parametrize("name", ["links", "overhead", "paper"])
def test_results_that_are_kept_name_their_command_and_conditions(name: str) -> None:
    kept = records.read(records.RESULTS / f"{name}.json")
    assert kept["command"].startswith(f"python bench/{name}.py")
    assert {"cpus", "kernel", "load"} <= set(kept)
    assert all(kept["results"].values())
