"""What one simulated job is: its size, how it is set up, and the faults that strike it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from deadpool_launch.controller.config import Config
from deadpool_launch.sim.faults import Fault, random_faults
from deadpool_launch.sim.values import LayoutKind

#: How long a rank waits for the confirmation of a step; longer than a loss takes to be noticed.
CONFIRM_S = 0.9
#: How long a restart counts against a node.
RESTARTS_WITHIN_S = 5.0
#: Where the simulated disk is.
CHECKPOINT_DIR = "/checkpoints"


@dataclass(frozen=True)
class Scenario:
    """One job. ``seed`` decides all that happens in it besides the faults."""

    seed: int
    config: Config
    faults: tuple[Fault, ...]
    layout: LayoutKind = LayoutKind.ZERO
    #: The number of its last step.
    last_step: int = 8
    #: A durable checkpoint is written after every so many steps; 0: never.
    checkpoint_every: int = 0
    #: Whether the script uses the runtime.
    attaches: bool = True
    #: Whether everything that must hold is checked after every event.
    checked: bool = True

    def with_faults(self, faults: Sequence[Fault]) -> Scenario:
        """The same job, struck by other faults."""
        return replace(self, faults=tuple(faults))


def quick_config(
    nodes: int,
    spares: int,
    nproc_per_node: int,
    spare_start: str,
    gather_s: float = 0.05,
    checkpoint_dir: str = "",
    shrink: bool = False,
    extras: int = 0,
    readmit_after_s: float | None = None,
    node_restarts: int | None = None,
    replication_factor: int = 1,
    replication_interval: int = 1,
) -> Config:
    """Short deadlines, so that escalation happens within a few simulated seconds."""
    return Config(
        active=tuple(f"n{i}" for i in range(nodes)),
        spares=tuple(f"s{i}" for i in range(spares)),
        nproc_per_node=nproc_per_node,
        extras=tuple(f"x{i}" for i in range(extras)),
        spare_start=spare_start,
        heartbeat_timeout_s=0.5,
        collective_timeout_s=3,
        look_s=1,
        agent_start_s=5,
        rank_start_s=5,
        park_s=2,
        build_s=6,
        restore_s=4,
        kill_s=1,
        inventory_s=3,
        gather_s=gather_s,
        load_s=6,
        checkpoint_dir=checkpoint_dir,
        shrink=shrink,
        readmit_after_s=readmit_after_s,
        node_restarts=node_restarts,
        node_restarts_within_s=RESTARTS_WITHIN_S,
        quarantine_within_s=3,
        replication_factor=replication_factor,
        replication_interval=replication_interval,
    )


def random_scenario(
    seed: int,
    *,
    nodes: int | None = None,
    spares: int | None = None,
    nproc_per_node: int | None = None,
) -> Scenario:
    """The job of a seed; sizes that are given take the place of the seed's."""
    dice = random.Random(seed)
    drawn = dice.randint(1, 4), dice.randint(0, 4), dice.randint(1, 3)
    every = dice.randint(1, 3) if dice.random() < 0.4 else 0
    config = quick_config(
        nodes if nodes is not None else drawn[0],
        spares if spares is not None else drawn[1],
        nproc_per_node if nproc_per_node is not None else drawn[2],
        spare_start=dice.choice(("at-start", "on-failure")),
        gather_s=dice.choice((0.0, 0.05)),
        checkpoint_dir=CHECKPOINT_DIR if every else "",
        # Not from the same dice, as the restarts: the other draws stay what they were.
        shrink=random.Random(f"shrink {seed}").random() < 0.5,
        extras=1 if dice.random() < 0.1 else 0,
        readmit_after_s=dice.choice((None, 0.2, 1.0)),
        node_restarts=random.Random(f"restarts {seed}").choice((None, None, 0, 1, 2)),
        replication_factor=random.Random(f"factor {seed}").choice((1, 1, 2, 3)),
        replication_interval=random.Random(f"interval {seed}").choice((1, 1, 2, 3, 4)),
    )
    attaches = dice.random() < 0.9
    layout = dice.choice(list(LayoutKind))
    faults = random_faults(dice, config)
    return Scenario(
        seed=seed,
        config=config,
        faults=tuple(faults),
        layout=layout,
        checkpoint_every=every if attaches else 0,
        attaches=attaches,
    )
