"""What the preflight's findings mean. Pure: facts and text in, ``Check`` values out.

The back ends gather the facts (``backends/slurm.py`` with one step over all nodes); here they are
compared and put into words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deadpool_launch.backends.base import Check
from deadpool_launch.options import LaunchOptions
from deadpool_launch.preflight_probe import PREFIX
from deadpool_slurm import access, parse, versions

_LITTLE_SHM_NBYTES = 1 << 30
#: Clocks this far apart make logs misleading; nothing else depends on them.
_CLOCK_DIFFERENCE_S = 5.0

#: What ``srun --network`` takes only where the cluster's configuration allows it.
_NETWORK_WORDS = ("job_vni", "single_node_vni")


@dataclass(frozen=True, slots=True)
class Directories:
    """Those that every node must see, as the launcher names them; empty for none."""

    run_dir: str
    checkpoint_dir: str = ""


#: Directories by their keys in what the nodes say: what they are called, and how one is chosen.
_SHARED = {
    "run_dir": ("run directory", "--run-dir"),
    "checkpoint_dir": ("checkpoint directory", "--checkpoint-dir"),
}
_OK_BY_SEVERITY = {"refuse": False, "warn": None, "note": True}

NO_KILL_REMEDY = (
    "add the line '#SBATCH --no-kill' to the batch script and submit it again "
    "(if it was given on the sbatch or salloc command line: --assume-no-kill)"
)


_SLURM_REMEDY = (
    "make Slurm's commands, its configuration and munge's socket available where the launcher runs "
    "(in a container: bind them)"
)


def access_checks(way: access.Choice | None, *, srun: bool) -> list[Check]:
    """Whether Slurm can be asked from here and steps be started, and how."""
    checks: list[Check] = []
    if not srun:
        text = "srun is not on the PATH, and every agent is started with it"
        checks.append(Check("slurm access", False, text, _SLURM_REMEDY))
    if way is None:
        return checks
    if way.missing:
        text = f"Slurm cannot be asked: {way.missing}"
        remedy = f"{_SLURM_REMEDY}, or install deadpool-launch[pyslurm] for this Slurm"
        return [*checks, Check("slurm access", False, text, remedy)]
    what = "its commands" if way.way == access.COMMANDS else "pyslurm"
    return [*checks, Check("slurm access", True, f"Slurm is asked by {what}, as {way.reason}")]


def no_kill_check(evidence: str | None, assumed: bool, problem: str = "") -> Check:
    """Slurm ends a job with its first lost node unless it was submitted with ``--no-kill``."""
    if evidence is not None:
        return Check("no-kill", True, f"the job outlives its nodes ({evidence})")
    if assumed:
        return Check(
            "no-kill", True, "the job outlives its nodes (taken on trust: --assume-no-kill)"
        )
    if problem:
        return Check(
            "no-kill",
            False,
            f"whether this job was submitted with --no-kill cannot be found out ({problem})",
            "if it was, say so with --assume-no-kill",
        )
    return Check(
        "no-kill",
        False,
        "this job does not seem to be submitted with --no-kill, so Slurm would end it with the "
        "first lost node",
        NO_KILL_REMEDY,
    )


def version_checks(version: versions.Version | None, config: Mapping[str, str]) -> list[Check]:
    """Slurm's version and configuration (``scontrol show config``)."""
    checks = [
        Check("slurm", _OK_BY_SEVERITY[found.severity], found.text, found.remedy)
        for found in versions.findings(version, config)
    ]
    if checks or version is None:
        return checks
    return [Check("slurm", True, f"Slurm {versions.show(version)}")]


def job_checks(nodes: Sequence[str], job: parse.JobFacts) -> list[Check]:
    """What Slurm says of the job: how it makes steps, and which of its nodes it has lost."""
    checks = [
        Check("node state", None, f"{node} is no longer part of the job", leave_out=node)
        for node in nodes
        if node not in job.nodes
    ]
    if job.stepmgr:
        checks.append(
            Check(
                "slurm",
                False,
                "the job was submitted with --stepmgr: no step could be started once the batch "
                "host is lost",
                "submit it without --stepmgr",
            )
        )
    return checks


