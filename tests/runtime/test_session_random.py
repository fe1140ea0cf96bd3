"""Kills at random moments, recoveries included. The seed is the test's name."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from deadpool_runtime import protocol

STEPS = ("--max-steps", "20")


class RandomKills:
    """Kills a random rank at a random message, several times, once every rank has begun."""

    def __init__(self, seed: int, kills: int) -> None:
        self.random = random.Random(seed)
        self.left = kills
        # Somebody must be left who has the state: one rank is spared.
        self.victims = self.random.sample(range(3), 2)
        self.begun: set[int] = set()
        self.near_end = False
        self.wait = self.random.randrange(30)

    def __call__(self, launcher: Any, rank: int, message: Any) -> None:
        if isinstance(message, protocol.StepDone):
            self.begun.add(rank)
            # A rank that dies when the others have left their loops cannot be replaced in place.
            self.near_end |= message.step >= 15
        if len(self.begun) < 3 or self.near_end or not self.left:
            return
        self.wait -= 1
        if self.wait < 0:
            self.wait = self.random.randrange(30)
            self.left -= 1
            launcher.kill(self.random.choice(self.victims))


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(12))
def test_random_kills_change_no_number(
    train: Callable[..., Any], undisturbed: Callable[..., Any], seed: int
) -> None:
    kills = RandomKills(seed, kills=3)
    run = train(*STEPS, on_message=kills, deadline_s=120)
    assert run.outcome.plans
    assert run.numbers() == undisturbed(*STEPS).numbers()
