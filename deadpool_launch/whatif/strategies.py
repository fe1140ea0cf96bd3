"""What is compared, and what each costs by default: every figure with where it is from. Pure.

A figure that was measured names the file in ``bench/results``; one that was published, the
publication; all others are "assumed" and say so. ``changed`` puts the user's own in their place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from deadpool_launch.errors import UsageError
from deadpool_launch.whatif.faults import Faults
from deadpool_launch.whatif.job import Job
from deadpool_launch.whatif.replication import Replication
from deadpool_launch.whatif.walk import Rules

#: Where a figure comes from that nobody measured or published.
ASSUMED = "assumed"
GIVEN = "given"


@dataclass(frozen=True, slots=True)
class Figure:
    """A number and its source. ``value`` is None for what the strategy does not do."""

    value: float | None
    source: str


#: What each figure means, and its unit: ``share``, ``steps``, ``nodes`` or ``s``.
MEANING: Mapping[str, tuple[str, str]] = {
    "overhead": ("share", "what protection adds to a step"),
    "copy-every": ("steps", "steps from one copy in memory to the next"),
    "copy": ("s", "standstill for a copy"),
    "replicate-every": ("steps", "steps from one replica of a node's copies to the next"),
    "replicate": ("s", "from the end of a step until its replicas are whole"),
    "holders": ("nodes", "other nodes that keep a node's replicas"),
    "save-every": ("s", "training from one durable checkpoint to the next"),
    "save": ("s", "standstill for a durable checkpoint"),
    "transient": ("s", "recovery when every node stays"),
    "permanent": ("s", "recovery when a spare takes a place"),
    "exclude": ("s", "recovery when the job goes on with fewer nodes"),
    "reload": ("s", "recovery from the durable checkpoint"),
}


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to live with faults."""

    name: str
    title: str
    figures: Mapping[str, Figure]

    def value(self, key: str) -> float | None:
        """The number that goes by ``key``."""
        return self.figures.get(key, _NONE).value

    def save_every_s(self, job: Job, faults: Faults) -> float:
        """Training between two durable checkpoints; what Young's formula says if none is set."""
        given = self.value("save-every")
        return young(self._number("save"), faults.rate(job.nodes)) if given is None else given

    def rules(self, job: Job, faults: Faults) -> Rules:
        """The figures as steps and seconds of this job."""
        every = self.value("copy-every")
        saves = self.save_every_s(job, faults) / job.step_s
        return Rules(
            overhead=self._number("overhead"),
            copy_every=None if every is None else max(1, round(every)),
            copy_s=self._number("copy"),
            save_every=max(1, round(min(saves, job.steps))),
            save_s=self._number("save"),
            transient_s=self._number("transient"),
            permanent_s=self._number("permanent"),
            reload_s=self._number("reload"),
            exclude_s=self.value("exclude"),
            replicate_every=max(1, round(self._number("replicate-every"))),
            replicate_s=self._number("replicate"),
            holders=max(1, round(self._number("holders"))),
        )

    def _number(self, key: str) -> float:
        return self.value(key) or 0.0

    def changed(self, key: str, value: float, source: str = GIVEN) -> Strategy:
        """The same with another figure."""
        return replace(self, figures={**self.figures, key: Figure(value, source)})


def young(save_s: float, rate: float) -> float:
    """The training between two checkpoints that costs least: the square root of twice the time that
    one takes over the rate of faults (Young 1974; Daly 2006 to first order)."""
    return math.sqrt(2 * save_s / rate) if rate > 0 else math.inf


_AWS = (
    "AWS, checkpointless training on SageMaker HyperPod, 2025-12: 15 to 30 minutes or more for "
    "recovery from a checkpoint; the least of it"
)
_PAPER = "arXiv 2607.01646, abstract: under 40 s on up to 512 A100; the most it can be"
_HOURLY = "Huawei MindCluster, resumable training: checkpoints are saved once an hour"
_NONE = Figure(None, "not done")
_SAVE = Figure(10.0, f"{ASSUMED}; written in the background by all of them")
_RELOAD = Figure(900.0, _AWS)
_EVERY_STEP = Figure(1, "one copy a step")

