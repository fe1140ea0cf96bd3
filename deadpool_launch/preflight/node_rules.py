"""What the nodes say of themselves, compared with each other and with the launcher's. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deadpool_launch.backends.base import Check
from deadpool_launch.preflight.facts import PREFIX, Directories
from deadpool_slurm import parse

_LITTLE_SHM_NBYTES = 1 << 30
#: Clocks this far apart make logs misleading; nothing else depends on them.
CLOCK_DIFFERENCE_S = 5.0
#: What every node must have in the same version.
LIBRARIES = ("python", "deadpool", "torch")

#: Directories by their keys in what the nodes say: what they are called, and how one is chosen.
_SHARED = {
    "run_dir": ("run directory", "--run-dir"),
    "checkpoint_dir": ("checkpoint directory", "--checkpoint-dir"),
}


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
    for what in LIBRARIES:
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
    if abs(difference) > CLOCK_DIFFERENCE_S:
        checks.append(
            Check(
                "clock",
                None,
                f"the clock of {node} differs from the launcher's by {difference:+.1f} s",
            )
        )
    return checks
