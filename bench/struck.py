"""What a fault cost a training, from what its ranks wrote about their steps. Pure.

Every rank of every system writes the same lines (``scripts/train_struck.py``), so all systems are
measured with one ruler: times of completed steps. A step counts as completed when its last rank has
completed it.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

#: A line of a rank: ``kind``, ``at``, ``rank``, and what belongs to the kind.
Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds count from the fault."""

    #: The first sign of the fault that anything but the fault's own process saw.
    detected_s: float
    #: The last new process was about to train; None if there was none.
    restarted_s: float | None
    #: The first step was completed, an old one or not.
    resumed_s: float
    #: The first step was completed that had not been completed before.
    new_step_s: float
    #: Completed steps that were completed again.
    replayed_steps: int
    #: Of the time until ``AHEAD`` new steps were completed, what an undisturbed job would not have
    #: needed: detection, recovery, the step that was cut short, and steps that were run again.
    lost_s: float
    #: What an undisturbed step takes.
    step_s: float
    #: The last step that was completed before the fault, and how long before.
    last_step: int
    into_step_s: float

    @property
    def standstill_s(self) -> float:
        """What is lost but for work that was done again."""
        return self.lost_s - self.replayed_steps * self.step_s

    def as_dict(self) -> dict[str, float | None]:
        """Every number by its name, to the millisecond."""
        found: dict[str, float | None] = {**asdict(self), "standstill_s": self.standstill_s}
        return {
            name: None
            if value is None
            else round(value, 4)
            if name == "step_s"
            else round(value, 3)
            for name, value in found.items()
        }


#: New steps until the account is made.
AHEAD = 4
#: Steps at the start that say nothing about the time of a step.
_SETTLING = 3


def outcome(lines: Sequence[Line], struck_at: float, signs: Iterable[float], world: int) -> Outcome:
    """What became of the job. ``signs``: times at which somebody noticed something; those before
    the fault are passed over."""
    before = completions([each for each in lines if each["at"] < struck_at], world)
    after = completions([each for each in lines if each["at"] >= struck_at], world)
    last = max(before)
    wanted = last + AHEAD
    if wanted not in after:
        raise ValueError(f"step {wanted} was not completed, so nothing can be said of the fault")
    times = [before[step] - before[step - 1] for step in before if step - 1 > _SETTLING]
    step_s = statistics.median(times)
    noticed = [at for at in signs if at >= struck_at]
    noticed += [
        each["at"] for each in lines if each["kind"] == "broken" and each["at"] >= struck_at
    ]
    begun = [each["at"] for each in lines if each["kind"] == "begun" and each["at"] >= struck_at]
    resumed_at = min(after.values())
    # Whoever trains again has noticed.
    detected_at = min([*noticed, *begun, resumed_at])
    return Outcome(
        detected_s=detected_at - struck_at,
        restarted_s=max(begun) - struck_at if begun else None,
        resumed_s=resumed_at - struck_at,
        new_step_s=after[last + 1] - struck_at,
        replayed_steps=sum(step <= last for step in after),
        lost_s=after[wanted] - before[last] - AHEAD * step_s,
        step_s=step_s,
        last_step=last,
        into_step_s=struck_at - before[last],
    )


def completions(lines: Iterable[Line], world: int) -> dict[int, float]:
    """When each step was completed by its last rank, the first time."""
    first: dict[int, dict[int, float]] = {}
    for line in lines:
        if line["kind"] == "step":
            first.setdefault(line["step"], {}).setdefault(line["rank"], line["at"])
    return {
        step: max(ranks.values()) for step, ranks in sorted(first.items()) if len(ranks) == world
    }


def losses(lines: Iterable[Line]) -> dict[tuple[int, int], set[str]]:
    """All losses that a rank had in a step; more than one if a repetition came out differently."""
    found: dict[tuple[int, int], set[str]] = {}
    for line in lines:
        if line["kind"] == "step":
            found.setdefault((line["rank"], line["step"]), set()).add(line["loss"])
    return found


def same_numbers(one: Iterable[Line], other: Iterable[Line]) -> bool:
    """Whether two trainings agree, to the last bit, in every step that both have come to."""
    left, right = losses(one), losses(other)
    both = left.keys() & right.keys()
    return bool(both) and all(left[key] == right[key] and len(left[key]) == 1 for key in both)


def summary(runs: Sequence[Mapping[str, float | None]]) -> dict[str, dict[str, float]]:
    """Median, least and most of each number, over the runs that have it."""
    names = dict.fromkeys(name for run in runs for name in run)
    found = {}
    for name in names:
        values = [value for run in runs if (value := run.get(name)) is not None]
        if values:
            found[name] = {
                "median": round(statistics.median(values), 4),
                "low": min(values),
                "high": max(values),
            }
    return found


# ---------------------------------------------------------------- signs in other programs' logs

#: What torchrun's agents say when they give up a set of workers.
_TORCHRUN = re.compile(
    r"^[IWE](\d\d)(\d\d) (\d\d:\d\d:\d\d\.\d+) .*"
    r"(?:failed \(exitcode|closing signal|will restart worker group)",
    re.MULTILINE,
)
#: What slurmctld says when it gives up a node, or a job that is put back into the queue.
_SLURMCTLD = re.compile(
    r"^\[(\d{4}-\d\d-\d\dT[\d:.]+)\] .*(?:setting DOWN|requeu|_job_complete)",
    re.MULTILINE | re.IGNORECASE,
)


def torchrun_signs(text: str, year: int) -> list[float]:
    """Times, in this machine's time zone, at which torchrun's agents noticed something."""
    return [
        datetime.fromisoformat(f"{year}-{month}-{day}T{clock}").timestamp()
        for month, day, clock in _TORCHRUN.findall(text)
    ]


def slurmctld_signs(text: str) -> list[float]:
    """Times, in this machine's time zone, at which Slurm's controller noticed something."""
    return [datetime.fromisoformat(at).timestamp() for at in _SLURMCTLD.findall(text)]
