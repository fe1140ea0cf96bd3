"""Who leads: the three parties as they are, and between them a network that cuts off, holds up and
heals as a seed says. Never do two launchers act, and who acts knows all that anybody was told.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from deadpool_launch.succession import rules

NODES = ("n1", "n2", "n3", "n4", "n5")


# ---------------------------------------------------------------- in small


def test_takeover_needs_more_than_half_of_the_voters() -> None:
    keeper = rules.Candidacy(2, (1, 7), frozenset({"n1", "n2", "n3", "n4"}))
    assert keeper.came("n1", 1, (1, 5))
    assert keeper.came("n2", 1, (1, 7))
    assert keeper.came("n9", 1, (1, 7)), "it may wait, and does not count"
    assert not keeper.claim()
    assert keeper.came("n3", 1, (1, 7))
    term = keeper.claim()
    assert term == 100_002
    assert not keeper.granted("n1", term)
    assert not keeper.granted("n9", term)
    assert not keeper.granted("n2", term - 1), "an answer to another claim"
    assert not keeper.granted("n2", term)
    assert keeper.granted("n3", term)
    assert not keeper.granted("n3", term), "it has won already"


def test_copy_that_lacks_what_an_agent_was_told_gets_nothing_from_it() -> None:
    agent = rules.Allegiance()
    assert agent.obeys(1)
    agent.saw((1, 8))
    assert not rules.Candidacy(1, (1, 7)).came("n1", 1, agent.seen)
    assert not agent.grants(100_001, (1, 7))
    assert agent.grants(100_001, (1, 8))
    assert not agent.grants(100_001, (1, 9)), "a term is granted once"
    assert not agent.obeys(2), "the old one, started again"
    assert agent.obeys(100_001)


def test_terms_of_two_keepers_and_of_a_restart_are_never_the_same() -> None:
    assert len({rules.next_term(seen, node) for seen in (1, 2, 3) for node in range(4)}) == 4
    assert rules.next_term(100_003, 1) == 200_001
    assert rules.next_term(100_004 - 1, 0) > 100_003


@pytest.mark.parametrize(
    ("voters", "possible"),
    [
        (("n1", "host"), False),
        (("n1",), False),
        (("n1", "n2"), True),
        (("n1", "n2", "host"), True),
        (("n1", "n2", "n3", "host"), True),
    ],
)
def test_two_nodes_besides_the_launchers_are_needed(
    voters: tuple[str, ...], possible: bool
) -> None:
    assert rules.can_be_followed(voters, "host") is possible


def test_keepers_stay_where_they_are_and_never_are_the_host() -> None:
    chosen = rules.choose_keepers((), ("s1", "host", "n1", "n2"), "host", 2)
    assert chosen == ("s1", "n1")
    assert rules.choose_keepers(chosen, ("host", "n2", "n1"), "host", 2) == ("n1", "n2")
    assert rules.choose_keepers(chosen, ("host", "n2", "n1"), "host", 0) == ()


# ---------------------------------------------------------------- in a bad network


@dataclass
class Launcher:
    """It has a log of numbers, and gives each to the agents that obey it."""

    host: str
    term: int
    log: list[int]
    lead: rules.Leadership
    index: int = 0
    linked: set[str] = field(default_factory=set)
    keepers: dict[str, int] = field(default_factory=dict)
    alive: bool = True


class World:
    """Five nodes, of which the last carries the first launcher."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.agents = {node: rules.Allegiance() for node in NODES}
        self.told: dict[str, list[int]] = {node: [] for node in NODES}
        self.obeys: dict[str, Launcher | None] = dict.fromkeys(NODES)
        self.copies = {
            node: (rules.Candidacy(slot), list[int]()) for slot, node in enumerate(NODES)
        }
        self.dead: set[str] = set()
        self.cut: set[frozenset[str]] = set()
        first = Launcher("n5", 1, [], rules.Leadership(frozenset(NODES)))
        self.launchers = [first]
        for node in NODES:
            self.join(node, first)
        #: What no term fences off, with the log that it was done upon.
        self.acted: list[tuple[int, list[int]]] = []
        self.takeovers = 0
        self.events = 0

    def reach(self, one: str, other: str) -> bool:
        alive = one not in self.dead and other not in self.dead
        return alive and (one == other or frozenset((one, other)) not in self.cut)

    def join(self, node: str, launcher: Launcher) -> None:
        if self.obeys[node] is not None or not launcher.alive:
            return
        if self.reach(node, launcher.host) and self.agents[node].obeys(launcher.term):
            self.obeys[node] = launcher
            launcher.linked.add(node)

    def lose(self, node: str) -> None:
        if (launcher := self.obeys[node]) is not None:
            launcher.linked.discard(node)
            launcher.keepers.pop(node, None)
            self.obeys[node] = None

    def part(self, launcher: Launcher, fresh: str = "") -> None:
        """A new part of the log for those that keep it."""
        launcher.index += 1
        if fresh:
            launcher.keepers[fresh] = 0
        self.copy(launcher)

    def copy(self, launcher: Launcher) -> bool:
        """Whether all that are linked have all parts. What is cut off may get them later."""
        for node in launcher.keepers:
            if node in launcher.linked and self.reach(node, launcher.host):
                candidacy, copy = self.copies[node]
                candidacy.mark = (launcher.term, launcher.index)
                candidacy.voters = launcher.lead.voters
                copy[:] = launcher.log
                launcher.keepers[node] = launcher.index
        return all(
            index == launcher.index
            for node, index in launcher.keepers.items()
            if node in launcher.linked
        )

    def work(self, launcher: Launcher) -> None:
        """One event: into the log, to the copies, then to the agents."""
        if not self.copy(launcher):
            return
        others = sorted(launcher.linked - {launcher.host, *launcher.keepers})
        if len(launcher.keepers) < 2 and others:
            self.part(launcher, fresh=self.dice.choice(others))
        self.events += 1
        launcher.log.append(self.events)
        self.part(launcher)
        if self.copy(launcher):
            for node in sorted(launcher.linked):
                if self.reach(node, launcher.host) and self.dice.random() < 0.7:
                    assert self.agents[node].obeys(launcher.term)
                    self.agents[node].saw((launcher.term, launcher.index))
                    self.told[node].append(self.events)

    def act(self, launcher: Launcher) -> None:
        if not self.copy(launcher):
            return
        number = launcher.lead.ask(launcher.linked)
        for node in sorted(launcher.linked):
            if self.reach(node, launcher.host) and self.dice.random() < 0.9:
                self.agents[node].saw((launcher.term, launcher.index))
                launcher.lead.answered(node, number)
        if launcher.lead.leads:
            newest = max(one.term for one in self.launchers)
            assert launcher.term == newest, "a launcher acts after another took over"
            if self.acted:
                before = self.acted[-1][1]
                assert launcher.log[: len(before)] == before, "it does not know what was done"
            self.acted.append((launcher.term, list(launcher.log)))
            if launcher.lead.count_anew():
                self.part(launcher)

    def seek(self, node: str) -> None:
        """An agent without a launcher goes to one, or to keepers."""
        for launcher in self.launchers:
            self.join(node, launcher)
        if self.obeys[node] is not None:
            return
        for keeper, (candidacy, _) in self.copies.items():
            if self.obeys[keeper] is None and self.reach(node, keeper) and candidacy.mark[0]:
                agent = self.agents[node]
                if candidacy.came(node, agent.term, agent.seen) and self.dice.random() < 0.8:
                    return

    def claim(self, keeper: str) -> None:
        candidacy, copy = self.copies[keeper]
        if self.obeys[keeper] is not None or keeper in self.dead:
            candidacy.found()
            return
        term = candidacy.claim()
        if not term:
            return
        for node in sorted(candidacy._waiting):
            free = self.obeys[node] is None and self.reach(node, keeper)
            if free and self.dice.random() < 0.9 and self.agents[node].grants(term, candidacy.mark):
                assert set(self.told[node]) <= set(copy), "it was told what the copy lacks"
                if candidacy.granted(node, term):
                    lead = rules.Leadership(candidacy.voters)
                    self.launchers.append(Launcher(keeper, term, list(copy), lead))
                    self.takeovers += 1
                    for other in NODES:
                        self.join(other, self.launchers[-1])

    def step(self) -> None:
        node = self.dice.choice(NODES)
        match self.dice.choices(range(6), (1, 6, 4, 1, 4, 3))[0]:
            case 0:
                self.lose(node)  # silent for too long, for whatever reason
            case 1:
                if self.obeys[node] is None and node not in self.dead:
                    self.seek(node)
            case 2:
                self.claim(node)
            case 3 if self.dice.random() < 0.3:
                host = self.launchers[-1].host
                for other in set(NODES) - {host}:
                    self.cut |= {frozenset((host, other))}
                    if self.dice.random() < 0.8:
                        self.lose(other)
            case 3 if self.dice.random() < 0.5:
                self.cut.clear()
            case 3:
                pair = frozenset(self.dice.sample(NODES, 2))
                self.cut ^= {pair}
                if self.dice.random() < 0.1 and len(self.dead) < 2:
                    self.dead.add(node)
                    self.lose(node)
                    for launcher in self.launchers:
                        if launcher.host == node:
                            launcher.alive = False
                            for linked in tuple(launcher.linked):
                                self.lose(linked)
            case 4:
                for launcher in self.some_launcher():
                    self.work(launcher)
            case _:
                for launcher in self.some_launcher():
                    self.act(launcher)

    def some_launcher(self) -> list[Launcher]:
        alive = [one for one in self.launchers if one.alive]
        return [self.dice.choice(alive)] if alive else []


def test_never_do_two_launchers_act_and_none_forgets_what_was_done() -> None:
    takeovers = acts_after = 0
    for seed in range(300):
        world = World(seed)
        for _ in range(150):
            try:
                world.step()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from error
        takeovers += world.takeovers
        acts_after += sum(term > 1 for term, _ in world.acted)
    assert takeovers > 100
    assert acts_after > 100
