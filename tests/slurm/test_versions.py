"""Which versions are refused or warned about, and for which defect."""

from __future__ import annotations

import pytest

from deadpool_slurm.versions import findings, parse_version


def about(version: str, **config: str) -> list[tuple[str, str]]:
    return [(found.severity, found.text) for found in findings(parse_version(version), config)]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("slurm 23.11.4", (23, 11, 4)),
        ("slurm-wlm 22.05.8", (22, 5, 8)),
        ("25.11.0-0rc1", (25, 11, 0)),
        ("slurm 24.05", (24, 5, 0)),
        ("", None),
        ("slurm", None),
    ],
)
def test_version_in_text(text: str, version: tuple[int, int, int] | None) -> None:
    assert parse_version(text) == version


def test_version_without_shared_steps_is_refused() -> None:
    ((severity, text),) = about("20.11.8")
    assert severity == "refuse"
    assert "20.11.8" in text
    assert "before 22.05" in text


@pytest.mark.parametrize("version", ["23.02.7", "23.11.1", "24.05.3", "25.11.8", "26.05.0"])
def test_good_versions_are_silent(version: str) -> None:
    assert about(version) == []


EXTERN = "the job's extern step is killed on every node"
LISTS = "running steps keep wrong lists of their nodes"


@pytest.mark.parametrize(
    ("version", "text"),
    [
        (
            "22.05.8",
            "3 known defects around lost nodes, all fixed by 23.02.7: "
            f"later steps may not get all that is left, {EXTERN}, {LISTS}",
        ),
        (
            "23.02.2",
            "3 known defects around lost nodes, all fixed by 23.02.7: "
            f"later steps may not get all that is left, {EXTERN}, {LISTS}",
        ),
        (
            "23.02.5",
            f"2 known defects around lost nodes, all fixed by 23.02.7: {EXTERN}, {LISTS}",
        ),
        ("23.02.6", f"1 known defect around lost nodes, fixed by 23.02.7: {LISTS}"),
        ("23.11.0", f"1 known defect around lost nodes, fixed by 23.11.1: {LISTS}"),
    ],
)
def test_defects_of_a_version_are_one_line(version: str, text: str) -> None:
    assert about(version) == [("warn", f"Slurm {version} has {text}")]


def test_stepmgr_is_refused() -> None:
    ((severity, text),) = about(
        "25.11.8", SlurmctldParameters="idle_on_node_suspend,enable_stepmgr"
    )
    assert severity == "refuse"
    assert "batch host" in text


def test_kill_on_bad_exit_is_noted() -> None:
    assert about("25.11.8", KillOnBadExit="1")[0][0] == "note"
    assert about("25.11.8", KillOnBadExit="0") == []


def test_unknown_version_is_a_warning() -> None:
    assert about("?")[0][0] == "warn"
