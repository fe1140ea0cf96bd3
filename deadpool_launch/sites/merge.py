"""Levels of site files to one site, with where each value came from; and which site it is. Pure.

Later levels win: defaults, the file that comes with DEADPOOL, that in /etc, the user's, and of each
file its section for the partition and then that for the QOS. The job's partition and QOS win over
all files even so: a file's section says what the file says for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deadpool_launch.policy.kinds import Value
from deadpool_launch.sites.kinds import Variables
from deadpool_launch.sites.model import SiteConfig
from deadpool_launch.sites.reading import Given, SiteFile
from deadpool_launch.sites.schema import BY_NAME, KEYS, SiteKey


@dataclass(frozen=True, slots=True)
class Setting:
    """The effective value of one key. ``how``: it is not known, and how to find it out."""

    key: SiteKey
    value: Value
    path: str = ""
    line: int = 0
    section: str = ""
    how: str = ""

    @property
    def origin(self) -> str:
        """Where the value came from, for people."""
        if not self.path:
            return "default"
        return f"{self.path}:{self.line}" + (f" ({self.section})" if self.section else "")

    @property
    def text(self) -> str:
        """The value, for people."""
        return f"unknown: {self.how}" if self.how else self.key.show(self.value)


@dataclass(frozen=True, slots=True)
class Settled:
    """The outcome."""

    site: SiteConfig
    settings: Mapping[str, Setting]

    def origin(self, name: str) -> str:
        """Key and place, as errors name it."""
        return f"{name}, {self.settings[name].origin}"


def settle(
    name: str,
    levels: Sequence[SiteFile],
    *,
    partition: str | None = None,
    qos: str | None = None,
) -> Settled:
    """The site that these files describe, for jobs of this partition and QOS.

    Without a name for either the site's own default counts.
    """
    settings = {key.name: Setting(key, key.default) for key in KEYS}
    for file in levels:
        _put(settings, file, file.values, "")
    chosen = {
        "partitions": partition or settings["submit.partition"].value,
        "qos": qos or settings["submit.qos"].value,
    }
    for file in levels:
        for section, which in chosen.items():
            overrides = file.overrides.get((section, which or ""), {})
            _put(settings, file, overrides, f"{section}.{which}")
    fields = {setting.key.field: setting.value for setting in settings.values()}
    return Settled(SiteConfig(name=name, **fields), settings)


def _put(
    settings: dict[str, Setting], file: SiteFile, values: Mapping[str, Given], section: str
) -> None:
    for name, given in values.items():
        key, value = BY_NAME[name], given.value
        if isinstance(key.kind, Variables) and not given.how:
            value = tuple({**dict(settings[name].value), **dict(value)}.items())
        settings[name] = Setting(key, value, file.path, given.line, section, given.how)


def fits(site: SiteConfig, environ: Mapping[str, str], cluster: str | None) -> bool:
    """Whether this is the site, by Slurm's ClusterName or the environment."""
    if cluster is not None and cluster in site.clusters:
        return True
    return any(environ.get(name) == value for name, value in site.environment)
