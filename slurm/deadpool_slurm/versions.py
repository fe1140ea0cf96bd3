"""What is known to be wrong with Slurm's versions, for jobs that must outlive a node. Pure.

The defects are those of ``--no-kill`` jobs named in Slurm's own change log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Version = tuple[int, int, int]

OLDEST: Version = (22, 5, 0)
_VERSION = re.compile(r"\b(\d\d)\.(\d\d)(?:\.(\d+))?")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to know about this Slurm; ``refuse``: it could not keep the job alive."""

    severity: Literal["refuse", "warn", "note"]
    text: str
    remedy: str = ""
    #: What it is about.
    subject: Literal["Slurm version", "stepmgr", "KillOnBadExit"] = "Slurm version"


@dataclass(frozen=True, slots=True)
class _Defect:
    first: Version
    fixed: Version
    text: str


_DEFECTS = (
    _Defect(
        OLDEST,
        (23, 2, 3),
        "later steps may not get all that is left",
    ),
    _Defect(
        OLDEST,
        (23, 2, 6),
        "the job's extern step is killed on every node",
    ),
    _Defect(
        OLDEST,
        (23, 2, 7),
        "running steps keep wrong lists of their nodes",
    ),
    _Defect(
        (23, 11, 0),
        (23, 11, 1),
        "running steps keep wrong lists of their nodes",
    ),
)


def parse_version(text: str) -> Version | None:
    """The version in text such as ``slurm-wlm 22.05.8`` or ``23.11.0-0rc1``, if there is one."""
    match = _VERSION.search(text)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def show(version: Version) -> str:
    """``22.05.8``, the way Slurm writes it."""
    return f"{version[0]}.{version[1]:02d}.{version[2]}"


def _defects(version: Version) -> list[Finding]:
    """All that is known to be wrong with the version, as one finding."""
    present = [defect for defect in _DEFECTS if defect.first <= version < defect.fixed]
    if not present:
        return []
    known = "1 known defect" if len(present) == 1 else f"{len(present)} known defects"
    fixed = "fixed" if len(present) == 1 else "all fixed"
    by = show(max(defect.fixed for defect in present))
    what = ", ".join(defect.text for defect in present)
    text = f"Slurm {show(version)} has {known} around lost nodes, {fixed} by {by}: {what}"
    return [Finding("warn", text)]


def findings(version: Version | None, config: Mapping[str, str]) -> list[Finding]:
    """What a version and ``scontrol show config`` mean for a job that must outlive a node."""
    found: list[Finding] = []
    if version is None:
        found.append(Finding("warn", "Slurm does not say which version it is"))
    elif version < OLDEST:
        found.append(
            Finding(
                "refuse",
                f"Slurm {show(version)} is too old: "
                "steps cannot share memory and GPUs before 22.05",
                "use a cluster with Slurm 23.02.7 or later",
            )
        )
    else:
        found += _defects(version)
    if "enable_stepmgr" in config.get("SlurmctldParameters", ""):
        found.append(
            Finding(
                "refuse",
                "this cluster makes steps through the batch host "
                "(SlurmctldParameters=enable_stepmgr), so none could be started once it is lost",
                "ask the site for a partition or cluster without stepmgr",
                subject="stepmgr",
            )
        )
    if config.get("KillOnBadExit", "0") not in ("0", "No", "no"):
        found.append(
            Finding(
                "note",
                "this cluster kills a step when one of its tasks fails (KillOnBadExit=1); "
                "deadpool-launch turns that off for its own steps",
                subject="KillOnBadExit",
            )
        )
    return found
