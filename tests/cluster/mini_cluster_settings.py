"""The configuration files of a mini cluster, as text, and the check that the machine can run one.

Nothing here starts a process; :mod:`mini_cluster` writes the texts to disk.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

HEAD = "head"
_NETWORK = "198.18.0"  # RFC 2544: reserved for tests of network devices, never routed.

#: Program -> Debian package that brings it.
_PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "srun": "slurm-client",
    "scontrol": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
_PROGRAM_PATH = os.pathsep.join(
    [os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin"]
)


class CannotRunHere(RuntimeError):
    """This machine cannot run a mini cluster; the text says what to do about it."""


def check_machine(prefix: Path | None = None) -> None:
    """Raise :class:`CannotRunHere` unless we are root and every program needed is installed.

    ``prefix``: where another Slurm than Debian's is installed.
    """
    missing = {
        package
        for program, package in _PROGRAMS.items()
        if shutil.which(program, path=_search_path(prefix)) is None
    }
    if prefix is not None:
        if not (prefix / "lib" / "slurm" / "auth_munge.so").exists():
            raise CannotRunHere(f"{prefix} has no Slurm that was built with munge.")
    elif not list(Path("/usr/lib").glob("*/slurm-wlm/auth_munge.so")):
        missing.add("slurm-wlm-basic-plugins")
    if missing:
        raise CannotRunHere(
            "The mini cluster needs Debian packages that are not installed: "
            f"{' '.join(sorted(missing))}; run `sudo tools/debian-packages.sh`."
        )
    if os.geteuid() != 0:
        raise CannotRunHere(
            "The mini cluster makes namespaces and network links and so must be started as root, "
            "for example with sudo."
        )


def slurm_variables(prefix: Path | None, root: Path, path: str) -> dict[str, str]:
    """What tells a node's programs to use the Slurm below `prefix`; `path` is their PATH without
    it.
    """
    if prefix is None:
        return {}
    conf = root / "etc" / "slurm" / "slurm.conf"
    return {"PATH": f"{prefix}/bin:{prefix}/sbin:{path}", "SLURM_CONF": str(conf)}


def _search_path(prefix: Path | None) -> str:
    own = [f"{prefix}/bin", f"{prefix}/sbin"] if prefix is not None else []
    return os.pathsep.join([*own, _PROGRAM_PATH])


def address_of(node: str) -> str:
    """The IPv4 address of a node: .1 for the head, .11 for n1, .12 for n2 ..."""
    return f"{_NETWORK}.{1 if node == HEAD else 10 + int(node.removeprefix('n'))}"


def hardware_address_of(node: str) -> str:
    """A fixed Ethernet address, so that a node that comes back is the same one to its peers."""
    return f"02:de:ad:00:00:{int(address_of(node).rsplit('.', 1)[1]):02x}"


def hosts_text(nodes: Sequence[str]) -> str:
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    lines += [f"{address_of(node)} {node}" for node in (HEAD, *nodes)]
    return "\n".join(lines) + "\n"


def slurm_conf_text(
    root: Path,
    nodes: Sequence[str],
    *,
    slurmd_timeout_s: int,
    kill_wait_s: int,
    message_timeout_s: int,
    cpus: int,
    memory_mb: int,
    requeue_wait_s: int,
) -> str:
    """The slurm.conf that every node of the cluster shares."""
    settings = {
        "ClusterName": "mini",
        "SlurmctldHost": f"{HEAD}({address_of(HEAD)})",
        "SlurmUser": "root",
        "AuthType": "auth/munge",
        # Also how long a job that was requeued waits at least.
        "AuthInfo": f"cred_expire={requeue_wait_s}",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SchedulerType": "sched/backfill",
        # By default a submitted job may wait 3 s for others to be scheduled together with it.
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=2,bf_interval=2",
        "MpiDefault": "none",
        "SlurmdParameters": "config_overrides",
        "ReturnToService": 2,
        "JobRequeue": 0,
        "KillOnBadExit": 0,
        "KillWait": kill_wait_s,
        "InactiveLimit": 0,
        "MinJobAge": 36000,
        "SlurmctldTimeout": 30,
        "SlurmdTimeout": slurmd_timeout_s,
        "MessageTimeout": message_timeout_s,
        "StateSaveLocation": root / "state",
        # Of the node alone and gone with its power, as on a node without a disk.
        "SlurmdSpoolDir": "/run/slurmd",
        "SlurmctldPidFile": "/run/slurmctld.pid",
        "SlurmdPidFile": "/run/slurmd.pid",
        "SlurmctldLogFile": root / "logs" / "slurmctld.log",
        "SlurmdLogFile": root / "logs" / "slurmd-%n.log",
        "SlurmctldDebug": "verbose",
        "SlurmdDebug": "verbose",
    }
    lines = [f"{key}={value}" for key, value in settings.items()]
    lines += [
        f"NodeName={node} NodeAddr={address_of(node)} NodeHostname={node} CPUs={cpus} Sockets=1"
        f" CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory={memory_mb} State=UNKNOWN"
        for node in nodes
    ]
    lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
    return "\n".join(lines) + "\n"


def cgroup_conf_text(prefix: Path | None) -> str:
    """Without any use of cgroups; Debian's Slurm cannot be told so, and a later one must be."""
    if prefix is not None:
        return "CgroupPlugin=disabled\n"
    return "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n"
