"""Fewer ranks, and more again, where each has a share of the optimizers' state for itself."""

from __future__ import annotations

from workbench import Bench, bench, of_type

from deadpool_launch.controller.events import Finish, IncidentClosed, Say, Tell
from deadpool_launch.exits import ExitCode
from deadpool_runtime import protocol


class Zero(Bench):
    """What a ZeroRedundancyOptimizer makes of it."""

    def attaching(self, rank: int) -> protocol.Attached:
        sizes = [protocol.SegmentSize(ranks, 1 << 20) for ranks in self.segments(rank)]
        return protocol.Attached("zero", sizes, 1000, 0, [rank], shares=True)

    def segments(self, rank: int) -> list[tuple[int, ...]]:
        return [tuple(self.everyone), (rank,)]

    def lose(self, *nodes: str) -> None:
        for node in nodes:
            self.agent_lost(node)
            self.arenas.pop(node, None)
        self.tick()

    def planned(self, ranks: list[int], new: tuple[int, ...] = ()) -> dict[int, protocol.Plan]:
        """From parking to the plans, by rank; ``new`` ones come up before."""
        self.parked(rank for rank in ranks if rank not in new)
        self.ranks_up(new)
        self.parked(new)
        actions = self.inventory()
        told = [tell for tell in of_type(Tell, actions) if isinstance(tell.body, protocol.Plan)]
        return {rank: tell.body for tell in told for rank in tell.ranks}

    def resumed(self, ranks: list[int], sizes: dict[int, list[protocol.SegmentSize]]) -> None:
        self.rebuilt(ranks)
        incident = self.state.incident
        assert incident is not None
        assert incident.step is not None
        for rank in ranks:
            body = protocol.Restored(self.state.epoch, incident.step, [], sizes.get(rank, []))
            self.said(rank, body)


def zero(nodes: tuple[str, ...] = ("n1", "n2", "n3"), **changes: object) -> Zero:
    job = Zero(bench(active=nodes, spares=(), nproc_per_node=1, shrink=True, **changes).config)
    job.train_to(20)
    return job


def test_share_of_a_lost_rank_is_brought_by_one_that_is_left() -> None:
    job = zero()
    job.lose("n3")
    plans = job.planned([0, 1])
    assert {plan.step for plan in plans.values()} == {20}
    assert {plan.former for plan in plans.values()} == {(0, 1, 2)}
    # Its replica is on n1. The other node brings it, so that two nodes have it.
    source = job.state.nodes["n1"].replicator
    assert plans[0].shards == []
    assert plans[1].shards == [protocol.Shard(2, True, [(2,)], source)]
    job.resumed([0, 1], {})
    job.steps_done([0, 1], 21)
    assert of_type(IncidentClosed, job.trace)[-1].verdict == "shrunk"


def test_share_that_cannot_be_fetched_is_taken_from_where_it_is() -> None:
    job = zero()
    job.lose("n3")
    job.planned([0, 1])
    job.restore_failed(1)
    plans = job.planned([0, 1])
    assert plans[0].shards == [protocol.Shard(2, True, [(2,)])]
    assert plans[1].shards == []


def test_share_that_nobody_has_of_the_newest_step_is_taken_of_an_older_one() -> None:
    job = zero()
    job.uncopied(2, 20)
    job.lose("n3")
    plans = job.planned([0, 1])
    assert {plan.step for plan in plans.values()} == {19}
    assert {plan.former for plan in plans.values()} == {(0, 1, 2)}


def test_share_that_nobody_has_ends_the_job_with_a_sentence() -> None:
    job = zero(("n1", "n2", "n3", "n4"))
    job.lose("n2", "n3")
    job.planned([0, 3])
    (finish,) = of_type(Finish, job.trace)
    assert finish.exit_code is ExitCode.STATE_LOST
    assert "step 20 is not on rank 1, step 19 is not on rank 1" in finish.reason


