"""Every key of a site file: what it takes, what it does, and which field it becomes. Pure.

A key stands here only if something acts on it. Defaults are those of ``SiteConfig``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from deadpool_launch.dotted import Names
from deadpool_launch.policy.kinds import Choice, Count, Duration, FilePath, Value
from deadpool_launch.policy.schema import Key
from deadpool_launch.sites import model
from deadpool_launch.sites.kinds import Flag, Pattern, Patterns, Text, Variables, Words

#: Sections that hold the same keys again, for one partition or quality of service each.
OVERRIDES = ("partitions", "qos")
_MONTHS_S = 366 * 86400.0
_OPTIONS = Words("a list of options, each as one word, such as [--exclusive, --mem=0]", "-")
_LONG_OPTIONS = Words("a list of long options without values, such as [--mem, --gres]", "--")


@dataclass(frozen=True, slots=True)
class SiteKey(Key):
    """One key; its field is one of ``SiteConfig``."""

    #: May stand in a partition's or QOS's section.
    overridden: bool = True

    @property
    def default(self) -> Value:
        """The value where no file says anything."""
        return getattr(model.GENERIC, self.field)


KEYS: tuple[SiteKey, ...] = (
    SiteKey("about", "about", Text(), "What it is, for the list of sites.", overridden=False),
    SiteKey(
        "kind",
        "kind",
        Choice(get_args(model.Kind)),
        "Where nodes come from: a Slurm allocation, or process trees on this machine.",
        overridden=False,
    ),
    SiteKey(
        "match.clusters",
        "clusters",
        Words(),
        "The site is taken without --site if Slurm's ClusterName is one of these.",
        overridden=False,
    ),
    SiteKey(
        "match.environment",
        "environment",
        Variables(),
        "The same if one of these variables has that value.",
        overridden=False,
    ),
    SiteKey("submit.account", "account", Text(), "sbatch --account.", word="none"),
    SiteKey(
        "submit.partition",
        "partition",
        Text(),
        "sbatch --partition, unless --partition names one.",
        word="none",
        overridden=False,
    ),
    SiteKey(
        "submit.qos",
        "qos",
        Text(),
        "sbatch --qos, unless --qos names one.",
        word="none",
        overridden=False,
    ),
    SiteKey("submit.constraint", "constraint", Text(), "sbatch --constraint.", word="none"),
    SiteKey(
        "submit.time",
        "time_s",
        Duration(60.0, _MONTHS_S),
        "The time limit where --time names none; none: the partition's default.",
        word="none",
    ),
    SiteKey("submit.exclusive", "exclusive", Flag(), "sbatch --exclusive: whole nodes."),
    SiteKey(
        "submit.memory",
        "memory",
        Text(),
        "sbatch --mem; 0 is all of a node's memory. Copies of the state are kept in it.",
        word="none",
    ),
    SiteKey("submit.options", "options", _OPTIONS, "Further options of sbatch for every script."),
    SiteKey(
        "submit.forbidden",
        "forbidden",
        _LONG_OPTIONS,
        "Options of sbatch that the site rejects: --sbatch-arg may not name them, and no script "
        "has them.",
    ),
    SiteKey("submit.setup", "setup", Words(), "Lines of shell before the launcher in the script."),
    SiteKey(
        "gpus.per_node",
        "gpus_per_node",
        Count(1),
        "GPUs on a node: so many ranks run there by default.",
        word="none",
    ),
    SiteKey(
        "gpus.flag",
        "gpu_flag",
        Choice(get_args(model.GpuFlag)),
        "How they are asked for, in the script and for each agent's step: --gpus-per-node=N, "
        "--gres=gpu:N, or not at all where nodes come with them.",
    ),
    SiteKey(
        "failure_domain.size",
        "domain_size",
        Count(1),
        "So many nodes with consecutive numbers fail together, from a multiple of it on: replicas "
        "go to another such group where there is one. failure_domains of a policy wins.",
        word="none",
    ),
    SiteKey(
        "failure_domain.pattern",
        "domain_pattern",
        Pattern(),
        "Instead of a size: nodes whose names have the same text in the group fail together.",
        word="none",
    ),
    SiteKey(
        "launch.srun_options",
        "srun_options",
        _OPTIONS,
        "Further options of srun for every step of the launcher.",
    ),
    SiteKey(
        "launch.cpu_bind",
        "cpu_bind",
        Text(),
        "srun --cpu-bind of agents. Ranks are the agent's children: with anything but none all "
        "ranks of a node share what its one task is bound to.",
    ),
    SiteKey(
        "launch.container",
        "container",
        Words(),
        "Put before every command that a step runs, word by word, such as [shifter, "
        "--image=NAME]. There are no standby launchers then.",
    ),
    SiteKey(
        "launch.container_python",
        "container_python",
        FilePath(),
        "The Python in the container; none: it has the same path as outside.",
        word="none",
    ),
    SiteKey(
        "mpi.kinds",
        "mpi_kinds",
        Words(),
        "What --mpi may name here, of those that srun --mpi=list shows; empty: anything.",
    ),
    SiteKey(
        "mpi.env",
        "mpi_env",
        Variables(),
        "Variables for the processes that send replicas by MPI.",
    ),
    SiteKey(
        "network.request",
        "network_request",
        Text(),
        "sbatch --network and srun --network, unless SLURM_NETWORK is set in the job. Where each "
        "step gets a virtual network of its own (Slingshot), job_vni,single_node_vni gives all "
        "agents' steps a common one, which their ranks then use.",
        word="none",
    ),
    SiteKey(
        "network.interfaces",
        "interfaces",
        Patterns(),
        "Interfaces for traffic between nodes, the best first; those of the first pattern that a "
        "node has are used. The launcher listens at the address of such a one, so agents come by "
        "it and nodes are known by its network; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name it "
        "to the ranks unless they are set. Empty: what the hosts' names lead to.",
    ),
    SiteKey(
        "network.host_suffix",
        "host_suffix",
        Text(),
        "Put behind the name of the launcher's node to get the name by which other nodes reach it "
        "on the fast network.",
        word="none",
    ),
    SiteKey(
        "env",
        "env",
        Variables(),
        "Variables for ranks; one that is set where the job is submitted wins. A later file "
        "replaces single variables.",
    ),
    SiteKey(
        "limits.nodes",
        "most_nodes",
        Count(1),
        "The most nodes of a job, spares included; a larger one is not submitted.",
        word="unlimited",
    ),
    SiteKey(
        "limits.time",
        "most_time_s",
        Duration(60.0, _MONTHS_S),
        "The longest time limit of a job.",
        word="unlimited",
    ),
    SiteKey(
        "limits.srun",
        "most_srun",
        Count(1),
        "How many srun may run at once. One runs for each node with an agent: a job that needs "
        "more is not submitted, and told of in its log.",
        word="unlimited",
    ),
)

BY_NAME: Mapping[str, SiteKey] = {key.name: key for key in KEYS}
NAMES = Names(BY_NAME)
#: Of a partition's or QOS's section.
OVERRIDABLE = Names({key.name for key in KEYS if key.overridden})
