"""Which launcher leads the job. Pure; three parties, each with a small state of its own.

Two or more nodes keep a copy of the launcher's log (*keepers*). The agents decide: each obeys one
launcher, that of the highest *term* it has heard of. The *voters* are the agents that were there at
the newest confirmation; they stand in the log, and the launcher's own node is one of them.

- A keeper may take over once more than half of the voters have lost the launcher, came to it, and
  granted its term. An agent grants a term once, gives its obedience with it, and grants it only to
  a copy of the log that has everything which that agent was told to do (``Mark``).
- A launcher may do what no term can fence off (end a step, start one, commit a checkpoint, give
  the verdict) only after at least half of the voters have answered a question that it put after
  the event it acts on.

So there is never a second one. Let C be the voters that answered, at least half, each of which has
then seen a mark as new as the question's. A keeper with an older copy gets no grant in C from then
on, and at most half of the voters are left to it. One with a copy as new has the same events and
the same voters. And if more than half had granted a newer term before the question, fewer than half
could have answered it. (A copy that was cut off at the question, and is taken over from before any
agent has heard more, lacks what was decided right after it. What the launcher did then shows to the
next one as a node that is lost.)

With two voters one of which is the launcher's node no keeper can have more than half: there is no
succession then, and the launcher asks nobody.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

#: Place in all copies of the log: the term of the launcher that wrote it, and the number of the
#: part in that term.
Mark = tuple[int, int]
#: More nodes than a job has. Terms of takeovers are unlike all others: a launcher that is started
#: again on its host counts up by one.
_TERMS_A_TAKEOVER = 100_000


def next_term(seen: int, node_index: int) -> int:
    """A term for a takeover: above ``seen``, and no other node's."""
    return (seen // _TERMS_A_TAKEOVER + 1) * _TERMS_A_TAKEOVER + node_index


def can_be_followed(voters: Collection[str], host: str | None) -> bool:
    """Whether a keeper could take over if the launcher's host died, and the host's agent with
    it.
    """
    others = len(set(voters) - {host})
    return others >= 2 and 2 * others > len(voters)


def choose_keepers(
    now: Sequence[str], fit: Sequence[str], host: str | None, wanted: int
) -> tuple[str, ...]:
    """The nodes that keep the log: those that do already, then others of ``fit``, in that order;
    never the launcher's host.
    """
    fit = [node for node in fit if node != host]
    kept = [node for node in now if node in fit][:wanted]
    return (*kept, *[node for node in fit if node not in kept][: wanted - len(kept)])


@dataclass(slots=True)
class Allegiance:
    """An agent's side: whom it obeys, and how far the log was that its orders came from."""

    #: The highest term that it has obeyed or granted; 0: none.
    term: int = 0
    seen: Mark = (0, 0)

    def obeys(self, term: int) -> bool:
        """Whether a launcher of this term is to be obeyed; it is from then on."""
        if term < self.term:
            return False
        self.term = term
        self.saw((term, 0))
        return True

    def saw(self, mark: Mark) -> None:
        """Something came that the launcher decided at this place of its log."""
        self.seen = max(self.seen, mark)

    def grants(self, term: int, mark: Mark) -> bool:
        """Whether a keeper whose copy goes to ``mark`` gets this term; no older launcher is obeyed
        any more then.
        """
        if term <= self.term or mark < self.seen:
            return False
        self.term = term
        return True


@dataclass(slots=True)
class Candidacy:
    """A keeper's side: who came to it, and whether it is the next launcher."""

    node_index: int
    mark: Mark = (0, 0)
    voters: frozenset[str] = frozenset()
    #: The term that it claims, 0 for none.
    claimed: int = 0
    won: bool = False
    #: Highest term of an agent that came.
    _highest: int = 0
    _waiting: set[str] = field(default_factory=set)
    _granted: set[str] = field(default_factory=set)

    def came(self, node: str, term: int, seen: Mark) -> bool:
        """An agent without a launcher is here; whether it is of use to wait."""
        if seen > self.mark:
            return False
        self._highest = max(self._highest, term)
        self._waiting.add(node)
        return True

    def left(self, node: str) -> None:
        """It is here no more. What it granted it has granted."""
        self._waiting.discard(node)

    def found(self) -> None:
        """There is a launcher again."""
        self._waiting.clear()
        self._granted.clear()
        self.claimed, self.won = 0, False

    def claim(self) -> int:
        """The term to ask of all that wait, new each time; 0 while too few do."""
        if self.won or not self._more_than_half(self._waiting):
            return 0
        self.claimed = next_term(max(self._highest, self.mark[0], self.claimed), self.node_index)
        self._granted.clear()
        return self.claimed

    def granted(self, node: str, term: int) -> bool:
        """An agent granted a term; whether this is the next launcher now."""
        if term == self.claimed and not self.won:
            self._granted.add(node)
            self.won = self._more_than_half(self._granted)
            return self.won
        return False

    def _more_than_half(self, nodes: Collection[str]) -> bool:
        return bool(self.voters) and 2 * len(self.voters & set(nodes)) > len(self.voters)


@dataclass(slots=True)
class Leadership:
    """The launcher's side: whether it still leads."""

    voters: frozenset[str] = frozenset()
    _number: int = 0
    _asked: frozenset[str] = frozenset()
    _answered: set[str] = field(default_factory=set)

    def ask(self, linked: Collection[str]) -> int:
        """The number of a new question to these agents."""
        self._number += 1
        self._asked = frozenset(linked)
        self._answered.clear()
        return self._number

    def answered(self, node: str, number: int) -> None:
        """An agent that obeys this launcher answered."""
        if number == self._number:
            self._answered.add(node)

    @property
    def leads(self) -> bool:
        """Whether the newest question was answered by enough."""
        return 2 * len(self.voters & self._answered) >= len(self.voters)

    def count_anew(self) -> bool:
        """After an answer by enough: those that were asked are the voters; whether that is new."""
        if self._asked == self.voters or not self.leads:
            return False
        self.voters = self._asked
        return True