FIXED = Strategy(
    "fixed",
    "checkpoint, fixed",
    {
        "overhead": Figure(0.0, "nothing is done in a step"),
        "copy-every": _NONE,
        "copy": _NONE,
        "save-every": Figure(3600.0, _HOURLY),
        "save": _SAVE,
        "transient": _RELOAD,
        "permanent": _RELOAD,
        "exclude": _NONE,
        "reload": _RELOAD,
    },
)
YOUNG_DALY = replace(
    FIXED,
    name="young-daly",
    title="checkpoint, Young-Daly",
    figures={
        **FIXED.figures,
        "save-every": Figure(None, "Young 1974, Daly 2006: the root of 2 save / rate of faults"),
    },
)
ELASTIC = Strategy(
    "elastic",
    "elastic, fewer nodes",
    {
        "overhead": Figure(0.1, f"{ASSUMED}; Bamboo (NSDI 2023) computes a neighbour's part too"),
        "copy-every": Figure(1, "the neighbour has computed the same step"),
        "copy": _NONE,
        "save-every": Figure(3600.0, _HOURLY),
        "save": _SAVE,
        "transient": Figure(60.0, ASSUMED),
        "permanent": Figure(60.0, ASSUMED),
        "exclude": Figure(60.0, ASSUMED),
        "reload": _RELOAD,
    },
)
IN_MEMORY = Strategy(
    "in-memory",
    "in memory, full restart",
    {
        "overhead": Figure(0.0, "Gemini (SOSP 2023), abstract: no overhead on throughput"),
        "copy-every": Figure(1, "Gemini (SOSP 2023), abstract: every iteration"),
        "copy": _NONE,
        "save-every": Figure(3600.0, _HOURLY),
        "save": _SAVE,
        "transient": Figure(300.0, f"{ASSUMED}; all processes start again, nothing is loaded"),
        "permanent": Figure(300.0, f"{ASSUMED}; all processes start again, nothing is loaded"),
        "exclude": _NONE,
        "reload": _RELOAD,
    },
)
DEADPOOL = Strategy(
    "deadpool",
    "DEADPOOL",
    {
        "overhead": Figure(
            0.01,
            "bench/results/overhead.json: 1.01 (0.95-1.07) times the step at 98,000 operations "
            "a byte, fully_shard",
        ),
        "copy-every": _EVERY_STEP,
        "copy": Figure(0.0, "in the overhead"),
        "replicate-every": Figure(1, "default of replication.interval"),
        "replicate": Figure(0.0, ASSUMED),
        "holders": Figure(1, "default of replication.factor"),
        "save-every": Figure(3600.0, _HOURLY),
        "save": _SAVE,
        "transient": Figure(40.0, _PAPER),
        "permanent": Figure(40.0, _PAPER),
        "exclude": _NONE,
        "reload": _RELOAD,
    },
)

ALL = (FIXED, YOUNG_DALY, ELASTIC, IN_MEMORY, DEADPOOL)


def chosen(names: tuple[str, ...]) -> list[Strategy]:
    """The strategies of these names, all of them without any."""
    known = {each.name: each for each in ALL}
    for name in names:
        if name not in known:
            raise UsageError(f"--strategy {name}: not one of {', '.join(known)}")
    return [known[name] for name in names or known]


def replicated(strategy: Strategy, replicas: Replication) -> Strategy:
    """The same with replicas as the policy has them."""
    strategy = strategy.changed("replicate-every", replicas.interval, replicas.interval_source)
    return strategy.changed("holders", replicas.factor, replicas.factor_source)


def measured(strategy: Strategy, medians: Mapping[str, float], source: str) -> Strategy:
    """The same with what ``bench/first_step.py`` measured; ``medians``: seconds to the first step
    by case."""
    cases = {
        "transient": "kill of one process",
        "permanent": "power-off, spare at-start",
    }
    for key, case in cases.items():
        strategy = strategy.changed(key, medians[case], f"{source}: {case}")
    return strategy
