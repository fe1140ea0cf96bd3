"""What a job needs and what to ask for: memory, whether copies hide, spares, goodput. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deadpool_launch.controller.wording import size
from deadpool_launch.policy.spares import enough, needed
from deadpool_launch.whatif.estimate import Estimate, estimate
from deadpool_launch.whatif.faults import Renewal
from deadpool_launch.whatif.job import Job
from deadpool_launch.whatif.replication import Replay, Replication, replay
from deadpool_launch.whatif.sizes import Layout, Model, Sizes, sizes
from deadpool_launch.whatif.strategies import (
    DEADPOOL,
    YOUNG_DALY,
    Figure,
    Strategy,
    replicated,
)

#: Bytes a second at which a node copies state to its shared memory, and hashes it.
COPY_RATE = 10e9
COPY_SOURCE = (
    "bench/results/snapshot.json: 10 to 12 GB/s by one thread from memory to memory; a GPU's link "
    "has not been measured"
)
#: Bytes a second that a node's replicas reach over the network.
SEND_RATE = 1.8e9
SEND_SOURCE = "bench/results/links.json: 1.8 GB/s over TCP within one machine, verified"
PROBABILITY = 0.99


@dataclass(frozen=True, slots=True)
class Question:
    """What was asked."""

    model: Model
    layout: Layout
    #: As in the layout, with their sources.
    replicas: Replication
    step_s: float
    limit_s: float
    faults: Renewal
    probability: float
    queue_s: float
    copy_rate: float
    send_rate: float
    #: What protection adds to a step, as a share of it.
    overhead: Figure
    #: Of each node, for the copies; None if it was not said.
    memory_nbytes: int | None
    seeds: int


@dataclass(frozen=True, slots=True)
class Hiding:
    """Whether a node's bytes of a step are away before the next step is over."""

    what: str
    nbytes: int
    rate: float
    #: What has to be done before it.
    after_s: float
    step_s: float

    @property
    def takes_s(self) -> float:
        """From the end of a step until all of it is there."""
        return self.after_s + self.nbytes / self.rate

    @property
    def hidden(self) -> bool:
        """Whether nothing waits for it."""
        return self.takes_s <= self.step_s

    @property
    def beyond(self) -> float:
        """What it adds to the step, as a share of it."""
        return max(0.0, self.takes_s / self.step_s - 1)

    def text(self) -> str:
        """The inequality with its numbers."""
        own = f"{size(self.nbytes)} / {self.rate / 1e9:g} GB/s"
        first = f"{self.after_s:.3g} s + " if self.after_s else ""
        relation = "<=" if self.hidden else ">"
        verdict = (
            "hidden"
            if self.hidden
            else f"not hidden: {self.takes_s - self.step_s:.3g} s a step too long"
        )
        return (
            f"{self.what}: {first}{own} = {self.takes_s:.3g} s {relation} {self.step_s:.3g} s a "
            f"step: {verdict}"
        )


@dataclass(frozen=True, slots=True)
class Advice:
    """The answer."""

    question: Question
    sizes: Sizes
    copies: Hiding
    #: Of a step that has replicas. Training waits for them in the very next one.
    replicas: Hiding
    #: After the loss of a node; None if no other node has a replica.
    replay: Replay | None
    #: The least number of spares that is enough; None if no number is.
    spares: int | None
    #: For some numbers of spares, the probability that they run out.
    running_out: tuple[tuple[int, float], ...]
    #: DEADPOOL and checkpoint-restart with the spares, checkpoint-restart without any.
    goodput: tuple[tuple[str, int, Estimate], ...]

    @property
    def fits(self) -> bool | None:
        """Whether the copies have room; None if the nodes' memory was not said."""
        have = self.question.memory_nbytes
        return None if have is None else self.sizes.memory_nbytes <= have


def advise(question: Question) -> Advice:
    """Answer the question. The layout must have been checked but for its spares. Raises
    ``UsageError``: too few nodes for the replicas.
    """
    q, nodes = question, question.layout.nodes
    hours = q.limit_s / 3600
    losses = q.faults.losses(nodes) / nodes * 3600
    count = needed(1 / losses, hours, q.probability, active=nodes, total=None) if losses else 0
    spares = q.layout.spares or count or 0
    layout = replace(q.layout, spares=spares)
    layout.check_factor()
    found, interval = sizes(q.model, layout), layout.interval
    copies = Hiding("copies", found.copied_nbytes, q.copy_rate, 0.0, q.step_s)
    replicas = Hiding("replicas", found.sent_nbytes, q.send_rate, copies.takes_s, q.step_s)
    shown = sorted({0, 1, 2, *_around(count), *_around(q.layout.spares)})
    return Advice(
        question=q,
        sizes=found,
        copies=copies,
        replicas=replicas,
        replay=replay(interval, replicas.takes_s, q.step_s) if replicas.nbytes else None,
        spares=count,
        running_out=tuple(
            (each, 1 - enough((nodes + each) * hours * losses, each)) for each in shown
        ),
        goodput=_goodput(q, spares, _protected(q, copies, replicas)),
    )


def _around(count: int | None) -> set[int]:
    return set() if count is None else {max(0, count - 1), count, count + 1}


def _goodput(
    q: Question, spares: int, protected: Strategy
) -> tuple[tuple[str, int, Estimate], ...]:
    """The same training with and without DEADPOOL, as ``deadpool simulate`` has it."""
    steps = max(1, int(q.limit_s / q.step_s))
    nodes = q.layout.nodes
    found = []
    for strategy, held in ((protected, spares), (YOUNG_DALY, spares), (YOUNG_DALY, 0)):
        job = Job(steps, q.step_s, nodes, held, q.queue_s, least_nodes=nodes)
        runs = estimate(job, q.faults, strategy, range(q.seeds))
        found.append((strategy.title, held, runs))
    return tuple(found)


def _protected(q: Question, copies: Hiding, replicas: Hiding) -> Strategy:
    """DEADPOOL with these replicas, and with what does not hide added to the step: to one of each
    interval what the replicas take, to the others what the copies do."""
    overhead, source = q.overhead.value or 0.0, q.overhead.source
    interval = q.layout.interval
    beyond = (copies.beyond * (interval - 1) + replicas.beyond) / interval
    if beyond:
        source = f"{source}; and what is not hidden of copies and replicas"
    strategy = replicated(DEADPOOL, q.replicas).changed("overhead", overhead + beyond, source)
    return strategy.changed("replicate", replicas.takes_s, "bytes of a step, above")


def strategies(advice: Advice) -> Sequence[Strategy]:
    """Those that were simulated, each once."""
    return list({runs.strategy.name: runs.strategy for _, _, runs in advice.goodput}.values())
