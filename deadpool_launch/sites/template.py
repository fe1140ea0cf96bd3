"""The site file that explains every key: ``python -m deadpool_launch.sites.template`` prints it."""

from __future__ import annotations

import textwrap

from deadpool_launch.sites.kinds import Words
from deadpool_launch.sites.schema import KEYS, SiteKey

_WIDTH = 100
_HEAD = """\
# Every key of a site file, with its default. Copy this to ~/.config/deadpool/sites/NAME.yaml (for
# yourself) or /etc/deadpool/sites/NAME.yaml (for everybody), and keep what differs.
#
# Files of the same name are levels of one site: what comes with DEADPOOL, then /etc, then yours. A
# later one wins key by key; of variables, one by one. deadpool sites NAME shows the outcome.
#
# A site is chosen by --site NAME, else by the variable DEADPOOL_SITE, else by its match keys. That
# of a cluster that none fits is generic.
#
# A value that is not known yet is written with how to find it out, and counts as the default:
#   limits.nodes: !unknown "sinfo -o '%P %s'"
# Keys may be written with dots or as sections. Durations are as in policy.yaml: 90s, 5m, 2h.
"""
_TAIL = """\
# The same keys for one partition or quality of service, from submit.account on:
# partitions:
#   debug:
#     limits: {nodes: 8, time: 30m}
# qos:
#   premium:
#     limits.time: 48h
"""


def template() -> str:
    """The whole file; as it is, it says nothing."""
    return "\n".join([_HEAD, *(_entry(key) for key in KEYS), _TAIL])


def _entry(key: SiteKey) -> str:
    alone = f"{key.doc} Takes {key.wanted}."
    lines = textwrap.wrap(alone, _WIDTH, initial_indent="# ", subsequent_indent="# ")
    return "\n".join([*lines, f"# {key.name}: {_default(key)}", ""])


def _default(key: SiteKey) -> str:
    if key.default in ((), "") and not key.word:
        return "[]" if isinstance(key.kind, Words) else "{}" if key.default == () else ""
    return key.show(key.default)


def main() -> None:
    """Print it."""
    print(template(), end="")


if __name__ == "__main__":
    main()
