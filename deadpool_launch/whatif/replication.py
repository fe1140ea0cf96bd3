"""How many nodes keep each replica and how often one is sent, and who said so. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deadpool_launch.policy.merge import Setting, Settled

FACTOR = "replication.factor"
INTERVAL = "replication.interval"


@dataclass(frozen=True, slots=True)
class Replication:
    """What a job's policy says of replicas."""

    factor: int = 1
    interval: int = 1
    factor_source: str = f"default of {FACTOR}"
    interval_source: str = f"default of {INTERVAL}"
    #: Spares run an agent from the start, and so can hold replicas.
    warm_spares: bool = True
    #: Where a site's limits changed what was asked for.
    remarks: tuple[str, ...] = ()

    def text(self) -> str:
        """Both values with their sources."""
        return (
            f"replication: factor {self.factor} ({self.factor_source}), interval "
            f"{self.interval} ({self.interval_source})"
        )

    def as_json(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "factor": {"value": self.factor, "source": self.factor_source},
            "interval": {"value": self.interval, "source": self.interval_source},
        }


@dataclass(frozen=True, slots=True)
class Replay:
    """Completed steps that are run again after the loss of a node, besides the one under way."""

    most: int
    mean: float


def replay(interval: int, whole_s: float, step_s: float) -> Replay:
    """What a loss at any time costs, with replicas that are whole so long after their step.

    Until then the newest replica is that of an interval before. Training waits for it in the step
    behind.
    """
    under_way = min(1.0, whole_s / step_s)
    return Replay(interval, (interval - 1) / 2 + under_way)


def flag_of(key: str) -> str:
    """The option that gives the value of a policy's key: ``--replication-factor``."""
    return f"--{key.replace('.', '-')}"


def replication(settled: Settled) -> Replication:
    """What the policy comes to, with what the options name."""
    factor, interval = (settled.settings[key] for key in (FACTOR, INTERVAL))
    return Replication(
        factor=factor.value,
        interval=interval.value,
        factor_source=_source(factor),
        interval_source=_source(interval),
        warm_spares=settled.settings["spares.start"].value == "at-start",
        remarks=tuple(
            f"{flag_of(each.key.name)}: the site has a {each.origin}; {each.value} is used"
            for each in (factor, interval)
            if each.limited and each.level == "command line"
        ),
    )


def _source(setting: Setting) -> str:
    name = setting.key.name
    if setting.limited or setting.level in ("site", "user"):
        return setting.origin
    return flag_of(name) if setting.level == "command line" else f"default of {name}"
