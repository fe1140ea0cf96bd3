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


@pytest.mark.parametrize("version", ["23.02.7", "23.11.1", "24.05.3", "25.11.8", "26.05.0"])
def test_good_versions_are_silent(version: str) -> None:
    assert about(version) == []


@pytest.mark.parametrize(
    ("version", "fixed_in"),
    [
        ("22.05.8", ["23.02.3", "23.02.6", "23.02.7"]),
        ("23.02.2", ["23.02.3", "23.02.6", "23.02.7"]),
        ("23.02.5", ["23.02.6", "23.02.7"]),
        ("23.02.6", ["23.02.7"]),
        ("23.11.0", ["23.11.1"]),
    ],
)
def test_bad_versions_name_each_defect(version: str, fixed_in: list[str]) -> None:
    found = about(version)
    assert [severity for severity, _ in found] == ["warn"] * len(fixed_in)
    for (_, text), fix in zip(found, fixed_in, strict=True):
        assert f"fixed in {fix}" in text


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
