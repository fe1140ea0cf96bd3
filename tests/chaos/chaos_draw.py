"""Which faults a soak brings about: jobs drawn from a seed, one after another. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

RANKS = 3
#: Spare nodes of each job, so many nodes it may lose.
SPARES = 3
#: A launcher is started again so often within ten minutes.
LAUNCHERS = 3
FAULTS_A_JOB = 10
LAYOUTS = ("ddp", "zero")

#: Faults that cost a node, with their weights.
NODE_FAULTS = {
    "power-off": 4,
    "vanish": 3,
    "freeze-node": 2,
    "partition": 3,
    "agent": 3,
    "flip": 3,  # a bit of the rank's newest replica; then its node loses power
}
#: Faults that leave the node alive.
PROCESS_FAULTS = {
    "kill": 6,
    "segv": 3,
    "freeze": 2,
    "lock": 2,
    "skip": 2,
    "cut": 3,
    "replicator": 3,
    "launcher": 3,
    "parked": 2,
}
#: Those that the rank does itself, in its next step.
ORDERED = ("segv", "lock", "skip", "cut")
#: Those of which no rank notices anything.
SILENT = ("replicator", "launcher", "parked")
#: What may strike while another recovery is under way.
SECOND_NODE_FAULTS = ("power-off", "agent")
SECOND_PROCESS_FAULTS = ("kill", "launcher")
SECOND_SHARE = 0.25
#: Marks of an incident at which the second fault may strike.
MARKS = ("opened", "revoked", "parked", "plan", "groups rebuilt")
PLACES = ("start", "backward", "updated")


@dataclass(frozen=True)
class Second:
    """A fault that strikes another rank as the incident of the first comes to a mark."""

    kind: str
    rank: int
    mark: str


@dataclass(frozen=True)
class Strike:
    """One fault: which, at which rank, so many steps after the job is whole again."""

    kind: str
    rank: int
    after_steps: int
    #: In a step, for what the rank does itself.
    place: str
    #: Time from the step to the strike, for what comes from outside, in seconds.
    delay_s: float
    #: Which bit of the replica.
    offset: int
    second: Second | None = None

    @property
    def count(self) -> int:
        return 1 if self.second is None else 2


@dataclass(frozen=True)
class JobPlan:
    """One job of a soak."""

    number: int
    layout: str
    strikes: tuple[Strike, ...]

    @property
    def faults(self) -> int:
        return sum(strike.count for strike in self.strikes)


def jobs(seed: int) -> Iterator[JobPlan]:
    """The jobs of a soak without end; each depends on the seed and its number alone."""
    number = 0
    while True:
        yield job(seed, number)
        number += 1


def job(seed: int, number: int) -> JobPlan:
    """The job of this number."""
    source = random.Random(f"{seed}:{number}")
    layout = source.choice(LAYOUTS)
    spares, launchers = SPARES, LAUNCHERS
    strikes: list[Strike] = []
    # Not all nodes in the beginning: every third fault costs one.
    while sum(strike.count for strike in strikes) < FAULTS_A_JOB:
        of_node = spares > 0 and source.random() < 0.34
        table = dict(NODE_FAULTS if of_node else PROCESS_FAULTS)
        if launchers == 0:
            table.pop("launcher", None)
        if layout == "ddp":
            # A replica of a rank whose state all others have is a few bytes.
            table.pop("flip", None)
        kind = source.choices(list(table), weights=list(table.values()))[0]
        strike = Strike(
            kind=kind,
            rank=source.randrange(RANKS),
            after_steps=source.randint(3, 12),
            place=source.choice(PLACES),
            delay_s=round(source.uniform(0.0, 0.2), 3),
            offset=source.randrange(4096, 5120) * 8 + source.randrange(8),
        )
        spares -= of_node
        launchers -= kind == "launcher"
        if kind not in SILENT and source.random() < SECOND_SHARE:
            second = _second(source, strike, layout, spares, launchers)
            spares -= second.kind in SECOND_NODE_FAULTS
            launchers -= second.kind == "launcher"
            strike = Strike(**{**strike.__dict__, "second": second})
        strikes.append(strike)
    return JobPlan(number, layout, tuple(strikes))


def _second(
    source: random.Random, first: Strike, layout: str, spares: int, launchers: int
) -> Second:
    """What strikes meanwhile. State that only one rank and its holder have is lost with both, so a
    second node goes only where every rank has all.
    """
    kinds = ["kill"]
    if launchers > 0:
        kinds.append("launcher")
    if spares > 0 and layout == "ddp":
        kinds += SECOND_NODE_FAULTS
    rank = (first.rank + source.randint(1, RANKS - 1)) % RANKS
    return Second(source.choice(kinds), rank, source.choice(MARKS))


def describe(strike: Strike) -> str:
    """The strike in a few words."""
    text = f"{strike.kind} of rank {strike.rank}"
    if strike.second is not None:
        second = strike.second
        text += f", {second.kind} of rank {second.rank} at '{second.mark}'"
    return text
