"""Many runs of the same job, and what they have in common: means with 95 % intervals. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from deadpool_launch.whatif.faults import Faults
from deadpool_launch.whatif.job import Account, Job
from deadpool_launch.whatif.strategies import Strategy
from deadpool_launch.whatif.walk import walk

#: A run that takes so many times as long as without faults is given up.
GIVE_UP_AFTER = 20.0


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over seeds and half the width of its 95 % interval (0 with a single seed)."""

    value: float
    half: float

    @property
    def low(self) -> float:
        """Where the interval begins."""
        return self.value - self.half

    @property
    def high(self) -> float:
        """Where the interval ends."""
        return self.value + self.half


@dataclass(frozen=True, slots=True)
class Estimate:
    """One strategy, run with every seed."""

    strategy: Strategy
    #: Training between two durable checkpoints.
    save_every_s: float
    accounts: tuple[Account, ...]

    def mean(self, name: str) -> Mean:
        """Mean of a number of ``Account.as_dict``."""
        return mean([each.as_dict()[name] for each in self.accounts])

    @property
    def unfinished(self) -> int:
        """Runs that were given up."""
        return sum(not each.finished for each in self.accounts)


def estimate(job: Job, faults: Faults, strategy: Strategy, seeds: Sequence[int]) -> Estimate:
    """Run the job with every seed."""
    rules = strategy.rules(job, faults)
    limit_s = GIVE_UP_AFTER * job.undisturbed_s
    accounts = tuple(
        walk(job, rules, faults.stream(seed, job.nodes, job.spares), limit_s) for seed in seeds
    )
    return Estimate(strategy, rules.save_every * job.step_s, accounts)


def mean(values: Sequence[float]) -> Mean:
    """Mean and half the width of its 95 % interval, by Student's t."""
    count = len(values)
    if count < 2:
        return Mean(fmean(values), 0.0)
    return Mean(fmean(values), student(count - 1) * stdev(values) / math.sqrt(count))


def ratio(
    above: Sequence[Account], below: Sequence[Account], of: Callable[[Account], float]
) -> Mean:
    """The ratio of two sums over the same seeds; its interval by the jackknife (Efron 1982), which
    leaves out one seed at a time.
    """
    pairs = [(of(one), of(other)) for one, other in zip(above, below, strict=True)]
    over, under = sum(one for one, _ in pairs), sum(other for _, other in pairs)
    if under == 0:
        return Mean(math.nan, 0.0)
    count = len(pairs)
    rest = [(over - one) / (under - other) for one, other in pairs if under > other]
    if count < 2 or len(rest) < count:
        return Mean(over / under, 0.0)
    middle = fmean(rest)
    error = math.sqrt((count - 1) / count * sum((each - middle) ** 2 for each in rest))
    return Mean(over / under, student(count - 1) * error)


def student(freedom: int) -> float:
    """The two-sided 95 % quantile of Student's t, exact for one and two degrees of freedom and
    within 0.2 % from three on (Abramowitz and Stegun, 26.7.5)."""
    if freedom == 1:
        return math.tan(math.pi * 0.475)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    x = NormalDist().inv_cdf(0.975)
    return (
        x
        + (x**3 + x) / (4 * freedom)
        + (5 * x**5 + 16 * x**3 + 3 * x) / (96 * freedom**2)
        + (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / (384 * freedom**3)
        + (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / (92160 * freedom**4)
    )
