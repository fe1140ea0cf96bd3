"""The measurement with scripted agents, small: it works, and nobody waits for long."""

from __future__ import annotations

import asyncio
from pathlib import Path

import scale


def test_every_agent_of_64_is_told_and_the_job_goes_on(tmp_path: Path) -> None:
    found = asyncio.run(scale.measure(64, 4, 0.5, tmp_path))
    assert found.verdict == "continued"
    assert set(found.told_s) == {"Revoke", "TakeInventory", "Plan", "Resume"}
    assert set(found.decided_s) == set(found.told_s)
    assert all(found.decided_s[order] > 0 for order in found.told_s)
    # Of 64 nodes and two spares one is gone; each hears of everything once, not once for a rank.
    assert found.incident_orders < 8 * 66
    # What an agent is told does not depend on how many others there are.
    assert found.incident_nbytes / found.incident_orders < 400
