"""Faults at random moments of copying, sending, verifying, sealing and confirming.

Real ranks, replicators and kills; a layout with state that only one rank has. The seed is the
test's name: it fixes which faults there are, in what order and after which delays. What the machine
does in between is not fixed, so a seed that failed may have to be run several times.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from deadpool_runtime import protocol

STEPS = 60
FAULTS = 5
KINDS = ("kill", "node", "replicator", "damage own", "damage replica")
#: Longest time between a step's end and the fault; a step takes less.
DELAY_S = 0.04


class Faults:
    """One fault after the other, each once the job has recovered from the one before."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        kinds = list(KINDS)
        self.random.shuffle(kinds)
        self.left = kinds[:FAULTS]
        self.done: list[tuple[str, int, int]] = []
        #: The newest step each rank is known to have completed.
        self.completed: dict[int, int] = {}
        #: Ranks whose replica was confirmed in the present epoch.
        self.protected: set[int] = set()
        self.epoch = 1
        self.wait = self.random.randrange(3, 12)
        #: (kind, epoch, completed by some rank, planned step) of each recovery.
        self.recoveries: list[tuple[str, int, int]] = []
        self.unprotected = False

    def __call__(self, launcher: Any, rank: int, message: Any) -> None:
        if launcher.epoch != self.epoch:
            self.epoch = launcher.epoch
            self.protected.clear()
        match message:
            case protocol.Protected(epoch=epoch) if epoch == self.epoch:
                self.protected.add(rank)
            case protocol.StepDone(step=step, unprotected=unprotected):
                self.completed[rank] = step
                self.unprotected |= unprotected > 0
                self._maybe_strike(launcher, step)
            case _:
                pass

    def _maybe_strike(self, launcher: Any, step: int) -> None:
        size = launcher.world_size
        # The end is left alone: the copies of the last steps are not all made.
        if not self.left or len(self.protected) < size or step > STEPS - 5:
            return
        self.wait -= 1
        if self.wait > 0:
            return
        self.wait = self.random.randrange(3, 12)
        kind, victim = self.left.pop(0), self.random.randrange(size)
        time.sleep(self.random.uniform(0, DELAY_S))
        self.done.append((kind, victim, step))
        self.recoveries.append((kind, launcher.epoch + 1, max(self.completed.values())))
        match kind:
            case "kill":
                launcher.kill(victim)
            case "node":
                launcher.power_off(victim)
            case "replicator":
                # Nobody is lost, so that no recovery follows; the next fault needs the new one.
                self.recoveries.pop()
                launcher.restart_replicator(victim)
            case "damage own":
                self._damage(launcher.node(victim), victim, replica=False)
                launcher.kill(victim)
            case "damage replica":
                self._damage(launcher.holder(victim), victim, replica=True)
                launcher.power_off(victim)

    def _damage(self, node: Any, rank: int, *, replica: bool) -> None:
        copies = [c for c in node.copies() if c.rank == rank and c.replica == replica]
        newest = max(copies, key=lambda copy: copy.step)
        try:
            node.damage(rank, newest.step, replica=replica)
        except ValueError:
            return  # overwritten at this very moment: a fault like any other


def check(run_layout: Callable[..., Any], undisturbed: Callable[..., Any], seed: int) -> None:
    layout = ("zero", "fsdp")[seed % 2]
    faults = Faults(seed)
    steps = f"--steps={STEPS}"
    outcome, numbers = run_layout(layout, steps, on_message=faults, deadline_s=240.0)
    told = f"seed {seed}: {faults.done}, plans {outcome.plans}"
    assert not faults.left, told
    assert numbers == undisturbed(layout, steps), told
    planned: dict[int, int] = dict(outcome.plans)
    last = max(planned)
    for kind, epoch, completed in faults.recoveries:
        # A damaged copy costs a second epoch; the step is then an older one at most.
        step = planned.get(epoch + 1, planned.get(epoch, planned[last]))
        if kind in ("kill", "node") and not faults.unprotected:
            assert planned.get(epoch, completed) >= completed - 1, told
        assert step >= completed - 3, told


@pytest.mark.parametrize("seed", range(1))
def test_faults_anywhere_in_the_pipeline(
    run_layout: Callable[..., Any], undisturbed_layout: Callable[..., Any], seed: int
) -> None:
    check(run_layout, undisturbed_layout, seed)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(1, 16))
def test_many_faults_anywhere_in_the_pipeline(
    run_layout: Callable[..., Any], undisturbed_layout: Callable[..., Any], seed: int
) -> None:
    check(run_layout, undisturbed_layout, seed)
