"""When a node that keeps the log ends the job in place of a launcher."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from deadpool_launch.succession.release import give_back
from deadpool_slurm.client import Change, EndJob, SlurmClient, SlurmError
from deadpool_slurm.parse import Health, NodeFacts


@dataclass
class Slurm:
    """What Slurm says at each look; None: no answer."""

    states: list[Health | None]
    named: list[str] = field(default_factory=list)
    ended: int = 0

    def steps(self, job_id: str) -> list[str]:
        return self.named

    def nodes(self, names: list[str]) -> dict[str, NodeFacts]:
        state = self.states.pop(0)
        if state is None:
            raise SlurmError("no answer")
        return {name: NodeFacts(name, name, "", "", None, state) for name in names}

    def do(self, change: Change) -> bool:
        assert change == EndJob("7")
        self.ended += 1
        return True


def ends(slurm: Slurm) -> bool:
    client = cast(SlurmClient, cast(Any, slurm))
    looks = len(slurm.states)
    return asyncio.run(
        give_back(client, "7", "n1", 100_002, poll_s=0.001, patience_s=0.001 * looks)
    )


def test_job_ends_once_slurm_says_that_the_host_is_dead() -> None:
    slurm = Slurm([Health.OK, None, Health.SUSPECT, Health.DEAD, Health.DEAD])
    assert ends(slurm)
    assert slurm.ended == 1
    assert len(slurm.states) == 1


@pytest.mark.parametrize("state", [Health.OK, Health.SUSPECT, Health.CORDONED, None])
def test_without_slurms_word_the_job_is_left_alone(state: Health | None) -> None:
    slurm = Slurm([state] * 5)
    assert not ends(slurm)
    assert slurm.ended == 0


def test_job_with_a_newer_launcher_is_left_alone() -> None:
    dead: list[Health | None] = [Health.DEAD] * 3
    assert not ends(Slurm(dead, ["deadpool-n2-1", "deadpool-launcher-200001"]))
    assert ends(Slurm(dead, ["deadpool-n2-1", "deadpool-launcher-100002"]))
