"""What is found out before a job, as values. ``gather`` makes them, the rules judge them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from deadpool_launch.backends.base import Check
from deadpool_runtime.protocol import Address, AdmissionCheck
from deadpool_slurm import parse, ways

#: Marks the probe's line among what else a node may print.
PREFIX = "deadpool-probe "
#: Said of a directory in which the launcher's file is not seen.
NOT_SHARED = "is not the one that the launcher's node has"


class ProbeTask(msgspec.Struct, frozen=True, kw_only=True):
    """What the probe looks at on its node. ``launcher``: call there, and whom it names.
    ``launcher_host``: look up its address and the node's own.
    """

    run_dir: str
    token: str
    admission: list[AdmissionCheck] = []
    checkpoint_dir: str = ""
    launcher: Address | None = None
    launcher_host: str = ""


@dataclass(frozen=True, slots=True)
class Directories:
    """Those that every node must see, as the launcher names them; empty for none."""

    run_dir: str
    checkpoint_dir: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmFacts:
    """What Slurm says of itself and, inside of one, of the job."""

    #: How Slurm is asked; None if nobody had to choose.
    way: ways.Choice | None = None
    has_srun: bool = True
    #: ``scontrol show config``; None if it cannot be read, and then why.
    config: Mapping[str, str] | None = None
    config_problem: str = ""
    #: What shows that the job was submitted with ``--no-kill``, and why that could not be seen.
    no_kill: str | None = None
    submission_problem: str = ""
    job: parse.JobFacts | None = None
    nodes: Mapping[str, parse.NodeFacts] = field(default_factory=dict)
    job_problem: str = ""
    #: What steps ask for of the network.
    network: str | None = None
    #: What ``srun --mpi=list`` names; None if it was not asked or says nothing.
    mpi_kinds: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What the nodes said of themselves (see ``probe``), each by its name."""

    #: The launcher's own node.
    own: Mapping[str, Any] = field(default_factory=dict)
    #: Those that were asked, and what they said.
    asked: tuple[str, ...] = ()
    said: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: Why others may have said nothing.
    silence: Mapping[str, str] = field(default_factory=dict)
    #: Nodes that were given back to Slurm.
    given_up: tuple[str, ...] = ()
    directories: Directories = Directories("")
    #: Why nodes were not asked, or not all that was to be.
    problems: tuple[Check, ...] = ()


@dataclass(frozen=True, slots=True)
class MpiWorld:
    """An MPI world over the nodes that was tried."""

    kind: str
    nodes: int
    took_s: float
    library: str
    #: Empty if it came up.
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All of it."""

    #: Of the allocation, in its order.
    nodes: tuple[str, ...] = ()
    #: None where nodes are process trees of this machine.
    slurm: SlurmFacts | None = None
    #: None outside of an allocation.
    answers: Answers | None = None
    #: None if none was tried.
    world: MpiWorld | None = None
