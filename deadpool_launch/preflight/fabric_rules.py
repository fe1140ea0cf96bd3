"""What the network between the nodes, NCCL and MPI can do for hot swap. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deadpool_launch.backends.base import Check
from deadpool_launch.controller.wording import plural
from deadpool_launch.preflight.facts import MpiWorld
from deadpool_slurm import parse

Said = Mapping[str, Mapping[str, Any]]

#: From this version on communicators that overlap can be given up together.
_GROUP_ABORT = (2, 22)
#: What lookups of names may add to a rebuild, in seconds.
_LOOKUPS_S = 1.0


def port_checks(said: Said) -> list[Check]:
    """Whether agents reach the launcher, and the nodes each other, on ports that the system chose.

    A node that many cannot reach is the one with the fault; it is left out then.
    """
    calls = {node: facts["calls"] for node, facts in said.items() if facts.get("calls")}
    if not calls:
        text = "the nodes did not call each other, as they do not share the run directory"
        return [Check("ports", None, text, unknown=True)]
    remedy = (
        "let nodes of a job connect on any port above 1024 (firewall), or name the right "
        "network in a site file (network.interfaces)"
    )
    checks = []
    away = [node for node, found in calls.items() if found["launcher"]]
    if away:
        text = f"{parse.fold_nodes(away)} cannot reach the launcher ({calls[away[0]]['launcher']})"
        alone = len(away) == 1 and len(calls) > 1
        checks.append(Check("ports", False, text, remedy, leave_out=away[0] if alone else None))
    missed: dict[str, list[str]] = {}
    for node, found in calls.items():
        for other in found["unreached"]:
            missed.setdefault(other, []).append(node)
    for other, by in missed.items():
        text = f"{other} is not reached by {parse.fold_nodes(by)}"
        most = len(by) > 1 and len(missed) == 1
        checks.append(Check("ports", False, text, remedy, leave_out=other if most else None))
    if checks:
        return checks
    most_called = max(found["called"] for found in calls.values())
    text = f"every node reaches the launcher and {plural(most_called, 'other node')}"
    return [Check("ports", True, text)]


def name_checks(said: Said, ranks: int) -> list[Check]:
    """Whether a rebuild waits for the names of its ranks' addresses; empty if nobody looked."""
    looked = {node: facts["names"] for node, facts in said.items() if facts.get("names")}
    asking = {node: found for node, found in looked.items() if found["asked"]}
    if not asking:
        text = "no rank asks a name server for those of its peers"
        return [Check("names of addresses", True, text)] if looked else []
    node = max(asking, key=lambda name: asking[name]["slowest_s"])
    found = asking[node]
    each_s = found["slowest_s"]
    took = (
        f"takes {1000 * each_s:.3g} ms to look up {found['address']}"
        if found["done"]
        else f"does not learn the names of two addresses within {each_s:g} s"
    )
    text = (
        f"{node} {took}, and the store of every rebuild asks for the name of each rank's address, "
        f"one after the other: {ranks * each_s:.2g} s for {plural(ranks, 'rank')}"
    )
    if ranks * each_s <= _LOOKUPS_S:
        return [Check("names of addresses", True, text)]
    remedy = "put the nodes into /etc/hosts, with files first at hosts: in /etc/nsswitch.conf"
    return [Check("names of addresses", None, text, remedy)]


def nccl_defects(said: Said) -> list[Check]:
    """Versions with which a survivor may hang where it should give its communicators up."""
    checks = []
    for version, nodes in _by_version(said).items():
        if version is not None and _numbers(version) < _GROUP_ABORT:
            checks.append(
                Check(
                    "NCCL",
                    None,
                    f"NCCL {version} on {parse.fold_nodes(nodes)}: communicators that overlap "
                    "(tensor and data parallel) are given up one by one, which can hang the "
                    "survivors of a lost node",
                    "use a torch with NCCL 2.22 or later",
                )
            )
    return checks


def nccl_checks(said: Said) -> list[Check]:
    """The same, and what is all right or not known."""
    if defects := nccl_defects(said):
        return defects
    versions = _by_version(said)
    if not versions:
        return [Check("NCCL", True, "no node has an NVIDIA GPU: groups go by Gloo")]
    if None in versions:
        return [
            Check(
                "NCCL",
                None,
                f"which NCCL torch has on {parse.fold_nodes(versions[None])} is not known, as no "
                "package brings it",
                "python -c 'import torch; print(torch.cuda.nccl.version())' tells; 2.22 or later",
                unknown=True,
            )
        ]
    names = " and ".join(version for version in versions if version is not None)
    return [
        Check(
            "NCCL",
            None,
            f"NCCL {names} has no known defect of abort, but groups by NCCL are not protected "
            "yet: attach refuses them",
            "use Gloo, or one rank",
        )
    ]


def _by_version(said: Said) -> dict[str | None, list[str]]:
    """Nodes with GPUs by NCCL's version."""
    found: dict[str | None, list[str]] = {}
    for node, facts in said.items():
        if facts.get("gpus"):
            found.setdefault(facts.get("nccl"), []).append(node)
    return found


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) if part.isdecimal() else 0 for part in parts)


def mpi4py_checks(said: Said, own: Mapping[str, Any]) -> list[Check]:
    """Nodes whose mpi4py is another one than the launcher's: they could not be one world."""
    other = {node: facts.get("mpi4py") for node, facts in said.items()}
    names = [node for node, version in other.items() if version != own.get("mpi4py")]
    if not names:
        return []
    return [
        Check(
            "mpi4py",
            None,
            f"{parse.fold_nodes(names)} has mpi4py {other[names[0]]}, the launcher's node has "
            f"{own.get('mpi4py')}: no MPI world with it",
            "use one environment on a file system that all nodes share",
        )
    ]


def world_check(
    world: MpiWorld | None, asked: str, mpi4py: str | None, nodes: Sequence[str]
) -> Check:
    """Whether the movers of MPI would come up; replicas go over TCP where they do not."""
    if world is not None and not world.problem:
        return Check(
            "MPI world",
            True,
            f"{plural(world.nodes, 'node')} were one world after {world.took_s:.1f} s "
            f"({world.kind}, {world.library})",
        )
    if world is not None:
        return Check(
            "MPI world",
            None,
            f"no world with {world.kind}: {world.problem}. Replicas go over TCP",
            "load the site's MPI module, and build mpi4py with it (docs/slurm.md)",
        )
    if len(nodes) < 2:
        return Check("MPI world", True, "one node needs none")
    if mpi4py is None:
        ok = True if asked == "none" else None
        text = "mpi4py is not installed: replicas go over TCP"
        return Check("MPI world", ok, text, "" if ok else "install the extra mpi")
    text = "not tried, as no kind is named (--mpi KIND): replicas go over TCP"
    return Check("MPI world", True, text)
