"""Which replicas a job keeps when nodes are short, and which it takes back in."""

from __future__ import annotations

from workbench import Bench, bench, of_type

from deadpool_launch.classify.rules import all_rules
from deadpool_launch.controller.events import (
    FenceNode,
    IncidentClosed,
    IncidentMark,
    KillRanks,
    Say,
    StartRanks,
)
from deadpool_launch.controller.node import Cause
from deadpool_launch.controller.rank import Rank
from deadpool_launch.controller.shrinking import fit, replicas_in
from deadpool_runtime import protocol

#: Two ranks a replica, each on a node of its own.
PAIRS = ("n1", "n2", "n3", "n4")


class Pairs(Bench):
    """Replicas of two ranks, as ``fully_shard`` over a mesh of two rows has them."""

    def attaching(self, rank: int) -> protocol.Attached:
        sizes = [protocol.SegmentSize(ranks, 1 << 20) for ranks in self.segments(rank)]
        first = rank - rank % 2
        return protocol.Attached("hsdp", sizes, 1000, 0, [first, first + 1])

    def segments(self, rank: int) -> list[tuple[int, ...]]:
        return [tuple(self.everyone[rank % 2 :: 2])]


def pairs(nodes: tuple[str, ...] = PAIRS, **changes: object) -> Pairs:
    config = bench(active=nodes, spares=(), nproc_per_node=1, shrink=True, **changes).config
    job = Pairs(config)
    job.train_to(20)
    return job


def restore(job: Bench, ranks: list[int], new: tuple[int, ...] = ()) -> None:
    """From parking until the first step is complete on these ranks; ``new`` ones come up before."""
    assert job.state.incident is not None
    job.parked(rank for rank in ranks if rank not in new)
    job.ranks_up(new)
    job.parked(new)
    job.inventory()
    job.rebuilt(ranks)
    step = job.state.incident.step
    assert step is not None
    job.all_said(ranks, protocol.Restored(job.state.epoch, step, []))
    job.steps_done(ranks, step + 1)


def test_ranks_that_share_a_rank_are_one_replica() -> None:
    ranks = [Rank(0, replica=(0, 2)), Rank(1, replica=(1,)), Rank(2, replica=(0, 2))]
    assert replicas_in(ranks) == [(0, 2), (1,)]


def test_a_replica_is_set_aside_whole_and_its_node_serves_the_others() -> None:
    job = pairs()
    job.agent_lost("n1")
    actions = job.tick()
    assert [(kill.node, kill.ranks) for kill in of_type(KillRanks, actions)] == [("n2", (1,))]
    assert job.state.aside() == (0, 1)
    job.exited(1, signal=9)
    restore(job, [2, 3])
    assert job.state.incident is None
    job.agent_lost("n3")
    started = of_type(StartRanks, job.tick())
    assert [(each.node, each.ranks) for each in started] == [("n2", (2,))]
    assert job.state.seats == ("n1", "n3", "n2", "n4")
    restore(job, [2, 3], new=(2,))
    verdicts = [closed.verdict for closed in of_type(IncidentClosed, job.trace)]
    assert verdicts == ["shrunk", "continued"]


def test_two_broken_replicas_make_one_whole_one_again() -> None:
    job = pairs(("n1", "n2", "n3", "n4", "n5", "n6"))
    job.agent_lost("n1")
    job.agent_lost("n3")
    job.tick()
    assert job.state.aside() == (0, 1, 2, 3)
    job.exited(1, signal=9)
    job.exited(3, signal=9)
    restore(job, [4, 5])
    assert job.state.aside() == (2, 3)
    assert job.state.incident is not None
    assert job.state.incident.regained == (0, 1)
    restore(job, [0, 1, 4, 5], new=(0, 1))
    assert of_type(IncidentClosed, job.trace)[-1].verdict == "regrown"


def test_ranks_that_cannot_come_back_do_not_end_the_job() -> None:
    job = bench(active=("n1", "n2"), spares=(), nproc_per_node=1, shrink=True)
    job.train_to(20)
    job.agent_lost("n2")
    job.tick()
    restore(job, [0])
    job.free("n3")
    job.tick_now()
    job.connected("n3")
    job.warm("n3")
    assert job.state.aside() == ()
    job.parked([0])
    job.ranks_up([1])
    job.exited(1, exit_code=1)
    job.tick()
    assert job.state.aside() == (1,)
    restore(job, [0])
    # With the same node it is not tried again, unless somebody vouches for it.
    assert job.state.incident is None
    assert job.state.unfit == ("n3",)
    assert job.finish is None
    job.ready("n3")
    assert "n3" not in job.state.unfit
    assert job.state.aside() == ()


def test_without_another_replica_the_job_ends_and_says_why() -> None:
    job = pairs(("n1", "n2"))
    job.agent_lost("n2")
    job.tick()
    assert job.finish is not None
    assert "cannot go on with fewer ranks (no replica is whole)" in job.finish.reason


def test_a_layout_that_needs_all_ranks_is_not_shrunk() -> None:
    job = bench(active=("n1", "n2"), spares=(), nproc_per_node=1, shrink=True)
    job.begun()
    sizes = [protocol.SegmentSize((0, 1), 100)]
    body = protocol.Attached("fsdp", sizes, 10, 0, [0, 1], "fully_shard cannot")
    job.all_said(job.everyone, body)
    job.steps_done(job.everyone, 0)
    assert fit(job.state).why == "fully_shard cannot"


