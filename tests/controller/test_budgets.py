"""Budgets: a node whose processes fail too often is given up, a job with many incidents ends."""

from __future__ import annotations

from workbench import Bench, bench, of_type, render

from deadpool_launch.controller.events import Action, FenceNode
from deadpool_launch.controller.states import Phase
from deadpool_launch.exits import ExitCode


def dies(job: Bench, rank: int) -> list[str]:
    """The rank's process dies in the next step, and the gather window ends."""
    return render(job.exited(rank, signal=9) + job.tick())


def mended(job: Bench, lost: list[int]) -> None:
    """The job goes on, everything is protected again, and a step is completed."""
    job.repaired(lost)
    assert job.state.phase is Phase.TRAINING
    job.protected(job.everyone, job.state.newest)
    job.steps_done(job.everyone, job.state.newest + 1)
    job.steps_done(job.everyone, job.state.newest + 1)


def repaired_all(job: Bench) -> list[Action]:
    """Every rank gets a new process."""
    return job.repaired(list(job.everyone))


def trained(**changes: object) -> Bench:
    job = bench(**changes)
    job.train_to(20)
    job.protected(job.everyone)
    return job


def gone(job: Bench) -> list[str]:
    return list(job.state.worn)


def test_without_a_budget_a_node_keeps_its_ranks() -> None:
    job = trained()
    for _ in range(5):
        dies(job, 3)
        mended(job, [3])
    assert gone(job) == []


def test_node_that_used_up_its_restarts_is_replaced_by_a_spare() -> None:
    job = trained(node_restarts=2)
    for _ in range(2):
        assert "restarted on n2" in "\n".join(dies(job, 3))
        mended(job, [3])
    lines = dies(job, 2)
    why = (
        "n2 is given up (rank 2 on n2 died (signal 9, seen); its budget of 2 restarts within "
        "3600 s is used up)"
    )
    assert f"say: {why}; n3 takes ranks 2-3, epoch 4" in lines
    assert gone(job) == ["n2"]
    mended(job, [2, 3])
    assert job.state.seats == ("n1", "n3")


def test_restarts_outside_the_window_do_not_count() -> None:
    job = trained(node_restarts=1, node_restarts_within_s=60.0)
    for _ in range(3):
        dies(job, 3)
        mended(job, [3])
        job.now += 61
    assert gone(job) == []


def test_each_node_has_a_budget_of_its_own() -> None:
    job = trained(node_restarts=1)
    for rank in (3, 0):
        dies(job, rank)
        mended(job, [rank])
    assert gone(job) == []


def test_ranks_that_die_with_the_first_one_are_not_counted() -> None:
    job = trained(node_restarts=0, active=("n1", "n2"), spares=("n3", "n4"))
    job.exited(3, signal=9)
    job.exited(0, signal=9)
    job.tick()
    assert gone(job) == ["n2"]


def test_without_a_spare_the_node_stays_in_use() -> None:
    job = trained(node_restarts=0, spares=())
    lines = dies(job, 3)
    text = "n2 stays in use although its budget of 0 restarts within 3600 s is used up"
    assert f"say: {text}: no spare is left" in lines
    assert gone(job) == []
    mended(job, [3])


def test_lost_nodes_have_the_first_claim_on_the_spares() -> None:
    job = trained(node_restarts=0)
    job.exited(3, signal=9)
    job.agent_lost("n1")
    said = "\n".join(render(job.tick()))
    assert "n2 stays in use" in said
    assert job.state.seats == ("n3", "n2")


def test_copies_are_fetched_from_the_node_that_was_given_up() -> None:
    """Its holder is lost a moment later, so that the only copies are on the node itself."""
    job = trained(node_restarts=0, spares=("n3", "n4"))
    dies(job, 3)
    job.agent_lost("n1")
    job.tick()
    assert job.state.seats == ("n4", "n3")
    (plan,) = [line for line in render(repaired_all(job)) if " plan at " in line]
    assert "fetch from n2" in plan
    assert job.state.phase is Phase.TRAINING


