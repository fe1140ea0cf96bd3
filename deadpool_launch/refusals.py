"""Connections that were refused, told to people without filling the log.

A stranger that tries again and again, or a thousand of them, cost a line and then ever fewer.
"""

from __future__ import annotations

#: Of so many kinds the refusals are counted apart; those of all further kinds together.
_MOST_KINDS = 256


class Refusals:
    """Counts refusals by who came and why."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}

    def text(self, peer: str, reason: str) -> str | None:
        """What to say of one more; None if enough was said: people are told of the first, the
        tenth, the hundredth and so on.
        """
        key = (peer, reason)
        if key not in self._counts and len(self._counts) >= _MOST_KINDS:
            key = ("others", "various reasons")
        count = self._counts[key] = self._counts.get(key, 0) + 1
        if count == 1:
            return f"connection from {key[0]} refused: {key[1]}"
        if set(str(count)[1:]) == {"0"} and str(count)[0] == "1":
            return f"connection from {key[0]} refused {count} times by now: {key[1]}"
        return None