def test_share_that_nobody_has_comes_from_the_durable_checkpoint() -> None:
    job = zero(("n1", "n2", "n3", "n4"), checkpoint_dir="/checkpoints")
    job.saved(job.everyone, 20)
    job.committed(20)
    job.lose("n2", "n3")
    plans = job.planned([0, 3])
    assert {plan.checkpoint for plan in plans.values()} == {"/checkpoints"}
    assert {plan.former for plan in plans.values()} == {(0, 1, 2, 3)}
    assert sorted(s.rank for plan in plans.values() for s in plan.shards) == [1, 2]
    # Copies that were made before are of no use any more, and later ones are shared out over two.
    job.resumed([0, 3], {})
    job.steps_done([0, 3], 21)
    job.lose("n4")
    plans = job.planned([0])
    assert (plans[0].step, plans[0].former) == (21, (0, 3))
    assert [each.rank for each in plans[0].shards] == [3]


def test_another_loss_before_the_next_step_finds_the_state_as_it_was_shared_out_before() -> None:
    job = zero(("n1", "n2", "n3", "n4"))
    job.lose("n4")
    plans = job.planned([0, 1, 2])
    assert [each.rank for plan in plans.values() for each in plan.shards] == [3]
    job.resumed([0, 1, 2], {})
    job.lose("n2")
    plans = job.planned([0, 2])
    assert {plan.step for plan in plans.values()} == {20}
    assert {plan.former for plan in plans.values()} == {(0, 1, 2, 3)}
    assert sorted(each.rank for plan in plans.values() for each in plan.shards) == [1, 3]


def test_ranks_that_come_back_get_a_share_again() -> None:
    job = zero()
    job.lose("n3")
    job.planned([0, 1])
    job.resumed([0, 1], {})
    for step in (21, 22):
        job.steps_done([0, 1], step)
    job.free("n4")
    job.tick_now()
    job.connected("n4")
    job.warm("n4")
    plans = job.planned([0, 1, 2], new=(2,))
    assert {plan.step for plan in plans.values()} == {22}
    assert {plan.former for plan in plans.values()} == {(0, 1)}
    assert [plan.shards for plan in plans.values()] == [[], [], []]
    assert [piece.adopted for piece in plans[2].pieces] == [True]
    job.resumed([0, 1, 2], {})
    job.steps_done([0, 1, 2], 23)
    assert of_type(IncidentClosed, job.trace)[-1].verdict == "regrown"
    # From here on all is as it was at the start.
    job.exited(1, signal=9)
    job.tick()
    plans = job.planned([0, 1, 2], new=(1,))
    assert {plan.former for plan in plans.values()} == {()}


def test_peers_copy_is_no_share_of_a_rank_that_had_one() -> None:
    """Rank 2 is aside and comes back before the others have completed a step without it. What all
    go back to is still shared out over three ranks, and a copy that rank 2 takes over from a peer
    is not its share."""
    job = zero()
    job.lose("n3")
    job.planned([0, 1])
    job.resumed([0, 1], {})
    job.free("n4")
    job.tick_now()
    job.steps_done([0, 1], 21)
    for rank in (0, 1):
        job.uncopied(rank, 21)
    job.connected("n4")
    job.warm("n4")
    plans = job.planned([0, 1, 2], new=(2,))
    assert {plan.step for plan in plans.values()} == {20}
    assert {plan.former for plan in plans.values()} == {()}
    assert not any(piece.adopted for piece in plans[2].pieces)


def test_replicas_have_the_share_that_a_rank_has_now() -> None:
    job = zero()
    job.lose("n3")
    job.planned([0, 1])
    everyone = protocol.SegmentSize((0, 1, 2), 1 << 20)
    actions_before = len(job.trace)
    job.resumed([0, 1], {1: [everyone]})
    protects = [
        (tell.ranks, tell.body.holder.segments)
        for tell in of_type(Tell, job.trace[actions_before:])
        if isinstance(tell.body, protocol.Protect) and tell.body.holder is not None
    ]
    assert protects == [((1,), [])]
    assert not [s for s in of_type(Say, job.trace[actions_before:]) if "no other node" in s.text]
