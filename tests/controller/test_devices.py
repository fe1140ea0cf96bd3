"""A GPU that shows a fault makes what follows on its node the node's fault."""

from __future__ import annotations

from workbench import Bench, bench, of_type, told

from deadpool_launch.classify.rules import all_rules
from deadpool_launch.controller.events import FenceNode, IncidentOpened, Say
from deadpool_runtime import protocol

LOST = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus."
APPLICATION = "NVRM: Xid (PCI:0000:3b:00): 31, pid=1234, MMU Fault"


def training(**changes: object) -> Bench:
    job = bench(rules=all_rules(None), readmit_after_s=60.0, **changes)
    job.train_to(3)
    job.now = 10.0
    return job


def said(job: Bench) -> str:
    return "\n".join(action.text for action in of_type(Say, job.trace))


def test_fault_of_a_gpu_is_said_and_disturbs_nobody() -> None:
    job = training()
    assert [type(action) for action in job.devices("n2", LOST)] == [Say]
    assert "n2: NVRM: Xid (PCI:0000:3b:00): 79, pid=1234" in said(job)
    assert "rule xid-hardware" in said(job)
    assert job.state.incident is None


def test_death_of_a_process_on_its_node_is_the_nodes_then() -> None:
    job = training()
    job.exited(0, signal=9)
    assert not of_type(FenceNode, job.trace)
    job = training()
    job.devices("n2", APPLICATION)
    job.exited(2, signal=9)
    assert not of_type(FenceNode, job.trace), "what an application did is not the hardware's"
    job = training()
    job.devices("n2", LOST)
    job.exited(2, signal=9)
    assert [fence.node for fence in of_type(FenceNode, job.trace)] == ["n2"]
    job.tick()
    assert "n2 is given up (rank 2 died: signal 9, seen; rule xid-hardware: " in said(job)
    assert "n3 takes ranks 2-3" in said(job)
    assert job.state.nodes["n2"].back_at is None
    job.stop(15)
    assert "leave out of the next job: --exclude=n2" in said(job)


def test_exception_on_its_node_is_the_nodes_too() -> None:
    job = training()
    job.devices("n2", LOST)
    job.said(2, protocol.StepRaised(1, 4, "RuntimeError: CUDA error: unspecified launch failure"))
    job.tick()
    assert [fence.node for fence in of_type(FenceNode, job.trace)] == ["n2"]


def test_fault_that_is_seen_after_the_death_ends_the_restart_on_the_node() -> None:
    job = training()
    job.exited(2, signal=9)
    job.tick()
    assert "restarted on n2" in said(job)
    job.devices("n2", LOST)
    job.tick()
    assert "n3 takes ranks 2-3" in said(job)


def test_ranks_of_its_node_move_if_the_policy_says_so() -> None:
    job = training(device="swap")
    actions = job.devices("n2", LOST, LOST)
    assert [ranks for ranks, _ in told(protocol.Hold, actions)] == [(0, 1, 2, 3)]
    assert "ranks 2-3 will move to a spare at the end of a step" in said(job)
    assert not of_type(FenceNode, job.trace), "its copies are needed"
    assert not of_type(IncidentOpened, job.trace)
    job.stop(15)
    assert "--exclude=n2" in said(job)


def test_node_stays_in_use_where_no_spare_is_ready() -> None:
    job = training(device="swap", spares=())
    job.devices("n2", LOST)
    assert "but no spare is left that could take ranks 2-3 of n2" in said(job)
    assert job.state.incident is None


def test_spare_with_a_fault_is_given_up() -> None:
    job = training()
    job.devices("n3", LOST)
    assert [fence.node for fence in of_type(FenceNode, job.trace)] == ["n3"]
    assert job.state.free == ()
    assert "spare n3 is given up (NVRM: Xid" in said(job)
