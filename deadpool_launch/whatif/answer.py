"""The answer of ``deadpool plan``, in words and for programs. Pure."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from deadpool_launch.controller.wording import plural, size
from deadpool_launch.policy.kinds import show_duration
from deadpool_launch.whatif import report
from deadpool_launch.whatif.advice import Advice, Hiding
from deadpool_launch.whatif.estimate import Estimate


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
        q.replicas.text(),
        *q.replicas.remarks,
        "",
        *_memory(advice),
        "",
        "bytes of a step, on the node that has most:",
        f"  {advice.copies.text()}",
        f"  {advice.replicas.text()}",
        *_seldom(advice),
        *_waiting(advice),
        "",
        *_losses(advice),
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
        f"  {need.copies} slots for {plural(len(need.ranks), 'rank')}: {need.copies} x "
        f"{size(need.copy_nbytes)} = {size(need.copies * need.copy_nbytes)}",
        f"  {need.replicas} slots for replicas of others: {need.replicas} x "
        f"{size(need.held_nbytes)} = {size(need.replicas * need.held_nbytes)}",
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


def _seldom(advice: Advice) -> list[str]:
    interval, nbytes = advice.question.layout.interval, advice.replicas.nbytes
    if interval == 1:
        return []
    return [
        f"  replicas are of one step in {interval}, for which training waits in the next one; in "
        f"the mean {size(nbytes // interval)} a step"
    ]


def _losses(advice: Advice) -> list[str]:
    q, again = advice.question, advice.replay
    if again is None:
        return ["no other node has replicas: a lost node costs all since the durable checkpoint"]
    factor = q.layout.factor
    at_once = (
        "one node may be lost at a time; with the one that holds its replicas"
        if factor == 1
        else f"{factor} nodes may be lost at once; with all {factor} that hold its replicas"
    )
    return [
        f"a lost node costs up to {plural(again.most, 'completed step')}, {again.mean:.2g} in the "
        f"mean ({again.mean * q.step_s:.3g} s), and the one under way",
        f"{at_once} a lost node costs all since the durable checkpoint",
    ]


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
        "replication": advice.question.replicas.as_json(),
        "memory": {
            "nbytes": advice.sizes.memory_nbytes,
            "slots": need.copies,
            "replica_slots": need.replicas,
            "copies_nbytes": need.copies * need.copy_nbytes,
            "replicas_nbytes": need.replicas * need.held_nbytes,
            "checkpoint_nbytes": advice.sizes.save_nbytes,
            "fits": advice.fits,
        },
        "step": [
            _hiding_json(advice.copies, 1),
            _hiding_json(advice.replicas, advice.question.layout.interval),
        ],
        "replay": None if advice.replay is None else asdict(advice.replay),
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


def _hiding_json(each: Hiding, interval: int) -> dict[str, Any]:
    return {
        "what": each.what,
        "nbytes": each.nbytes,
        "every": interval,
        "mean_nbytes": each.nbytes / interval,
        "rate": each.rate,
        "takes_s": each.takes_s,
        "step_s": each.step_s,
        "hidden": each.hidden,
    }
