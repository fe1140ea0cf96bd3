"""Training that begins with the durable checkpoint of an earlier launch: what is progress."""

from __future__ import annotations

from workbench import Bench, bench

from deadpool_launch.controller.states import Phase


def begun_at_forty() -> Bench:
    """Every rank has read the checkpoint of step 40, and no step was made since."""
    job = bench(checkpoint_dir="/ck", checkpoints=(40,), resume=True)
    job.begun()
    job.attached(job.everyone)
    job.parked(job.everyone)
    job.inventory()
    job.rebuilt(job.everyone)
    job.restored(job.everyone)
    assert job.state.phase is Phase.TRAINING
    return job


def test_steps_of_the_earlier_launch_are_no_progress_of_this_one() -> None:
    job = begun_at_forty()
    assert (job.state.newest, job.state.begun_at) == (40, 40)
    job.steps_done(job.everyone, 41)
    assert (job.state.newest, job.state.begun_at) == (41, 40)


def test_loss_of_all_copies_leads_back_to_the_same_checkpoint() -> None:
    """Not to the beginning, though this launch has completed no step."""
    job = begun_at_forty()
    job.arenas.clear()
    job.exited(3, signal=9)
    job.tick()
    job.repaired([3])
    assert job.state.phase is Phase.TRAINING
    assert job.state.incident is not None
    assert job.state.incident.step == 40
    assert job.finish is None


def test_nothing_is_read_where_nothing_is_asked_for() -> None:
    job = bench(checkpoint_dir="/ck", checkpoints=(40,))
    job.train_to(3)
    assert job.state.incident is None
    assert job.state.newest == 3
