"""A site's values as one frozen struct, and what follows from them. Pure.

``schema.py`` says what each field means, in the words of the site files; ``merge.py`` makes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

Kind = Literal["slurm", "local"]
GpuFlag = Literal["gpus-per-node", "gres", "none"]

#: The last number in a node's name: ``nid001234`` is the 1234th.
_NUMBER = re.compile(r"(\d+)\D*$")


class SiteConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is particular to a cluster. The defaults are those of a site that nobody described."""

    name: str = "generic"
    kind: Kind = "slurm"
    about: str = ""
    #: What the site is known by, where nobody names it.
    clusters: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    #: The batch script.
    partition: str | None = None
    qos: str | None = None
    account: str | None = None
    constraint: str | None = None
    time_s: float | None = None
    exclusive: bool = False
    memory: str | None = None
    options: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    #: Nodes and their GPUs.
    gpus_per_node: int | None = None
    gpu_flag: GpuFlag = "none"
    domain_size: int | None = None
    domain_pattern: str | None = None
    #: The steps of the job.
    srun_options: tuple[str, ...] = ()
    cpu_bind: str = "none"
    container: tuple[str, ...] = ()
    container_python: str | None = None
    mpi_kinds: tuple[str, ...] = ()
    mpi_env: tuple[tuple[str, str], ...] = ()
    #: The network.
    network_request: str | None = None
    interfaces: tuple[str, ...] = ()
    host_suffix: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    #: What the site allows.
    most_nodes: int | None = None
    most_time_s: float | None = None
    most_srun: int | None = None

    @property
    def gpu_options(self) -> tuple[str, ...]:
        """How all GPUs of a node are asked for, of ``sbatch`` and of ``srun``."""
        if self.gpus_per_node is None or self.gpu_flag == "none":
            return ()
        if self.gpu_flag == "gres":
            return (f"--gres=gpu:{self.gpus_per_node}",)
        return (f"--gpus-per-node={self.gpus_per_node}",)

    def inside(self, argv: Sequence[str], python: str) -> list[str]:
        """A command that this Python runs, as a step runs it: in the container, if there is one."""
        inner = list(argv)
        if self.container_python is not None and inner[:1] == [python]:
            inner[0] = self.container_python
        return [*self.container, *inner]

    def added_to(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables for the ranks that the user has not set otherwise."""
        return {name: value for name, value in self.env if name not in environ}

    def domains(self, nodes: Sequence[str]) -> dict[str, str]:
        """The failure domain of each node of which it is known."""
        found = {node: self._domain(node) for node in nodes}
        return {node: domain for node, domain in found.items() if domain is not None}

    def _domain(self, node: str) -> str | None:
        if self.domain_pattern is not None:
            match = re.fullmatch(self.domain_pattern, node)
            return match[1] if match else None
        number = _NUMBER.search(node)
        if self.domain_size is None or number is None:
            return None
        return f"{node[: number.start()]}{int(number[1]) // self.domain_size}"


#: The site that nobody described.
GENERIC = SiteConfig()
