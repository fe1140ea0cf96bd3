"""Everything that was found out, judged: what a start must know, and the whole table. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from deadpool_launch.backends.base import Check
from deadpool_launch.controller.wording import plural
from deadpool_launch.exits import ExitCode, PreflightCode
from deadpool_launch.options import LaunchOptions
from deadpool_launch.plan import LaunchPlan
from deadpool_launch.preflight import fabric_rules, node_rules, room, slurm_rules
from deadpool_launch.preflight.facts import Answers, Facts, SlurmFacts
from deadpool_launch.whatif.sizes import Layout
from deadpool_slurm import parse, versions

Result = Literal["ok", "warn", "fail", "unknown"]

#: What must be known before it can be said that hot swap works.
_DECIDING = frozenset(
    {"Slurm version", "stepmgr", "--no-kill", "node state", "nodes answer", "run directory"}
    | {"ports", "memory"}
)
RUN_INSIDE = "run this inside of the allocation"


def result_of(check: Check) -> Result:
    """The check's result in a word."""
    if check.unknown:
        return "unknown"
    return "ok" if check.ok else "warn" if check.ok is None else "fail"


def at_start(nodes: Sequence[str], options: LaunchOptions, facts: Facts) -> list[Check]:
    """What a launcher in the job ``nodes`` must know, of what costs one short step."""
    slurm, answers = facts.slurm or SlurmFacts(), facts.answers or Answers()
    if without := slurm_rules.no_access(slurm):
        return without
    checks = [
        *slurm_rules.slurm_checks(nodes, slurm, options),
        *answers.problems,
        *fabric_rules.nccl_defects(answers.said),
        *_slow_names(answers, nodes, options),
    ]
    if options.mpi != "none":
        checks += fabric_rules.mpi4py_checks(answers.said, answers.own)
    return [*checks, *_answer_checks(answers)]


def _slow_names(answers: Answers, nodes: Sequence[str], options: LaunchOptions) -> list[Check]:
    active = options.nodes or max(1, len(nodes) - options.spares)
    checks = fabric_rules.name_checks(answers.said, active * options.nproc_per_node)
    return [check for check in checks if check.ok is not True]


def _answer_checks(answers: Answers) -> list[Check]:
    if not answers.own:
        return []
    checks = node_rules.probe_checks(
        answers.asked, answers.said, answers.own, answers.silence, answers.directories
    )
    if answers.given_up:
        checks.append(slurm_rules.given_up_check(answers.given_up))
    return checks


def table(
    options: LaunchOptions, facts: Facts, layout: Layout | None, state: room.State
) -> list[Check]:
    """A row for everything that was looked at, also where all is well."""
    checks: list[Check] = []
    if facts.slurm is not None:
        if without := slurm_rules.no_access(facts.slurm):
            return without
        checks += _slurm_rows(options, facts)
    if facts.answers is None:
        checks += [Check(name, None, _OUTSIDE[name], RUN_INSIDE, unknown=True) for name in _OUTSIDE]
        return [*checks, _with_remedy(room.outside_check(layout, state))]
    answers = facts.answers
    found = _answer_checks(answers)
    checks += answers.problems
    if answers.said:
        found += fabric_rules.mpi4py_checks(answers.said, answers.own)
        checks += _good_rows(answers, found)
        checks += _clock(answers, found)
        if facts.slurm is not None:
            checks += fabric_rules.port_checks(answers.said)
        if layout is not None:
            checks += fabric_rules.name_checks(answers.said, layout.nodes * layout.nproc_per_node)
            sharers = 1 if facts.slurm is not None else len(facts.nodes)
            checks += room.room_checks(answers.said, layout, state, sharers)
        checks += fabric_rules.nccl_checks(answers.said)
    else:
        checks += found
    mpi4py = answers.own.get("mpi4py")
    return [*checks, fabric_rules.world_check(facts.world, options.mpi, mpi4py, facts.nodes)]


_OUTSIDE = {
    "--no-kill": "whether the job outlives its nodes",
    "nodes answer": "whether all nodes run the same python, torch and deadpool",
    "run directory": "whether every node sees and can write it",
    "clock": "whether the nodes' clocks agree",
    "ports": "whether the nodes reach the launcher and each other",
    "names of addresses": "whether rebuilds wait for name servers",
    "NCCL": "which NCCL the nodes have",
    "MPI world": "whether MPI comes up over the nodes",
}


def _with_remedy(check: Check) -> Check:
    return Check(check.name, check.ok, check.text, RUN_INSIDE, unknown=check.unknown)


