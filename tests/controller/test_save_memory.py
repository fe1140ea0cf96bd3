"""Before training: what the writing of durable checkpoints takes is part of what a node needs."""

from __future__ import annotations

import msgspec
from workbench import MUCH_NBYTES, Bench, bench, of_type

from deadpool_launch.controller.events import Finish
from deadpool_launch.exits import ExitCode

#: What the copies on each node take: see scenarios/too_little_memory.txt.
COPIES_NBYTES = 23_000_000
SAVE_NBYTES = 50 << 20


def attached(save_nbytes: int, memory_nbytes: int) -> tuple[Bench, list[Finish]]:
    """Two nodes of two ranks, the second with so much memory; a rank's save takes so much."""
    job = bench(spares=())
    actions = job.start()
    for node, nbytes in (("n1", MUCH_NBYTES), ("n2", memory_nbytes)):
        actions += job.connected(node) + job.warm(node, nbytes)
    actions += job.ranks_up(job.everyone)
    for rank in job.everyone:
        body = msgspec.structs.replace(job.attaching(rank), save_nbytes=save_nbytes)
        actions += job.said(rank, body)
    return job, of_type(Finish, actions)


def test_a_node_with_room_for_the_copies_but_not_for_saving_them_is_too_small() -> None:
    _, ends = attached(0, COPIES_NBYTES)
    assert ends == []
    _, (end,) = attached(SAVE_NBYTES, COPIES_NBYTES)
    assert end.exit_code == ExitCode.LITTLE_MEMORY
    assert "n2 has too little memory for the copies of the state: 121 MiB needed" in end.reason
    assert (
        ", 3 replicas of ranks 0-1 of 2.52 MiB together and 100 MiB while a durable" in end.reason
    )


def test_a_spare_needs_room_for_saving_too() -> None:
    job, ends = attached(SAVE_NBYTES, COPIES_NBYTES + 2 * SAVE_NBYTES)
    assert ends == []
    assert job.state.need_nbytes > 2 * SAVE_NBYTES
