"""``deadpool simulate``: what faults would cost a job under each way to live with them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from deadpool_launch import plot
from deadpool_launch.errors import UsageError
from deadpool_launch.plan import check_factor
from deadpool_launch.policy.kinds import show_duration
from deadpool_launch.whatif import paper, picture, published, report
from deadpool_launch.whatif.asking import replication_of, replication_options
from deadpool_launch.whatif.estimate import estimate
from deadpool_launch.whatif.faults import Faults, Renewal
from deadpool_launch.whatif.job import Job
from deadpool_launch.whatif.reading import (
    MOST_NODES,
    MOST_SEEDS,
    NODE_MTBF_S,
    check_lengths,
    count_option,
    drawn_faults,
    faults_text,
    file_option,
    read_first_step,
    read_trace,
    share_option,
    time_option,
    with_changes,
)
from deadpool_launch.whatif.replication import Replication
from deadpool_launch.whatif.strategies import (
    ALL,
    DEADPOOL,
    GIVEN,
    Strategy,
    chosen,
    measured,
    replicated,
)

_SEEDS = 100
#: What can be said beside ``--paper``.
_WITH_PAPER = frozenset(
    {"as_published", "as_json", "picture_path", "seeds", "seed", "step_time", "node_mtbf"}
)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@count_option("--steps", 1, "Steps of the job.")
@time_option("--step-time", "One step, undisturbed.")
@count_option("--nodes", 1, "Nodes that train.", MOST_NODES)
@count_option("--spares", 0, "Nodes that wait.  [default: 0]", MOST_NODES)
@time_option(
    "--node-mtbf",
    "Mean time between the faults of one node.  [default: that of a published job]",
)
@click.option(
    "--weibull",
    type=float,
    metavar="SHAPE",
    help="Lifetimes with this shape instead of exponential ones; below 1 faults come in bursts.",
)
@share_option(
    "--transient",
    "Share of the faults after which the node can be used again at once.  [default: that of a "
    "published cluster]",
)
@count_option("--group", 2, "Neighbouring nodes that also fail together.")
@time_option("--group-mtbf", "Mean time between faults of such a group.")
@file_option(
    "--trace",
    "trace",
    "FILE",
    "Recorded faults instead: lines TIME,NODE,KIND, such as 3.5h,17,permanent.",
)
@count_option(
    "--domain",
    1,
    "Nodes of a failure domain, so that replicas are kept outside of it.  [default: 1]",
)
@replication_options
@time_option(
    "--queue-wait",
    "How long a new allocation takes when no spare is left.  [default: 1h, assumed]",
)
@count_option(
    "--least-nodes",
    1,
    "With fewer the elastic strategy asks for a new allocation.  [default: half]",
)
@click.option(
    "--strategy",
    "strategies",
    multiple=True,
    metavar="NAME",
    help=f"Only this one ({', '.join(each.name for each in ALL)}); repeat it for several.",
)
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="NAME.FIGURE=VALUE",
    help="Another cost, such as deadpool.permanent=12s or fixed.save-every=30m.",
)
@file_option(
    "--measured",
    "measurement",
    "FILE",
    "Take DEADPOOL's recovery from what bench/first_step.py wrote.",
)
@count_option("--seeds", 1, f"Runs of each strategy.  [default: {_SEEDS}]", MOST_SEEDS)
@count_option("--seed", 0, "The first seed.  [default: 0]")
@click.option("--paper", "as_published", is_flag=True, help="The published 100,000-step result.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@file_option("--plot", "picture_path", "FILE.png", "Draw where the time goes.")
@click.pass_context
def simulate(
    ctx: click.Context,
    /,
    seeds: int | None,
    seed: int | None,
    node_mtbf: float | None,
    step_time: float | None,
    as_published: bool,
    as_json: bool,
    picture_path: Path | None,
    **options: Any,
) -> int:
    """Simulate a training job under faults, with each way to live with them.

    The same seed gives the same result, and all strategies meet the same faults. Every cost is
    shown with its source.
    """
    if picture_path is not None:
        plot.check_path(picture_path)
        plot.require_matplotlib()
    first = seed or 0
    if as_published:
        for param in ctx.command.params:
            if param.name not in _WITH_PAPER and options.get(param.name or "") not in (None, ()):
                raise UsageError(f"{param.opts[0]}: --paper sets it; leave out one of them")
        assumptions = paper.Assumptions(**({} if step_time is None else {"step_s": step_time}))
        runs = range(first, first + (seeds or paper.SEEDS))
        job, _, _ = paper.preset(assumptions)
        often = Renewal((node_mtbf or NODE_MTBF_S) * min(published.FACTORS))
        check_lengths(job.nodes, job.step_s, job.undisturbed_s, often)
        job, estimates, told = published.compare(
            assumptions, node_mtbf or NODE_MTBF_S, runs, as_json=as_json
        )
    else:
        job = _job(step_time, **options)
        faults, assumed = _faults(job, {**options, "node_mtbf": node_mtbf})
        named = str(options["trace"] or "--node-mtbf")
        if options["group"] is not None:
            named += " and --group-mtbf"
        check_lengths(job.nodes, job.step_s, job.undisturbed_s, faults, named)
        replicas = replication_of(options, os.environ)
        compared = _compared(job, replicas, options)
        runs = range(first, first + (seeds or _SEEDS))
        estimates = [estimate(job, faults, each, runs) for each in compared]
        wait = "assumed" if options["queue_wait"] is None else GIVEN
        assumed.append(f"a new allocation comes after {show_duration(job.queue_s)}: {wait}")
        modelled = [*replicas.remarks, *_MODELLED]
        if as_json:
            told = json.dumps(
                {
                    "job": report.job_json(job),
                    "faults": assumed,
                    "modelled": modelled,
                    "seeds": [runs.start, runs.stop],
                    "strategies": report.as_json(estimates),
                },
                indent=2,
            )
        else:
            saves = {each.strategy.name: each.save_every_s for each in estimates}
            told = "\n".join(
                [
                    *report.tables(job, estimates, runs),
                    "",
                    *(line for text in (*assumed, *modelled) for line in report.wrap(text)),
                    "",
                    *report.sources(compared, saves),
                ]
            )
    click.echo(told)
    if picture_path is not None:
        picture.draw(estimates, job, picture_path)
    return 0


def _job(step_s: float | None, **options: Any) -> Job:
    steps, nodes, least = options["steps"], options["nodes"], options["least_nodes"]
    for flag, wanted in (("--steps", steps), ("--step-time", step_s), ("--nodes", nodes)):
        if wanted is None:
            raise UsageError(
                f"{flag} is missing; say what to simulate, such as --steps 100000 --step-time 10s "
                "--nodes 128 --spares 4"
            )
    assert step_s is not None
    if least is not None and least > nodes:
        raise UsageError(f"--least-nodes {least}: must be at most the {nodes} of --nodes")
    return Job(
        steps=steps,
        step_s=step_s,
        nodes=nodes,
        spares=options["spares"] or 0,
        queue_s=options["queue_wait"] or 3600.0,
        least_nodes=least or -(-nodes // 2),
        domain=options["domain"] or 1,
    )


def _faults(job: Job, options: dict[str, Any]) -> tuple[Faults, list[str]]:
    """The failure process, and what there is to say of it."""
    if options["trace"] is None:
        drawn = drawn_faults(options)
        return drawn, faults_text(drawn, options)
    for name in ("node_mtbf", "weibull", "transient", "group", "group_mtbf"):
        if options[name] is not None:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag}: is not for a --trace; leave out one of them")
    return read_trace(options["trace"], job.seats), [
        f"faults: as recorded in {options['trace']}, which repeats"
    ]


#: What is made of lost copies.
_MODELLED = (
    "modelled: a lost node goes back to the newest step whose replicas are whole, a process that "
    "ends to the newest copy, a node that is lost in one incident with all that hold its replicas "
    "to the durable checkpoint",
    "not modelled: after a recovery replicas are there at once; state that several ranks have "
    "survives no more than other state",
)


def _compared(job: Job, replicas: Replication, options: Mapping[str, Any]) -> list[Strategy]:
    """The strategies with the costs that the user gives."""
    compared = chosen(options["strategies"])
    measurement: Path | None = options["measurement"]
    for place, each in enumerate(compared):
        if each.name == DEADPOOL.name:
            compared[place] = replicated(each, replicas)
            if measurement is not None:
                medians = read_first_step(measurement)
                compared[place] = measured(compared[place], medians, str(measurement))
    compared = with_changes(compared, options["changes"])
    for each in compared:
        holders = round(each.value("holders") or 1)
        check_factor(holders, job.nodes, job.spares, warm_spares=replicas.warm_spares)
    return compared
