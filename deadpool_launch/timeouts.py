"""Which time-outs must be shorter than which. Pure.

They are known by their fields in ``LaunchOptions``. Whoever reads options or a policy file has the
names by which people know them.
"""

from __future__ import annotations

from typing import NamedTuple


class InOrder(NamedTuple):
    """Of two time-outs one must be shorter. ``why`` continues a sentence that says so."""

    shorter: str
    longer: str
    why: str = ""

    def holds(self, first_s: float | None, second_s: float | None) -> bool:
        """Whether these are in order. None: there is no such limit, or it follows from others."""
        return first_s is None or second_s is None or first_s < second_s


IN_ORDER = (
    InOrder(
        "heartbeat_timeout_s",
        "collective_timeout_s",
        ", or the hang that a lost node causes is taken for one of its own",
    ),
    InOrder("heartbeat_timeout_s", "confirm_timeout_s"),
    InOrder("confirm_timeout_s", "collective_timeout_s", ", as a step waits for it"),
)
