"""What launchers on other nodes leave in the run directory for each other."""

from __future__ import annotations

from pathlib import Path

from deadpool_launch.succession import result


def test_launcher_that_comes_up_late_learns_of_the_one_that_leads(tmp_path: Path) -> None:
    result.announce(tmp_path, 100_001, "n1")
    assert result.successor(tmp_path, 1) == "n1"
    result.announce(tmp_path, 200_002, "n2")
    # Its step had to wait until another keeper had the job.
    result.announce(tmp_path, 100_001, "n1")
    assert result.successor(tmp_path, 100_001) == "n2"
    assert result.successor(tmp_path, 200_002) == ""
