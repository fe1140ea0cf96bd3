"""What nodes are said to be to the job, whatever happens to them."""

from __future__ import annotations

from operator import is_

from workbench import Bench, bench

from deadpool_launch.controller.events import Action, Event
from deadpool_launch.controller.roles import NodeRole, Part, changed, parts, standing, watched


class Looked(Bench):
    """Sees to it that no node's part changes without what is watched for that."""

    def feed(self, event: Event) -> list[Action]:
        before = self.state
        actions = super().feed(event)
        if all(map(is_, watched(before), watched(self.state))):
            assert parts(before) == parts(self.state)
        return actions


def _looked(**changes: object) -> Looked:
    return Looked(bench(**changes).config)


def _roles(job: Bench) -> dict[str, str]:
    return {name: str(part.role) for name, part in parts(job.state).items()}


def test_spare_becomes_active_where_a_node_is_lost() -> None:
    job = _looked(spares=("n3", "n4"))
    job.train_to(20)
    assert _roles(job) == {"n1": "active", "n2": "active", "n3": "spare", "n4": "spare"}
    before = parts(job.state)
    job.agent_lost("n2")
    job.tick()
    now = parts(job.state)
    assert changed(before, now) == {
        "n2": Part(NodeRole.LOST, job.state.nodes["n2"].gone),
        "n3": Part(NodeRole.ACTIVE),
    }
    assert "lost" in now["n2"].why


def test_drained_node_is_no_lost_one_even_when_its_agent_has_left() -> None:
    job = _looked(spares=("n3", "n4"))
    job.train_to(20)
    job.at_the_end_of(20, "n2")
    assert _roles(job)["n2"] == "drained"
    job.ranks_up([2, 3])
    job.parked([2, 3])
    job.inventory()
    job.rebuilt(job.everyone)
    job.restored(job.everyone)
    job.protected(job.everyone, 20)
    for step in range(21, 26):
        job.steps_done(job.everyone, step)
    assert job.state.nodes["n2"].gone == "was drained"
    assert _roles(job) == {"n1": "active", "n2": "drained", "n3": "active", "n4": "spare"}


def test_node_whose_ranks_are_set_aside_is_said_to_wait_for_them() -> None:
    job = _looked(active=("n1", "n2", "n3"), spares=(), shrink=True, nproc_per_node=1)
    job.train_to(20)
    job.agent_lost("n2")
    job.tick()
    assert _roles(job) == {"n1": "active", "n2": "lost", "n3": "active"}
    assert standing(job.state, 3).ranks == 2


def test_standing_is_that_of_the_slowest_rank() -> None:
    job = _looked()
    job.train_to(20)
    job.steps_done([0], 21)
    told = standing(job.state, 1)
    assert (told.phase, told.step, told.bare, told.incident) == ("training", 20, False, None)
    job.agent_lost("n2")
    told = standing(job.state, 1)
    assert (told.phase, told.bare, told.incident) == ("gathering", True, 1)


def test_spares_that_are_lost_or_drained_are_spares_no_more() -> None:
    job = _looked(spares=("n3", "n4", "n5"))
    job.train_to(20)
    job.agent_lost("n3")
    job.drain("n4")
    roles = {"n1": "active", "n2": "active", "n3": "lost", "n4": "drained", "n5": "spare"}
    assert _roles(job) == roles
