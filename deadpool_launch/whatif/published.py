"""The published result beside what the simulation comes to, and what both depend on. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from deadpool_launch.errors import UsageError
from deadpool_launch.whatif import paper, report
from deadpool_launch.whatif.estimate import Estimate, Mean, estimate, ratio
from deadpool_launch.whatif.faults import Renewal
from deadpool_launch.whatif.job import Job

#: The other MTBFs that are shown, as multiples, and the runs for each.
FACTORS = (0.25, 4.0)
_FEWER_SEEDS = 100


def compare(
    assumptions: paper.Assumptions, mtbf_s: float, seeds: Sequence[int], *, as_json: bool
) -> tuple[Job, list[Estimate], str]:
    """The job, both strategies, and what there is to say of them."""
    job, restart, swap = paper.preset(assumptions)

    def both(faults: Renewal, runs: Sequence[int]) -> list[Estimate]:
        return [estimate(job, faults, each, runs) for each in (restart, swap)]

    estimates = both(Renewal(mtbf_s), seeds)
    others = {
        mtbf_s * factor: _recovery(both(Renewal(mtbf_s * factor), seeds[:_FEWER_SEEDS]))
        for factor in FACTORS
    }
    found = _recovery(estimates)
    if any(math.isnan(each.value) for each in (found, *others.values())):
        raise UsageError(
            f"--paper: no fault strikes in {len(seeds)} runs with a node MTBF of up to "
            f"{report.hours(max(FACTORS) * mtbf_s)}, so there is nothing to compare; give more "
            "--seeds or a shorter --node-mtbf"
        )
    if not as_json:
        lines = [*report.tables(job, estimates, seeds), ""]
        lines += [*_lines(assumptions, mtbf_s, found, others), ""]
        lines += [line for text in paper.lines(assumptions) for line in report.wrap(text)]
        return job, estimates, "\n".join(lines)
    told = {
        "published": {"ratio": paper.RATIO, "share": paper.SHARE},
        "ratio": report.as_interval(found),
        "share": 1 / found.value,
        "ratio_by_formula": paper.expected(assumptions, paper.solved(assumptions)),
        "ratio_at_node_mtbf_s": {
            f"{mtbf:g}": report.as_interval(each) for mtbf, each in others.items()
        },
        "assumptions": paper.lines(assumptions),
        "job": report.job_json(job),
        "node_mtbf_s": mtbf_s,
        "seeds": [seeds[0], seeds[-1] + 1],
        "strategies": report.as_json(estimates),
    }
    return job, estimates, json.dumps(told, indent=2)


def _recovery(estimates: Sequence[Estimate]) -> Mean:
    restart, swap = estimates
    return ratio(restart.accounts, swap.accounts, lambda account: account.recovery_s)


def _lines(
    assumptions: paper.Assumptions, mtbf_s: float, found: Mean, others: dict[float, Mean]
) -> list[str]:
    solved = paper.solved(assumptions)
    with_others = ", ".join(
        f"{report.hours(mtbf)} {each.value:.1f} ({each.low:.1f}-{each.high:.1f})"
        for mtbf, each in others.items()
    )
    lines = [
        *report.wrap(
            f"checkpoint-restart's recovery time is {found.value:.1f} times DEADPOOL's "
            f"({found.low:.1f}-{found.high:.1f}); DEADPOOL's is {1 / found.value:.1%} of it"
        ),
        f"published: {paper.RATIO} times, {paper.SHARE:.1%}; by the formula "
        f"{paper.expected(assumptions, solved):.1f} times",
        *report.wrap(f"node MTBF here {report.hours(mtbf_s)}; with {with_others}"),
        "",
        "the ratio by the formula, for other steps (rows) and a checkpoint every so many",
        "steps (columns):",
    ]
    every = [max(1, round(solved * factor)) for factor in (0.25, 0.5, 1, 2, 4)]
    lines.append(f"{'':<12}" + "".join(f"{steps:>9}" for steps in every))
    for factor in (0.25, 1.0, 4.0):
        step_s = assumptions.step_s * factor
        other = paper.Assumptions(step_s, assumptions.restart_s, assumptions.swap_s)
        cells = "".join(f"{paper.expected(other, steps):>9.1f}" for steps in every)
        lines.append(f"{f'{step_s:g} s':<12}{cells}")
    return lines
