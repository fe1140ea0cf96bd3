"""Levels of policy to one effective value for each key, with where it came from. Pure.

Later levels win: defaults, the site's file, the user's file, the command line. Then the site's
limits win over all of them, and a person is told where that changed what was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from deadpool_launch.options import SpareBounds
from deadpool_launch.policy.kinds import Value
from deadpool_launch.policy.reading import Limit, PolicyFile, breaks
from deadpool_launch.policy.schema import (
    BY_NAME,
    KEYS,
    OF_THE_SITES_NODES,
    ON_SLURM_ONLY,
    SPARES,
    Key,
)

Level = Literal["default", "site", "user", "command line"]


@dataclass(frozen=True, slots=True)
class Setting:
    """The effective value of one key."""

    key: Key
    value: Value
    level: Level = "default"
    #: File and line; empty and 0 where none said it.
    path: str = ""
    line: int = 0
    #: The site's limit made it what it is.
    limited: bool = False

    @property
    def origin(self) -> str:
        """Where the value came from, for people."""
        if self.limited:
            return f"limit in {self.path}:{self.line}"
        if self.level == "command line":
            return self.key.flag
        return f"{self.path}:{self.line}" if self.path else self.level


@dataclass(frozen=True, slots=True)
class Settled:
    """The outcome: every key's value, and what people should be told."""

    settings: Mapping[str, Setting]
    #: One line for each wish that a limit changed.
    remarks: tuple[str, ...] = ()
    #: What the site allows for spares, for numbers that are computed later.
    spare_bounds: SpareBounds | None = None

    def fields(self) -> dict[str, Value]:
        """Arguments of ``LaunchOptions``."""
        values = {setting.key.field: setting.value for setting in self.settings.values()}
        for field in ("checkpoint_every", "slurm_poll_s", "reserve_s"):
            values[field] = values[field] or 0
        return {**values, "spare_bounds": self.spare_bounds}


def settle(
    site: PolicyFile | None,
    user: PolicyFile | None,
    command_line: Mapping[str, Value],
    *,
    on_slurm: bool,
) -> Settled:
    """The effective policy. ``command_line``: values that were given, by name of the key.

    Away from Slurm, on a machine that is none of the site's nodes, what files say of Slurm's nodes
    has no effect.
    """
    settings = {key.name: Setting(key, key.default) for key in KEYS}
    levels: Sequence[tuple[Level, PolicyFile | None]] = (("site", site), ("user", user))
    for level, file in levels:
        if file is None:
            continue
        left_out: tuple[str, ...] = () if on_slurm else ON_SLURM_ONLY
        if level == "site" and not on_slurm:
            left_out += OF_THE_SITES_NODES
        new = {
            name: Setting(BY_NAME[name], given.value, level, file.path, given.line)
            for name, given in file.values.items()
            if name not in left_out
        }
        _put(settings, new)
    _put(
        settings,
        {
            name: Setting(BY_NAME[name], value, "command line")
            for name, value in command_line.items()
        },
    )
    return _limited(settings, site, on_slurm) if site is not None else Settled(settings)


def _put(settings: dict[str, Setting], new: Mapping[str, Setting]) -> None:
    """Let one level win; one way to say how many spares there are undoes the others."""
    ways = {setting.key.way for setting in new.values()} - {""}
    if ways:
        for name, setting in settings.items():
            if setting.key.way and setting.key.way not in ways:
                settings[name] = Setting(setting.key, setting.key.default)
    settings.update(new)


def _limited(settings: dict[str, Setting], site: PolicyFile, on_slurm: bool) -> Settled:
    remarks = []
    for name, limit in site.limits.items():
        if not on_slurm and name in (*OF_THE_SITES_NODES, *ON_SLURM_ONLY):
            continue
        setting = settings[name]
        why = breaks(setting.key, setting.value, limit)
        if not why:
            continue
        value = _nearest(setting, limit)
        undone = _undone(settings, setting.key) if limit.fixed is not None else None
        if undone is not None:
            fixed = setting.key.show(value)
            remarks.append(
                f"{_who(undone)} has no effect: {name} is fixed at {fixed} ({site.path})"
            )
        elif setting.level in ("user", "command line"):
            remarks.append(_remark(setting, why, value, site.path))
        changed = replace(setting, value=value, path=site.path, line=limit.line, limited=True)
        if limit.fixed is not None:
            _put(settings, {name: changed})
        else:
            settings[name] = changed
    return Settled(settings, tuple(remarks), _spare_bounds(site))


def _nearest(setting: Setting, limit: Limit) -> Value:
    if limit.fixed is not None:
        return limit.fixed.value
    if limit.most is not None and (setting.value is None or setting.value > limit.most):
        return limit.most
    return limit.least


def _remark(setting: Setting, why: str, value: Value, path: str) -> str:
    key = setting.key
    outcome = spares_held(value) if key.name == SPARES else f"{key.show(value)} is used"
    return f"{_who(setting)} {why} ({path}): {outcome}"


def _who(setting: Setting) -> str:
    """The wish, as the one who wished it wrote it."""
    if setting.level == "command line":
        return setting.key.flag
    return f"{setting.origin}: {setting.key.name}"


def _undone(settings: Mapping[str, Setting], key: Key) -> Setting | None:
    """What a person said about spares in another way than the one that a site fixes."""
    for setting in settings.values():
        asked = setting.level in ("user", "command line")
        if key.way and asked and setting.key.way not in ("", key.way):
            return setting
    return None


def spares_held(count: int) -> str:
    """``4 are held``."""
    return "1 is held" if count == 1 else f"{count} are held"


def _spare_bounds(site: PolicyFile) -> SpareBounds | None:
    limit = site.limits.get(SPARES)
    if limit is None:
        return None
    if limit.fixed is not None:
        return SpareBounds(least=limit.fixed.value, most=limit.fixed.value, path=site.path)
    return SpareBounds(least=limit.least, most=limit.most, path=site.path)
