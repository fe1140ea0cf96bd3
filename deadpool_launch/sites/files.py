"""Where site files are, reading them, and finding out which site this is.

A site's name is its file's: ``NAME.yaml`` in the user's folder, in /etc, and in what comes with
DEADPOOL. Files of one name are levels of one site (``merge.py``).
"""

from __future__ import annotations

import contextlib
import importlib.resources
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from deadpool_launch.errors import UsageError
from deadpool_launch.policy.files import home_folder, is_there, text_of
from deadpool_launch.sites.merge import Settled, fits, settle
from deadpool_launch.sites.model import SiteConfig
from deadpool_launch.sites.reading import SiteFile, read_site

ETC = Path("/etc/deadpool/sites")
#: Names the site, instead of ``--site``.
VARIABLE = "DEADPOOL_SITE"
#: The site of a cluster that no file describes.
GENERIC = "generic"
#: Means the site that the machine is, with nodes from Slurm.
ANY_SLURM = "slurm"
#: Explains every key; it is no site.
TEMPLATE = "template"


def folders(environ: Mapping[str, str]) -> list[Path]:
    """Where site files are looked for; what a later folder says wins."""
    shipped = Path(str(importlib.resources.files("deadpool_site_configs")))
    home = home_folder(environ)
    return [shipped, ETC, *([home / "sites"] if home is not None else [])]


def names(environ: Mapping[str, str]) -> list[str]:
    """The names of all sites."""
    found: set[str] = set()
    for folder in folders(environ):
        # Whoever reads a site learns of a folder that cannot be looked into.
        with contextlib.suppress(OSError):
            found |= {path.stem for path in folder.iterdir() if path.suffix == ".yaml"}
    return sorted(found - {TEMPLATE})


def load(
    name: str,
    environ: Mapping[str, str],
    *,
    partition: str | None = None,
    qos: str | None = None,
    named_by: str = "--site",
) -> Settled:
    """The site of that name. Raises ``UsageError``: there is none, or a file of it is wrong."""
    if "/" in name or name not in (known := names(environ)):
        if "/" in name:
            what = "must be the name of a site, not a path"
        else:
            close = get_close_matches(name, [*known, ANY_SLURM], n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            what = f"is no site{hint}; there are {', '.join(known)}"
        where = folders(environ)[-1]
        raise UsageError(f"{named_by} {name}: {what}; {where}/NAME.yaml would be one of yours")
    paths = [folder / f"{name}.yaml" for folder in folders(environ)]
    levels = [_good(path) for path in paths if is_there(path)]
    return settle(name, levels, partition=partition, qos=qos)


def choose(
    asked: str | None,
    environ: Mapping[str, str],
    ask_cluster: Callable[[], str | None],
    *,
    partition: str | None = None,
    qos: str | None = None,
) -> Settled:
    """The site asked for, by ``--site`` or the environment; else the one that this machine is.

    ``ask_cluster``: finds out Slurm's ClusterName; called only if nothing else says what it is.
    """
    named_by = "--site"
    if asked is None and (variable := environ.get(VARIABLE)):
        asked, named_by = variable, VARIABLE
    if asked is not None and asked != ANY_SLURM:
        return load(asked, environ, partition=partition, qos=qos, named_by=named_by)
    known = [load(name, environ).site for name in names(environ)]
    by_variable = (site.name for site in known if fits(site, environ, None))
    cluster = environ.get("SLURM_CLUSTER_NAME")
    name = _of_cluster(known, cluster) or next(by_variable, None)
    if name is None and cluster is None:
        name = _of_cluster(known, ask_cluster())
    return load(name or GENERIC, environ, partition=partition, qos=qos)


def _of_cluster(known: Sequence[SiteConfig], cluster: str | None) -> str | None:
    return next((site.name for site in known if fits(site, {}, cluster)), None)


def _good(path: Path) -> SiteFile:
    file, problems = read_site(text_of(path, what="site file"), str(path))
    if problems:
        more = len(problems) - 1
        rest = f" (and {more} more: deadpool sites --check {path} lists all)" if more else ""
        raise UsageError(f"{problems[0]}{rest}")
    return file
