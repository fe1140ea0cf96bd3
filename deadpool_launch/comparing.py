"""Two runs side by side by their journals: the digests of their final states. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from deadpool_launch.view import RunView

#: Digests of nothing: an empty part, one without schedulers, an empty ``job.state``. Written out,
#: since the runtime that makes them needs torch and the launcher does without.
NOTHING = frozenset(
    {
        "99aa06d3014798d86001c324468d497f",
        "8860515d84491aa5eb378f1e0b4a3efb",
        "82c6b749a4c2e3569464a2fcb480f24a",
    }
)


@dataclass(frozen=True, slots=True)
class PartComparison:
    """One part of the final state (parameters, optimizer, …) over all ranks."""

    part: str
    equal_ranks: tuple[int, ...]
    other_ranks: tuple[int, ...]
    #: No rank of either run has anything in this part.
    empty: bool = False

    @property
    def equal(self) -> bool:
        """Every rank has the same bits in both runs."""
        return not self.other_ranks


def compare_finals(reference: RunView, disturbed: RunView) -> list[PartComparison]:
    """Part by part, on which ranks both runs ended with the same digest.

    A rank or part that only one of the runs reported counts as different. Empty if neither run
    reported any.
    """
    parts: dict[str, None] = {}
    for finals in (reference.finals, disturbed.finals):
        for digests in finals.values():
            parts.update(dict.fromkeys(digests))
    ranks = sorted({*reference.finals, *disturbed.finals})
    rows = []
    for part in parts:
        equal = [
            rank
            for rank in ranks
            if (digest := reference.finals.get(rank, {}).get(part)) is not None
            and digest == disturbed.finals.get(rank, {}).get(part)
        ]
        other = [rank for rank in ranks if rank not in equal]
        seen = {
            finals[rank].get(part)
            for finals in (reference.finals, disturbed.finals)
            for rank in finals
        }
        empty = not other and seen <= NOTHING
        rows.append(PartComparison(part, tuple(equal), tuple(other), empty))
    return rows