def requeue_checks(job: parse.JobFacts) -> list[Check]:
    """Whether Slurm would put the job back into its queue."""
    if job.can_requeue is not False:
        return []
    return [
        Check(
            "requeue",
            None,
            "the job will not be requeued before its time limit: Slurm says that it cannot be",
            "submit it with sbatch --requeue",
        )
    ]


def srun_checks(nodes: int, options: LaunchOptions) -> list[Check]:
    """Whether the site takes as many ``srun`` as the job has agents."""
    most = options.site_config.most_srun
    used = nodes if options.nodes is None else min(nodes, options.nodes + options.spares)
    started = used - (options.spares if options.spare_start == "on-failure" else 0)
    if most is None or started <= most:
        return []
    return [
        Check(
            "srun",
            None,
            f"{started} srun run at once, one for each agent, and site {options.site_config.name} "
            f"advises {most} at most",
            "use fewer nodes, or --spare-start on-failure",
        )
    ]


def network_checks(request: str | None, config: Mapping[str, str]) -> list[Check]:
    """Whether this cluster takes what is asked for each step's network, of what it may forbid."""
    pairs = (part.partition("=") for part in config.get("SwitchParameters", "").split(","))
    allowed = {word for word, equals, value in pairs if not equals or value in ("all", "user")}
    asked = [word for word in (request or "").split(",") if word in _NETWORK_WORDS]
    missing = [word for word in asked if word not in allowed]
    if "SwitchParameters" not in config or not missing:
        return []
    return [
        Check(
            "network",
            None,
            f"steps that ask for --network={request} may not start: this cluster does not "
            f"allow {' and '.join(missing)} (SwitchParameters)",
            "set network.request: none in a site file of your own, or ask the site",
        )
    ]


def given_up_check(nodes: Sequence[str]) -> Check:
    """Nodes that were given back because Slurm would not make the job's first step with them."""
    return Check(
        "node state",
        None,
        f"{parse.fold_nodes(nodes)} given back to Slurm, which starts no step while one of the "
        "job's nodes is silent",
    )


def run_dir_problem(run_dir: Path, error: OSError) -> Check:
    """The launcher itself cannot write the run directory."""
    return Check(
        "run directory",
        False,
        f"{run_dir} cannot be written: {error.strerror}",
        "choose another --run-dir",
    )


def not_looked_at(checkpoint_dir: Path, error: OSError) -> Check:
    """The launcher can use its own folder in this directory only."""
    return Check(
        "checkpoint directory",
        None,
        f"whether every node sees {checkpoint_dir} was not looked at: nothing can be written to it "
        f"({error.strerror})",
    )


def admission_check(node: str, reason: str) -> Check:
    """The node fails one of the policy's admission checks."""
    return Check("admission", False, f"{node} {reason}", leave_out=node)


def state_checks(nodes: Sequence[str], facts: Mapping[str, parse.NodeFacts]) -> list[Check]:
    """What Slurm says of the nodes; only those that are not plainly well."""
    checks = []
    for node in nodes:
        known = facts.get(node)
        if known is None:
            checks.append(Check("node state", None, f"Slurm says nothing about {node}"))
        elif known.health is not parse.Health.OK:
            because = f" ({known.reason})" if known.reason else ""
            text = f"{node} is {known.state}{because}"
            # Slurm starts no step on a node it does not hear from, so it is of no use now either.
            lost = known.health in (parse.Health.DEAD, parse.Health.SUSPECT)
            leave_out = node if lost else None
            checks.append(Check("node state", None, text, leave_out=leave_out))
    return checks


