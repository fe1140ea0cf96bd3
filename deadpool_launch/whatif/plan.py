"""``deadpool plan``: what a job needs on its nodes, and what to ask Slurm for."""

from __future__ import annotations

import json
import os
from typing import Any

import click

from deadpool_launch.errors import UsageError
from deadpool_launch.whatif import advice, answer, report
from deadpool_launch.whatif.asking import (
    layout_of,
    model_of,
    model_options,
    parallel_options,
    replication_of,
    replication_options,
)
from deadpool_launch.whatif.reading import (
    count_option,
    drawn_faults,
    faults_text,
    share_option,
    size_option,
    time_option,
)
from deadpool_launch.whatif.strategies import ASSUMED, DEADPOOL, GIVEN, Figure

_SEEDS = 100
_QUEUE_S = 3600.0


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@model_options
@count_option("--nodes", 1, "Nodes that train.")
@count_option("--nproc-per-node", 1, "Ranks on each.  [default: 1]")
@count_option("--dp", 1, "Data-parallel ranks.  [default: what tp and pp leave]")
@parallel_options
@replication_options
@time_option("--step-time", "One step, unprotected.")
@time_option("--time-limit", "How long the job runs.")
@count_option("--spares", 1, "Spares to plan with.  [default: as many as are enough]")
@time_option("--node-mtbf", "As for deadpool simulate.")
@share_option("--transient", "As for deadpool simulate.")
@share_option("--probability", "That the spares are enough.  [default: 0.99]")
@time_option("--queue-wait", "As for deadpool simulate.  [default: 1h, assumed]")
@share_option("--overhead", "What protection adds to a step.  [default: measured]")
@size_option("--memory-per-node", "What a node has for the copies (/dev/shm, --mem).")
@size_option("--copy-rate", "Bytes a second to a node's shared memory.  [default: measured]")
@size_option("--send-rate", "Bytes a second to other nodes.  [default: measured]")
@count_option("--seeds", 1, f"Runs for the goodput.  [default: {_SEEDS}]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def plan(as_json: bool, **options: Any) -> int:
    """Plan a job: memory for the copies, whether they hide, spares to ask for, expected goodput.

    The memory is worked out by what the launcher asks before the first step, the spares by what
    spares.auto does, the goodput by deadpool simulate.
    """
    question = _question(options)
    found = advice.advise(question)
    assumed = _assumed(question, options)
    if as_json:
        click.echo(json.dumps({**answer.as_json(found), "assumptions": assumed}, indent=2))
        return 0
    told = [*answer.lines(found), ""]
    told += [line for text in assumed for line in report.wrap(text)] + [""]
    saves = {runs.strategy.name: runs.save_every_s for _, _, runs in found.goodput}
    click.echo("\n".join([*told, *report.sources(advice.strategies(found), saves)]))
    return 0


def _question(options: dict[str, Any]) -> advice.Question:
    for name in ("params", "nodes", "step_time", "time_limit"):
        if options[name] is None:
            raise UsageError(
                f"--{name.replace('_', '-')} is missing; say what to plan, such as --params 7B "
                "--nodes 16 --nproc-per-node 8 --sharding fsdp --step-time 5s --time-limit 24h"
            )
    if options["step_time"] > options["time_limit"]:
        raise UsageError("--step-time: must be shorter than --time-limit")
    if options["probability"] == 0:
        raise UsageError("--probability 0: must be a number above 0, such as 0.99")
    replicas = replication_of(options, os.environ)
    layout = layout_of(
        options, options["nodes"], options["spares"] or 0, options["nproc_per_node"] or 1, replicas
    )
    layout.check(options["dp"])
    return advice.Question(
        model=model_of(options),
        layout=layout,
        replicas=replicas,
        step_s=options["step_time"],
        limit_s=options["time_limit"],
        faults=drawn_faults(options),
        probability=options["probability"] or advice.PROBABILITY,
        queue_s=options["queue_wait"] or _QUEUE_S,
        copy_rate=options["copy_rate"] or advice.COPY_RATE,
        send_rate=options["send_rate"] or advice.SEND_RATE,
        overhead=DEADPOOL.figures["overhead"]
        if options["overhead"] is None
        else Figure(options["overhead"], GIVEN),
        memory_nbytes=options["memory_per_node"],
        seeds=options["seeds"] or _SEEDS,
    )


def _assumed(question: advice.Question, options: dict[str, Any]) -> list[str]:
    """What was taken for granted, and why."""
    rows = (
        ("copy_rate", f"copies at {question.copy_rate / 1e9:g} GB/s a node", advice.COPY_SOURCE),
        ("send_rate", f"replicas at {question.send_rate / 1e9:g} GB/s a node", advice.SEND_SOURCE),
        ("queue_wait", f"a new allocation after {report.hours(question.queue_s)}", ASSUMED),
    )
    told = [
        f"{text}: {GIVEN if options[name] is not None else source}" for name, text, source in rows
    ]
    told = [*faults_text(question.faults, options), *told]
    return [*told, "random states, data position and the like: 64 KiB a rank, assumed"]
