"""What a job needs and what to ask for: memory, whether copies hide, spares, goodput. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from deadpool_launch.controller.wording import plural, size
from deadpool_launch.policy.kinds import show_duration
from deadpool_launch.policy.spares import enough, needed
from deadpool_launch.whatif import report
from deadpool_launch.whatif.estimate import Estimate, estimate
from deadpool_launch.whatif.faults import Renewal
from deadpool_launch.whatif.job import Job
from deadpool_launch.whatif.sizes import Layout, Model, Sizes, sizes
from deadpool_launch.whatif.strategies import DEADPOOL, YOUNG_DALY, Figure, Strategy
from deadpool_runtime.replication.slotting import SLOTS

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
    replicas: Hiding
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
    """Answer the question. The layout must have been checked."""
    q, nodes = question, question.layout.nodes
    hours = q.limit_s / 3600
    losses = q.faults.losses(nodes) / nodes * 3600
    count = needed(1 / losses, hours, q.probability, active=nodes, total=None) if losses else 0
    spares = q.layout.spares or count or 0
    found = sizes(q.model, replace(q.layout, spares=spares))
    copies = Hiding("copies", found.copied_nbytes, q.copy_rate, 0.0, q.step_s)
    replicas = Hiding("replicas", found.sent_nbytes, q.send_rate, copies.takes_s, q.step_s)
    shown = sorted({0, 1, 2, *_around(count), *_around(q.layout.spares)})
    return Advice(
        question=q,
        sizes=found,
        copies=copies,
        replicas=replicas,
        spares=count,
        running_out=tuple(
            (each, 1 - enough((nodes + each) * hours * losses, each)) for each in shown
        ),
        goodput=_goodput(q, spares, copies),
    )


def _around(count: int | None) -> set[int]:
    return set() if count is None else {max(0, count - 1), count, count + 1}


def _goodput(q: Question, spares: int, copies: Hiding) -> tuple[tuple[str, int, Estimate], ...]:
    """The same training with and without DEADPOOL, as ``deadpool simulate`` has it."""
    steps = max(1, int(q.limit_s / q.step_s))
    nodes = q.layout.nodes
    found = []
    for strategy, held in ((_slowed(q, copies), spares), (YOUNG_DALY, spares), (YOUNG_DALY, 0)):
        job = Job(steps, q.step_s, nodes, held, q.queue_s, least_nodes=nodes)
        runs = estimate(job, q.faults, strategy, range(q.seeds))
        found.append((strategy.title, held, runs))
    return tuple(found)


def _slowed(q: Question, copies: Hiding) -> Strategy:
    """DEADPOOL, with what does not hide added to the step."""
    overhead, source = q.overhead.value or 0.0, q.overhead.source
    beyond = max(0.0, copies.takes_s / copies.step_s - 1)
    if beyond:
        source = f"{source}; and what is not hidden of the copies"
    return DEADPOOL.changed("overhead", overhead + beyond, source)


# ---------------------------------------------------------------- in words


def lines(advice: Advice) -> list[str]:
    """The answer for people, in lines of 80 columns."""
    q, found = advice.question, advice.sizes
    told = [
        f"model: {q.model.parameters:,} parameters, {q.model.weight_nbytes} + "
        f"{q.model.optimizer_nbytes} bytes each ({q.model.dtype}, {q.model.optimizer}); "
        f"{size(found.state_nbytes)} of state",
        f"layout: {q.layout.nodes} x {q.layout.nproc_per_node} ranks, dp {q.layout.data} x tp "
        f"{q.layout.tensor} x pp {q.layout.pipeline}, {q.layout.sharding}"
        + (f" over {q.layout.shard}" if q.layout.sharding == "hsdp" else "")
        + (
            "; some state is on one rank alone and goes to a neighbour"
            if found.alone
            else "; every tensor is on several ranks"
        ),
        "",
        *_memory(advice),
        "",
        "bytes of a step, on the node that has most:",
        f"  {advice.copies.text()}",
        f"  {advice.replicas.text()}",
        *_waiting(advice),
        "",
        *_spares(advice),
        "",
        f"goodput of {show_duration(q.limit_s)} of training, {plural(q.seeds, 'run')}, 95 % "
        "interval:",
        *(_goodput_line(*each) for each in advice.goodput),
        *_worth_it(advice),
    ]
    return [line for text in told for line in (report.wrap(text, "    ") if text else [""])]


def _goodput_line(title: str, held: int, runs: Estimate) -> str:
    what = f"{title}, {plural(held, 'spare')}"
    return f"  {what:<36}{report.interval(runs.mean('goodput'), 0.01):>14} %"


def _worth_it(advice: Advice) -> list[str]:
    """Say so where protection costs more than it saves."""
    with_it, without = (runs.mean("goodput") for _, _, runs in advice.goodput[:2])
    if with_it.high >= without.low:
        return []
    return ["  with these figures protection costs more than faults do"]


def _memory(advice: Advice) -> list[str]:
    need, q = advice.sizes.need, advice.question
    told = [
        f"memory for the copies on a node: {size(advice.sizes.memory_nbytes)}, in /dev/shm but "
        "for the last:",
        f"  {SLOTS} slots for {plural(len(need.ranks), 'rank')}: {SLOTS} x "
        f"{size(need.copy_nbytes)} = {size(SLOTS * need.copy_nbytes)}",
        f"  {SLOTS} slots for replicas of others: {SLOTS} x {size(need.held_nbytes)} = "
        f"{size(SLOTS * need.held_nbytes)}",
        f"  while a durable checkpoint is written: {size(advice.sizes.save_nbytes)}",
    ]
    if advice.fits is not None:
        assert q.memory_nbytes is not None
        have = size(q.memory_nbytes)
        told.append(
            f"  {have} is there: enough"
            if advice.fits
            else f"  {have} is there: too little; the launcher would end with exit code 12. "
            "Ask for more memory, run fewer ranks on a node, or shard the state"
        )
    return told


def _waiting(advice: Advice) -> list[str]:
    if not advice.copies.hidden:
        rate = advice.copies.nbytes / advice.copies.step_s
        return [
            f"  every step would wait for its copy; {rate / 1e9:.3g} GB/s would be enough",
        ]
    if not advice.replicas.hidden:
        left_s = advice.replicas.step_s - advice.copies.takes_s
        rate = advice.replicas.nbytes / left_s if left_s > 0 else math.inf
        return [
            "  training would wait for replicas, or go on with steps unprotected; "
            f"{rate / 1e9:.3g} GB/s over the network would be enough",
        ]
    return []


def _spares(advice: Advice) -> list[str]:
    q = advice.question
    per_job = 1 / q.faults.losses(q.layout.nodes) if q.faults.losses(q.layout.nodes) else 0.0
    told = []
    if advice.spares is None:
        told.append(
            f"spares: no number lasts {show_duration(q.limit_s)} with probability "
            f"{q.probability:g}; use fewer nodes or a shorter time limit"
        )
    else:
        told.append(
            f"spares to ask for: {advice.spares} (--nodes={q.layout.nodes + advice.spares} in the "
            f"batch script), enough for {show_duration(q.limit_s)} with probability "
            f"{q.probability:g}"
        )
    if per_job:
        told.append(f"  a node is lost every {report.hours(per_job)} in the mean")
    table = ", ".join(f"{_percent(out)} with {count}" for count, out in advice.running_out)
    told.append(f"  how likely they run out: {table}")
    return told


def _percent(value: float) -> str:
    return f"{100 * value:.2g} %" if value >= 1e-6 else "0 %"


def as_json(advice: Advice) -> dict[str, Any]:
    """The answer for programs."""
    need = advice.sizes.need
    return {
        "parameters": advice.question.model.parameters,
        "state_nbytes": advice.sizes.state_nbytes,
        "memory": {
            "nbytes": advice.sizes.memory_nbytes,
            "slots": SLOTS,
            "copies_nbytes": SLOTS * need.copy_nbytes,
            "replicas_nbytes": SLOTS * need.held_nbytes,
            "checkpoint_nbytes": advice.sizes.save_nbytes,
            "fits": advice.fits,
        },
        "step": [_hiding_json(each) for each in (advice.copies, advice.replicas)],
        "spares": {
            "enough": advice.spares,
            "probability": advice.question.probability,
            "running_out": [
                {"spares": count, "probability": out} for count, out in advice.running_out
            ],
        },
        "goodput": [
            {
                "strategy": runs.strategy.name,
                "spares": held,
                **report.as_interval(runs.mean("goodput")),
            }
            for _, held, runs in advice.goodput
        ],
    }


def _hiding_json(each: Hiding) -> dict[str, Any]:
    return {
        "what": each.what,
        "nbytes": each.nbytes,
        "rate": each.rate,
        "takes_s": each.takes_s,
        "step_s": each.step_s,
        "hidden": each.hidden,
    }


def strategies(advice: Advice) -> Sequence[Strategy]:
    """Those that were simulated, each once."""
    return list({runs.strategy.name: runs.strategy for _, _, runs in advice.goodput}.values())