def read_probe(line: str, received_at: float) -> dict[str, Any] | None:
    """One node's facts from a line of the step's output; ``None`` for any other line."""
    _, prefix, body = line.partition(PREFIX)
    if not prefix:
        return None
    try:
        facts = json.loads(body)
    except ValueError:
        return None
    if not isinstance(facts, dict) or "node" not in facts:
        return None
    return {**facts, "received_at": received_at}


def probe_checks(
    nodes: Sequence[str],
    probes: Mapping[str, Mapping[str, Any]],
    own: Mapping[str, Any],
    silence: Mapping[str, str],
    directories: Directories,
) -> list[Check]:
    """Compare what the nodes said with each other and with the launcher (``own``).

    ``silence`` says why a node may not have answered.
    """
    checks = _shared_checks(probes, own, directories)
    good: list[str] = []
    for node in nodes:
        facts = probes.get(node)
        if facts is None:
            because = f": {silence[node]}" if node in silence else ""
            text = f"{node} did not answer{because}"
            checks.append(Check("nodes answer", None, text, leave_out=node))
        elif found := _node_checks(node, facts, own):
            checks += found
        elif not any(facts.get(key) for key in _SHARED):
            good.append(node)
    if good:
        text = (
            f"{parse.fold_nodes(good)}: python {own['python']}, torch {own['torch']}, "
            f"{_shared_text(directories)} shared, clocks agree"
        )
        checks.append(Check("nodes answer", True, text))
    return checks


def _shared_text(directories: Directories) -> str:
    names = [name for key, (name, _) in _SHARED.items() if getattr(directories, key)]
    return " and ".join(names)


def _shared_checks(
    probes: Mapping[str, Mapping[str, Any]], own: Mapping[str, Any], directories: Directories
) -> list[Check]:
    """The directories that the launcher's node has in common with every other one.

    Where no other node sees it the directory is the wrong one; where some do, the others are.
    """
    checks = []
    others = [node for node in probes if node != own.get("node")]
    for key, (name, flag) in _SHARED.items():
        problems = {node: problem for node, facts in probes.items() if (problem := facts.get(key))}
        path = getattr(directories, key)
        remedy = f"choose a {flag} on a file system that all nodes share and can write"
        if others and set(others) <= set(problems):
            problem = problems[others[0]]
            text = f"the {name} {path} on {parse.fold_nodes(sorted(problems))} {problem}"
            checks.append(Check(name, False, text, remedy))
            continue
        for node, problem in problems.items():
            text = f"the {name} {path} on {node} {problem}"
            checks.append(Check(name, False, text, f"mount it there, or {remedy}", leave_out=node))
    return checks


def _node_checks(node: str, facts: Mapping[str, Any], own: Mapping[str, Any]) -> list[Check]:
    checks = []
    for what in ("python", "deadpool", "torch"):
        if facts.get(what) != own.get(what):
            checks.append(
                Check(
                    what,
                    False,
                    f"{node} has {what} {facts.get(what)}, the launcher's node has {own.get(what)}",
                    "use one environment on a file system that all nodes share",
                    leave_out=node,
                )
            )
    if facts.get("torch") is None and own.get("torch") is None:
        checks.append(
            Check(
                "torch",
                False,
                f"{node} has no torch in the launcher's environment",
                "install torch",
            )
        )
    if reason := facts.get("admission"):
        checks.append(admission_check(node, reason))
    free = facts.get("shm_free_nbytes", 0)
    if free < _LITTLE_SHM_NBYTES:
        checks.append(
            Check("shared memory", None, f"{node} has only {free >> 20} MiB free in /dev/shm")
        )
    difference = facts["clock"] - facts["received_at"]
    if abs(difference) > _CLOCK_DIFFERENCE_S:
        checks.append(
            Check(
                "clock",
                None,
                f"the clock of {node} differs from the launcher's by {difference:+.1f} s",
            )
        )
    return checks