def test_node_that_was_given_up_is_used_again_before_the_job_ends() -> None:
    job = trained(node_restarts=0)
    dies(job, 3)
    mended(job, [2, 3])
    job.agent_lost("n1")
    said = "\n".join(render(job.tick()))
    assert "n2 takes ranks 0-1" in said
    assert job.state.worn == ()
    mended(job, [0, 1])
    assert "stays in use" in "\n".join(dies(job, 0))
    job.agent_lost("n3")
    assert "no spare left" in "\n".join(render(job.tick()))


def test_process_that_lives_on_a_node_that_is_given_up_is_ended() -> None:
    job = trained(node_restarts=0)
    assert "kill ranks 2 on n2: a spare takes the place of its node" in dies(job, 3)
    assert of_type(FenceNode, job.trace) == []


def test_node_that_was_given_up_may_be_lost_without_an_incident() -> None:
    job = trained(node_restarts=0)
    dies(job, 3)
    mended(job, [2, 3])
    job.agent_lost("n2")
    assert job.state.incident is None
    assert job.state.phase is Phase.TRAINING


def test_node_that_is_given_up_while_it_is_drained_is_not_drained_any_more() -> None:
    job = trained(spares=("n3", "n4"), node_restarts=0)
    job.drain("n2")
    dies(job, 3)
    assert gone(job) == ["n2"]
    assert job.state.wishes == ()
    mended(job, [2, 3])
    assert job.state.incident is None
    assert job.state.seats == ("n1", "n3")


def test_node_is_given_up_before_the_first_step_too() -> None:
    job = bench(node_restarts=0)
    job.begun()
    lines = "\n".join(dies(job, 3))
    assert "n2 is given up" in lines
    assert "n3 takes ranks 2-3" in lines
    assert job.state.seats == ("n1", "n3")


def test_node_is_not_given_up_before_every_rank_has_a_replica_elsewhere() -> None:
    """After the first incident nobody has a replica yet when a process dies again."""
    job = trained(node_restarts=1, spares=("n3", "n4"))
    dies(job, 3)
    job.repaired([3])
    job.steps_done(job.everyone, 21)
    lines = dies(job, 2)
    why = (
        "n2 is to be given up (rank 2 on n2 died (signal 9, seen); its budget of 1 restart within "
        "3600 s is used up)"
    )
    assert (
        f"say: {why}: not before every rank has a replica again, as copies may be on this node only"
    ) in lines
    assert any("restarted on n2" in line for line in lines)
    assert gone(job) == []
    job.repaired([2])
    job.steps_done(job.everyone, 22)
    assert job.state.halts == 0
    job.protected(job.everyone, 22)
    assert job.state.halts == 1
    job.holding(job.everyone, 23)
    job.steps_done(job.everyone, 23)
    job.at_boundary(job.everyone, 23)
    assert f"say: {why}; n3 takes ranks 2-3, epoch 4" in render(job.parked(job.everyone))
    assert job.state.seats == ("n1", "n3")


def test_job_with_too_many_incidents_ends() -> None:
    job = trained(max_incidents=2, incidents_within_s=600.0)
    for rank in (3, 0):
        dies(job, rank)
        mended(job, [rank])
    job.exited(1, signal=9)
    assert job.finish is not None
    assert job.finish.exit_code == ExitCode.RECOVERY_FAILED
    assert job.finish.reason == (
        "rank 1 on n1 died (signal 9, seen); the job's budget of 2 incidents within 600 s is "
        "used up"
    )


def test_incidents_outside_the_window_do_not_count() -> None:
    job = trained(max_incidents=1, incidents_within_s=600.0)
    for rank in (3, 0, 1):
        dies(job, rank)
        mended(job, [rank])
        job.now += 601
    assert job.finish is None