def _slurm_rows(options: LaunchOptions, facts: Facts) -> list[Check]:
    slurm = facts.slurm
    assert slurm is not None
    inside = facts.answers is not None
    checks = (
        slurm_rules.slurm_checks(facts.nodes, slurm, options)
        if inside
        else slurm_rules.config_checks(slurm, options)
    )
    told = {check.name for check in checks}
    rows = [check for check in checks if check.name != "MPI kind"]
    if slurm.config is not None:
        version = slurm_rules.version_of(slurm.config)
        shown = versions.show(version) if version is not None else "?"
        rows += [
            check
            for check in (
                Check(
                    "Slurm version", True, f"Slurm {shown} has no known defect around lost nodes"
                ),
                Check("stepmgr", True, "steps are made without the batch host"),
                Check("KillOnBadExit", True, "a task that fails leaves its step alone"),
                slurm_rules.timeout_check(slurm.config, options.heartbeat_timeout_s),
                slurm_rules.return_check(slurm.config, slurm.job, options),
                slurm_rules.switch_check(slurm.network, slurm.config),
            )
            if check.name not in told
        ]
    if inside and "node state" not in told:
        rows.append(Check("node state", True, f"Slurm has {plural(len(facts.nodes), 'good node')}"))
    rows += slurm_rules.mpi_check(options.mpi, options.site_config.mpi_kinds, slurm.mpi_kinds)
    return sorted(rows, key=lambda check: _SLURM_ORDER.index(check.name))


_SLURM_ORDER = (
    *("Slurm access", "Slurm version", "stepmgr", "--no-kill", "KillOnBadExit", "SlurmdTimeout"),
    *("ReturnToService", "network", "MPI kind", "srun", "requeue", "node state"),
)


def _good_rows(answers: Answers, found: Sequence[Check]) -> list[Check]:
    """The nodes' checks, with a row of its own for each thing that ``probe_checks`` tells of all
    good nodes in one sentence.
    """
    rows = [check for check in found if not (check.name == "nodes answer" and check.ok)]
    told = {check.name for check in rows}
    own, count = answers.own, len(answers.said)
    if "nodes answer" not in told:
        rows.append(Check("nodes answer", True, f"{plural(count, 'node')}, one step"))
    if "run directory" not in told:
        path = answers.directories.run_dir
        rows.append(Check("run directory", True, f"every node sees and can write {path}"))
    if not told & {*node_rules.LIBRARIES, "mpi4py"}:
        names = (*node_rules.LIBRARIES, "mpi4py")
        same = ", ".join(f"{name} {own[name]}" for name in names if own.get(name))
        rows.append(Check("libraries", True, f"the same on every node: {same}"))
    return rows


def _clock(answers: Answers, found: Iterable[Check]) -> list[Check]:
    if any(check.name == "clock" for check in found):
        return []
    apart = [facts["clock"] - facts["received_at"] for facts in answers.said.values()]
    # An answer takes time, which looks like a clock that is behind.
    text = f"within {max(map(abs, apart)):.1f} s of the launcher's, the way of the answer included"
    return [Check("clock", True, text)]


def plan_check(plan: LaunchPlan | None, problem: str) -> Check:
    """Whether there are nodes enough, and a spare among them."""
    if plan is None:
        return Check("spares", False, problem)
    text = f"{plural(len(plan.active), 'active node')}, {plural(len(plan.spares), 'spare')}"
    if plan.spares or plan.extras:
        more = f", {plural(len(plan.extras), 'node')} more if no spare is left"
        return Check("spares", True, text + (more if plan.extras else ""))
    return Check(
        "spares",
        None,
        f"{text}: the loss of a node ends the job",
        "hold one: --spares 1",
    )


def verdict(checks: Sequence[Check]) -> ExitCode | PreflightCode:
    """Whether hot swap can work here; a node that must be left out is counted by ``plan_check``."""
    if any(check.ok is False and check.leave_out is None for check in checks):
        return ExitCode.UNSUITABLE
    if any(check.unknown and check.name in _DECIDING for check in checks):
        return PreflightCode.NOT_KNOWN
    return ExitCode.OK


def verdict_text(checks: Sequence[Check]) -> str:
    """The same for people."""
    code = verdict(checks)
    if code == ExitCode.UNSUITABLE:
        failed = [check.name for check in checks if check.ok is False and check.leave_out is None]
        return f"Hot swap cannot work here: {', '.join(dict.fromkeys(failed))}."
    if code == PreflightCode.NOT_KNOWN:
        names = [check.name for check in checks if check.unknown and check.name in _DECIDING]
        return f"Nothing speaks against hot swap, but not known: {', '.join(dict.fromkeys(names))}."
    without = sorted({check.leave_out for check in checks if check.leave_out is not None})
    return "Hot swap can work here" + (
        f", without {parse.fold_nodes(without)}." if without else "."
    )
