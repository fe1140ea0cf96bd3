"""The controller's configuration."""

from __future__ import annotations

import pytest

from deadpool_launch.controller.config import Config


def test_verdict_waits_longer_than_the_heartbeat() -> None:
    config = Config(active=("n1",), spares=(), nproc_per_node=1, heartbeat_timeout_s=7)
    assert config.verdict_s == config.verdict_wait_s == 8


def test_given_verdict_time_is_kept() -> None:
    config = Config(active=("n1",), spares=(), nproc_per_node=1, verdict_s=2.5)
    assert config.verdict_wait_s == 2.5


def test_world_size_counts_active_nodes_only() -> None:
    assert Config(active=("n1", "n2"), spares=("n3",), nproc_per_node=4).world_size == 8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"active": ()}, "at least one active node"),
        ({"spares": ("n1",)}, "named twice: n1, n1"),
        ({"nproc_per_node": 0}, "must be at least 1"),
        ({"spare_start": "never"}, "at-start, on-failure"),
        ({"collective_timeout_s": 3.0}, "must be longer than heartbeat_timeout_s, 3"),
    ],
)
def test_nonsense_is_refused(changes: dict[str, object], words: str) -> None:
    settings: dict[str, object] = {"active": ("n1",), "spares": (), "nproc_per_node": 1}
    settings.update(changes)
    with pytest.raises(ValueError, match=words):
        Config(**settings)  # type: ignore[arg-type]
