"""All levels together: what a command line, the environment and the files come to as options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from deadpool_launch.errors import UsageError
from deadpool_launch.options import CHECKPOINTS
from deadpool_launch.policy import files
from deadpool_launch.policy.kinds import Value
from deadpool_launch.policy.merge import Setting, settle


def effective(
    environ: Mapping[str, str],
    named_file: Path | None,
    command_line: Mapping[str, Value],
    *,
    on_slurm: bool,
) -> dict[str, Value]:
    """Arguments of ``LaunchOptions``: every field that a key stands for, and what to tell people.

    ``named_file``: that of ``--policy``. ``command_line``: values by key. Raises ``UsageError``.
    """
    site, user = files.site_file(environ), files.user_file(environ, named_file)
    settled = settle(site, user, command_line, on_slurm=on_slurm)
    fields = settled.fields()
    fields["checkpoint_dir"] = _checkpoint_dir(settled.settings, environ)
    rules = settled.settings["rules"]
    if rules.value is not None and rules.path:
        fields["rules"] = files.fill_in(rules.value, f"{rules.origin}: rules", environ)
    set_by_files = [
        setting
        for setting in settled.settings.values()
        if setting.limited or setting.level in ("site", "user")
    ]
    fields["policy"] = tuple(
        f"{setting.key.name}: {setting.key.show(setting.value)} ({setting.origin})"
        for setting in set_by_files
    )
    paths = dict.fromkeys(setting.path for setting in set_by_files)
    read = (f"settings from {' and '.join(paths)} are in effect",) if paths else ()
    fields["remarks"] = (*read, *settled.remarks)
    return fields


def _checkpoint_dir(settings: Mapping[str, Setting], environ: Mapping[str, str]) -> str | None:
    """The folder for durable checkpoints, if any are to be written.

    A policy may name a folder for those who want checkpoints; one on the command line alone is a
    mistake.
    """
    folder, every = settings["checkpoint.dir"], settings["checkpoint.every"]
    if every.value is None:
        if folder.level == "command line":
            raise UsageError(CHECKPOINTS)
        return None
    if folder.value is None:
        if every.level == "command line":
            raise UsageError(CHECKPOINTS)
        raise UsageError(
            f"{every.origin}: checkpoint.every needs a folder that every node sees: name it in "
            "checkpoint.dir or with --checkpoint-dir"
        )
    if not folder.path:
        return str(folder.value)
    return files.fill_in(folder.value, f"{folder.origin}: checkpoint.dir", environ)
