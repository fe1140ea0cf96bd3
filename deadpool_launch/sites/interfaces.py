"""Which of a node's network interfaces carry the traffic between nodes, by a site's patterns."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Mapping, Sequence

import psutil

_PARTS = re.compile(r"(\d+)")


def fitting(names: Iterable[str], patterns: Sequence[str]) -> tuple[str, ...]:
    """The names that the first pattern with any fits, in the order of their numbers."""
    known = list(names)
    for pattern in patterns:
        found = [name for name in known if re.fullmatch(pattern, name)]
        if found:
            return tuple(sorted(found, key=_by_number))
    return ()


def variables(patterns: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """What names this node's interfaces to Gloo, which takes one, and NCCL, unless it is set."""
    found = fitting(_addresses(), patterns)
    if not found:
        return {}
    wanted = {"GLOO_SOCKET_IFNAME": found[0], "NCCL_SOCKET_IFNAME": ",".join(found)}
    return {name: value for name, value in wanted.items() if name not in environ}


def address(patterns: Sequence[str]) -> str | None:
    """This host's address on the first such interface; ``None`` if it has none."""
    addresses = _addresses()
    found = fitting(addresses, patterns)
    return addresses[found[0]] if found else None


def _addresses() -> dict[str, str]:
    """The IPv4 address of each interface that has one."""
    return {
        name: each.address
        for name, its in psutil.net_if_addrs().items()
        for each in its
        if each.family is socket.AF_INET
    }


def _by_number(name: str) -> list[tuple[int, str]]:
    parts = _PARTS.split(name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