def without_a_pair() -> Pairs:
    """n1 is lost, and both ranks of its replica are aside; n2 idles."""
    job = pairs(rules=all_rules(None))
    job.agent_lost("n1")
    job.tick()
    job.exited(1, signal=9)
    restore(job, [2, 3])
    return job


def test_loss_of_a_node_whose_ranks_are_aside_is_told_with_its_evidence() -> None:
    job = without_a_pair()
    job.agent_lost("n2")
    assert of_type(FenceNode, job.trace)[-1].reason == "lost (agent connection closed, seen)"
    assert of_type(Say, job.trace)[-1].text == (
        "n2 lost (agent connection closed, seen) while rank 1 is set aside"
    )


def test_node_with_a_broken_gpu_takes_no_ranks_back_in() -> None:
    job = without_a_pair()
    job.devices("n2", "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.")
    assert job.state.nodes["n2"].cause is Cause.SICK
    assert job.state.nodes["n2"].back_at is None
    job.free("n5")
    job.tick_now()
    job.connected("n5")
    job.warm("n5")
    assert job.state.aside() == (0, 1)


def test_steps_that_are_run_again_are_counted_by_the_ranks_that_are_left() -> None:
    job = without_a_pair()
    for step in (22, 23, 24):
        job.steps_done([2, 3], step)
    for rank in (2, 3):
        job.uncopied(rank, 24)
    job.exited(3, signal=9)
    job.tick()
    restore(job, [2, 3], new=(3,))
    assert of_type(IncidentClosed, job.trace)[-1].replayed_steps == 1
    job.free("n5")
    job.tick_now()
    job.connected("n5")
    job.warm("n5")
    restore(job, [0, 1, 2, 3], new=(0, 1))
    assert of_type(IncidentClosed, job.trace)[-1].verdict == "regrown"
    assert of_type(IncidentClosed, job.trace)[-1].replayed_steps == 0


def test_node_whose_ranks_are_set_aside_is_not_drained_any_more() -> None:
    job = Pairs(bench(active=PAIRS, spares=("s1",), nproc_per_node=1, shrink=True).config)
    job.train_to(20)
    job.drain("n2")
    job.agent_lost("n1")
    job.agent_lost("s1")
    job.tick()
    assert job.state.aside() == (0, 1)
    job.exited(1, signal=9)
    job.free("s2")
    restore(job, [2, 3])
    assert job.state.wishes == ()
    assert "n2 stays in use although it is drained (asked for): its ranks are set aside" in [
        action.text for action in of_type(Say, job.trace)
    ]
    job.connected("s2")
    job.warm("s2")
    assert job.state.seats == ("s2", "n2", "n3", "n4")
    assert job.state.incident is not None
    assert job.state.incident.regained == (0, 1)


def cut_off(job: Bench) -> None:
    """A plan is out, and nobody reaches n4."""
    job.exited(0, signal=9)
    job.tick()
    job.parked([1, 2, 3])
    job.ranks_up([0])
    job.parked([0])
    job.inventory()
    job.said(0, protocol.NotConnected(job.state.epoch, "connection timed out"))
    for node in ("n1", "n2", "n3"):
        job.tried(node, "n4")
    job.tried("n4", "n1", "n2", "n3")


def test_without_a_spare_the_job_goes_on_without_a_node_that_is_cut_off() -> None:
    job = pairs()
    cut_off(job)
    job.tick()
    assert job.state.aside() == (2, 3)
    assert of_type(FenceNode, job.trace)[-1].node == "n4"
    job.exited(2, signal=9)
    restore(job, [0, 1])
    assert of_type(IncidentClosed, job.trace)[-1].verdict == "shrunk"


def test_a_node_that_is_cut_off_is_kept_if_the_job_cannot_do_without_it() -> None:
    job = Pairs(bench(active=PAIRS, spares=(), nproc_per_node=1).config)
    job.train_to(20)
    cut_off(job)
    assert not of_type(FenceNode, job.trace)
    assert "n4 cut off (inferred), and there are too few spares" in of_type(Say, job.trace)[-1].text


def test_drained_node_is_used_again_before_ranks_are_set_aside() -> None:
    job = bench(shrink=True, nproc_per_node=1)
    job.train_to(20)
    job.drain("n2")
    job.holding(job.everyone, 20)
    job.at_boundary(job.everyone, 20)
    job.parked(job.everyone)
    job.agent_lost("n3")
    job.tick()
    assert job.state.aside() == ()
    assert job.state.seats == ("n1", "n2")


def test_job_that_shrinks_to_one_node_says_that_its_state_is_there_only() -> None:
    job = bench(spares=(), shrink=True)
    job.train_to(20)
    job.protected(job.everyone)
    job.agent_lost("n2")
    job.tick()
    restore(job, [0, 1])
    said = [say.text for say in of_type(Say, job.trace)]
    unheld = (
        "no other node is up that could hold replicas of ranks 0-1: until one is, the loss of n1 "
        "loses their state"
    )
    assert said.count(unheld) == 1, said
    marks = {mark.phase: mark.detail for mark in of_type(IncidentMark, job.trace)}
    assert marks["redundancy gone"] == "ranks 0-1 on n1"
    assert "redundancy restored" not in marks
