"""The simulated cluster as the tests of the controller use it: one layout, faults by number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deadpool_launch.controller.config import Config
from deadpool_launch.controller.events import Action, Finish
from deadpool_launch.controller.states import State
from deadpool_launch.sim.cluster import Cluster
from deadpool_launch.sim.disk import Disk
from deadpool_launch.sim.faults import RANK_KINDS
from deadpool_launch.sim.faults import Fault as SimFault
from deadpool_launch.sim.faults import FaultKind as Kind
from deadpool_launch.sim.ranks import Process
from deadpool_launch.sim.scenario import Scenario, quick_config
from deadpool_launch.sim.values import LayoutKind

__all__ = ["FAULT_KINDS", "LAST_STEP", "FakeCluster", "Fault", "quick_config"]

LAST_STEP = 8

#: By the names that the tests use; see ``FaultKind`` for what each does.
_KINDS = {
    "kill": Kind.KILL,
    "power": Kind.POWER,
    "freeze": Kind.FREEZE,
    "hang": Kind.HANG,
    "lock": Kind.LOCK,
    "deaf": Kind.DEAF,
    "unkillable": Kind.UNKILLABLE,
    "raise": Kind.RAISE,
    "fail": Kind.FAIL,
    "bad-start": Kind.SRUN,
    "slow-up": Kind.SLOW_UP,
    "corrupt": Kind.CORRUPT,
    "damage": Kind.DAMAGE,
    "replicator": Kind.REPLICATOR,
    "mute": Kind.MUTE,
    "disk": Kind.DISK,
    "full": Kind.FULL,
}
FAULT_KINDS = tuple(_KINDS)


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong at a time; ``target`` picks a node or rank."""

    at: float
    kind: str
    target: int


class _Bench:
    """What the controller knows and has asked for."""

    def __init__(self, cluster: Cluster) -> None:
        self._launcher = cluster.launcher

    @property
    def state(self) -> State:
        return self._launcher.state

    @property
    def trace(self) -> list[Action]:
        return self._launcher.actions


class FakeCluster:
    """Runs one job against the controller until its verdict; ``PromiseBroken`` if a promise is."""

    def __init__(
        self,
        config: Config,
        seed: int,
        faults: Sequence[Fault],
        attaches: bool,
        checkpoint_every: int = 0,
    ) -> None:
        made = [_made(fault, config) for fault in faults]
        self._given = list(zip(made, faults, strict=True))
        self.attaches = attaches
        scenario = Scenario(
            seed=seed,
            config=config,
            faults=tuple(made),
            layout=LayoutKind.ZERO,
            last_step=LAST_STEP,
            checkpoint_every=checkpoint_every if attaches else 0,
            attaches=attaches,
        )
        self.cluster = Cluster(scenario)
        self.bench = _Bench(self.cluster)

    def run(self) -> Finish:
        """Let the job come to its verdict."""
        return self.cluster.run()

    def stop(self, at: float, signal: int) -> None:
        """The launcher gets this signal at that time."""
        self.cluster.queue.later(at, self.cluster.launcher.stop, signal)

    @property
    def happened(self) -> list[Fault]:
        """The faults that found their target, in order."""
        struck = self.cluster.promises.struck
        return [given for hit in struck for made, given in self._given if made is hit]

    @property
    def processes(self) -> dict[int, Process]:
        """The newest process of each rank."""
        return self.cluster.current

    @property
    def plans(self) -> list[tuple[int, int]]:
        """Step of each plan, and the newest step that every rank had completed then."""
        return self.cluster.promises.plans

    @property
    def disk(self) -> Disk:
        """Where the durable checkpoints are."""
        return self.cluster.disk


def _made(fault: Fault, config: Config) -> SimFault:
    kind = _KINDS[fault.kind]
    nodes = config.active + config.spares
    rank = str(fault.target % config.world_size)
    return SimFault(
        kind, rank if kind in RANK_KINDS else nodes[fault.target % len(nodes)], fault.at
    )
