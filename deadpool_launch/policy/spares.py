"""How many spares: from a share of the nodes, or from how often nodes fail. Pure.

Losses are taken for a Poisson process: nodes fail independently of each other, each with the rate
``1 / MTBF`` whatever its age, and spares like active nodes, since a spare that fails while it waits
is one less as well. With ``n`` nodes held for ``h`` hours the number of losses ``N`` has the mean
``n h / MTBF``, and ``s`` spares suffice with the probability ``P(N <= s)``: the textbook sizing of
spare parts (Barlow and Proschan, Mathematical Theory of Reliability, 1965). Lost nodes are not
taken off ``n``, which errs on the safe side. Nodes that fail together are not foreseen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deadpool_launch.errors import UnsuitableError, UsageError
from deadpool_launch.options import LaunchOptions, SpareBounds
from deadpool_launch.policy.merge import spares_held

#: No job has more; the search for a number ends here.
_MOST_SPARES = 1000
#: So many standard deviations below the mean no number of losses is worth a thought.
_FAR = 12


@dataclass(frozen=True, slots=True)
class Spares:
    """A number of spares, and why it is that, for people."""

    count: int
    remark: str


def enough(mean_losses: float, spares: int) -> float:
    """The probability of at most so many losses, when their mean is ``mean_losses``."""
    if mean_losses <= 0:
        return 1.0
    # By logarithms: for many losses exp(-mean) alone is no longer a number.
    log_mean = math.log(mean_losses)
    first = max(0, int(mean_losses - _FAR * math.sqrt(mean_losses)))
    terms = (
        math.exp(k * log_mean - mean_losses - math.lgamma(k + 1)) for k in range(first, spares + 1)
    )
    return min(1.0, math.fsum(terms))


def share_of(fraction: float, *, active: int | None, total: int | None) -> int:
    """The spares that are this share of all nodes used, rounded up.

    ``active``: nodes that must be active. Without it the spares are taken from the ``total``.
    """
    if active is not None:
        # Smallest s with s >= fraction * (active + s); the margin is for sums that are not exact.
        return math.ceil(fraction * active / (1 - fraction) - 1e-9)
    assert total is not None
    return math.ceil(fraction * total - 1e-9)


def needed(
    node_mtbf_hours: float,
    hours: float,
    probability: float,
    *,
    active: int | None,
    total: int | None,
) -> int | None:
    """The smallest number of spares that suffices with at least this probability.

    ``None`` if there is none: the nodes to take spares from are too few, or each further spare adds
    more losses than it makes up for.
    """
    per_node = hours / node_mtbf_hours
    if active is not None and per_node >= 1:
        return None
    for count in range(_MOST_SPARES if active is not None else total or 0):
        # With active nodes fixed the mean grows with each spare, by less than one.
        mean = ((active + count) if active is not None else (total or 0)) * per_node
        if count >= mean - _FAR * math.sqrt(mean) and enough(mean, count) >= probability:
            return count
    return None


def choose(options: LaunchOptions, *, total: int | None, hours_left: float | None) -> Spares | None:
    """The number that a share or a failure rate comes to; ``None`` if the options name a number.

    ``total``: the nodes that can be used, where they are given. ``hours_left``: until the job's
    time limit, if it has one. Raises ``UsageError`` or ``UnsuitableError``.
    """
    active = options.nodes
    if options.spare_fraction is not None:
        count = share_of(options.spare_fraction, active=active, total=total)
        why = f"spares.fraction {options.spare_fraction:g}"
        chosen = _bounded(count, why, options.spare_bounds)
        if active is not None and chosen.count > _MOST_SPARES:
            raise UsageError(
                f"{why}: makes {count} spares beside {active} active nodes, and {_MOST_SPARES} at "
                "most can be held; name a smaller share"
            )
        return chosen
    if options.node_mtbf_hours is None:
        return None
    hours = options.spare_hours if options.spare_hours is not None else hours_left
    if hours is None:
        raise UsageError(
            "spares.auto: how long the spares must last is not known, as this job has no time "
            "limit; name the hours in spares.auto.hours"
        )
    mtbf, probability = options.node_mtbf_hours, options.spare_probability
    count_or_none = needed(mtbf, hours, probability, active=active, total=total)
    if count_or_none is None:
        nodes = f"{active} active" if active is not None else f"{total}"
        raise UnsuitableError(
            f"spares.auto: {nodes} nodes with an MTBF of {mtbf:g} h cannot last {_shown(hours)} h "
            f"with probability {probability:g}: allocate more nodes, or lower spares.auto.hours or "
            "spares.auto.probability"
        )
    used = (active + count_or_none) if active is not None else (total or 0)
    sure = enough(used * hours / mtbf, count_or_none)
    why = (
        f"spares.auto: {used} nodes with an MTBF of {mtbf:g} h lose at most {count_or_none} within "
        f"{_shown(hours)} h with probability {sure:.4f}"
    )
    return _bounded(count_or_none, why, options.spare_bounds)


def _shown(hours: float) -> str:
    return f"{hours:.0f}" if hours >= 100 else f"{hours:.3g}"


def _bounded(count: int, why: str, bounds: SpareBounds | None) -> Spares:
    least = bounds.least if bounds is not None else None
    most = bounds.most if bounds is not None else None
    kept = max(count, least or 0)
    kept = kept if most is None else min(kept, most)
    held = spares_held(kept)
    if kept == count or bounds is None:
        return Spares(kept, f"{why}: {held}")
    side, limit = ("above", most) if kept < count else ("below", least)
    return Spares(
        kept, f"{why}: {count} is {side} the site's limit of {limit} ({bounds.path}): {held}"
    )
