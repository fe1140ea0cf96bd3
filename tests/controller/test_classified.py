"""What the controller does with an exception or exit that a rule knows."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from fake_cluster import FAULT_KINDS, FakeCluster, Fault, quick_config
from workbench import Bench, bench, of_type, told

from deadpool_launch.classify.model import Kind, Rule
from deadpool_launch.classify.rules import default_rules
from deadpool_launch.controller.events import FenceNode, Finish, KillRanks, Say, StartRanks
from deadpool_launch.controller.rank import Stage
from deadpool_launch.controller.states import Phase
from deadpool_launch.exits import ExitCode
from deadpool_runtime import protocol

RULES = default_rules()
ECC = "AcceleratorError: CUDA error: uncorrectable ECC error encountered\nCompile with more"
CUBLAS = "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"
CLOSED = "RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.3]:28411"
FULL = "OSError: [Errno 28] No space left on device"
GEMM = "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"


def training(**changes: object) -> Bench:
    """Two nodes of two ranks in step 21, a spare, the packaged rules."""
    job = bench(**{"rules": RULES, **changes})
    job.train_to(20)
    job.now = 10.0
    return job


def raised(job: Bench, rank: int, error: str, step: int = 21) -> None:
    job.said(rank, protocol.StepRaised(job.state.epoch, step, error))


def failed(job: Bench, rank: int, error: str, traceback: str = "") -> None:
    job.said(rank, protocol.ScriptFailed(error, traceback or error, 1))


def lines(job: Bench) -> list[str]:
    return [said.text for said in of_type(Say, job.trace)]


def test_hardware_exception_costs_the_node_and_names_the_rule() -> None:
    job = training()
    raised(job, 3, ECC)
    assert job.state.next_deadline() == pytest.approx(11.0)
    job.tick()
    assert job.state.nodes["n2"].gone.startswith("is given up")
    job.tick()
    assert lines(job) == [
        "n2 is given up (rank 3 raised in step 21: AcceleratorError: CUDA error: uncorrectable ECC "
        "error encountered, seen; rule gpu-ecc: the GPU's memory has errors that it cannot "
        "correct); n3 takes ranks 2-3, epoch 2"
    ]
    job.repaired([2, 3])
    job.steps_done(job.everyone, 21)
    assert job.finish is None
    assert job.state.incident is None


def test_without_rules_it_stays_the_scripts() -> None:
    job = training(rules=())
    raised(job, 3, ECC)
    job.tick()
    assert [ranks for ranks, _ in told(protocol.RaiseIt, job.tick())] == [(3,)]


def test_hardware_fault_without_a_spare_ends_as_a_lost_node_does() -> None:
    job = training(spares=())
    raised(job, 3, ECC)
    job.tick()
    job.tick()
    assert job.finish is not None
    assert job.finish.exit_code == ExitCode.NO_SPARE
    assert "rule gpu-ecc" in job.finish.reason


def test_hardware_exception_counts_although_echoes_and_others_came_first() -> None:
    job = training()
    raised(job, 0, CLOSED)
    raised(job, 1, "RuntimeError: odd")
    job.now += 0.5
    raised(job, 3, ECC)
    job.tick()  # people are told of rank 0
    while job.state.phase is Phase.TRAINING:
        job.tick()
    assert of_type(FenceNode, job.trace)[0].node == "n2"
    assert not told(protocol.RaiseIt, job.trace)


def test_passing_fault_restarts_the_rank_where_it_was() -> None:
    job = training()
    raised(job, 3, CUBLAS)
    job.tick()
    assert of_type(KillRanks, job.tick()) == [
        KillRanks("n2", (3,), "raised in step 21 by a fault that passes")
    ]
    job.exited(3, signal=9)
    actions = job.tick()
    assert of_type(StartRanks, actions) == [StartRanks("n2", 2, 1, (3,))]
    assert f"rank 3 on n2 raised in step 21 (RuntimeError: {GEMM}" in lines(job)[-1]
    assert "rule gpu-library" in lines(job)[-1]
    assert lines(job)[-1].endswith("restarted on n2, epoch 2")
    job.repaired([3])
    job.steps_done(job.everyone, 21)
    assert job.state.incident is None


def test_same_fault_at_the_same_step_again_is_the_scripts() -> None:
    for error in (CUBLAS, ECC):
        job = training()
        raised(job, 3, error)
        while not job.state.incident:
            job.tick()
        if error is CUBLAS:
            job.exited(3, signal=9)
        job.tick()
        job.repaired([3] if error is CUBLAS else [2, 3])
        raised(job, 3, error)
        while not told(protocol.RaiseIt, job.trace):
            job.tick()
        failed(job, 3, error)
        assert job.finish is not None
        assert job.finish.exit_code == ExitCode.SCRIPT_FAILED
        assert "rule same-fault-same-step" in job.finish.reason


def test_rule_of_a_user_cannot_make_the_same_fault_hardware_for_ever() -> None:
    odd = Rule("odd", Kind.TRANSIENT, "it is odd", error="odd")
    job = training(rules=(odd,))
    raised(job, 3, "odd")
    while job.state.incident is None:
        job.tick()
    job.exited(3, signal=9)
    job.tick()
    job.repaired([3])
    raised(job, 3, "odd")
    while not told(protocol.RaiseIt, job.trace):
        job.tick()
    failed(job, 3, "odd")
    assert job.finish is not None
    assert job.finish.exit_code == ExitCode.SCRIPT_FAILED


def test_loss_of_a_peer_explains_a_passing_fault_too() -> None:
    job = training()
    raised(job, 0, CUBLAS)
    job.now += 2.0
    job.agent_lost("n2", "no heartbeat for 3 s", "inferred")
    job.tick()
    assert not of_type(KillRanks, job.trace)
    assert job.state.ranks[0].stage is Stage.UNWINDING


def test_full_disk_ends_the_job_at_once_with_the_scripts_traceback() -> None:
    job = training()
    raised(job, 0, CLOSED)
    raised(job, 3, FULL)
    assert [ranks for ranks, _ in told(protocol.RaiseIt, job.trace)] == [(3,)]
    failed(job, 3, FULL, "Traceback (most recent call last):\n  File x\n" + FULL)
    assert job.finish is not None
    assert job.finish.exit_code == ExitCode.JOB_FAULT
    assert job.finish.reason == f"rank 3: {FULL} (rule disk-full: a file system is full)"
    assert job.finish.detail.endswith(FULL)


def test_same_error_on_every_rank_is_nobodys() -> None:
    job = training()
    for rank in job.everyone:
        raised(job, rank, f"RuntimeError: CUDA error: unknown error on device {rank}")
    failed(job, 0, "RuntimeError: CUDA error: unknown error on device 0")
    assert job.finish is not None
    assert job.finish.exit_code == ExitCode.JOB_FAULT
    assert "rule same-error-everywhere" in job.finish.reason
    assert not of_type(KillRanks, job.trace)


def test_same_hardware_error_on_every_rank_takes_no_node() -> None:
    job = training()
    for rank in job.everyone:
        raised(job, rank, ECC)
        job.now += 0.1
    assert not of_type(FenceNode, job.trace)
    assert [ranks for ranks, _ in told(protocol.RaiseIt, job.trace)] == [(0, 1, 2, 3)]


def test_mistake_of_the_script_ends_it_as_before_and_names_the_rule() -> None:
    job = training()
    failed(job, 3, "ValueError: bad")
    job.tick()
    job.tick()
    assert job.finish is not None
    assert job.finish.exit_code == ExitCode.SCRIPT_FAILED
    assert job.finish.reason.startswith("rank 3: ValueError: bad (rule script-mistake: ")


def test_echo_is_not_blamed_for_an_error_that_was_shown_later() -> None:
    job = training()
    raised(job, 0, CLOSED)
    job.now += 0.2
    raised(job, 3, "ValueError: bad")
    while not told(protocol.RaiseIt, job.trace):
        job.tick()
    assert {ranks for ranks, _ in told(protocol.RaiseIt, job.trace)} == {(0, 3)}
    failed(job, 0, CLOSED)
    assert not of_type(Finish, job.trace)
    failed(job, 3, "ValueError: bad")
    assert job.finish is not None
    assert job.finish.reason.startswith("rank 3: ValueError: bad")


def test_root_of_a_chain_decides_for_a_script_that_fails_outside_a_step() -> None:
    job = training()
    chain = (
        f"Traceback (most recent call last):\n  File a\n{ECC}\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n  File b\nKeyError: 'x'\n"
    )
    failed(job, 3, "KeyError: 'x'", chain)
    job.tick()
    job.tick()
    assert of_type(FenceNode, job.trace)[0].node == "n2"
    assert "(rank 3 failed: AcceleratorError: CUDA error: uncorrectable ECC" in lines(job)[-1]


def test_replacement_on_a_bad_node_goes_to_the_next_spare() -> None:
    job = training(spares=("n3", "n4"))
    job.agent_lost("n2")
    job.tick()
    job.parked([0, 1])
    job.ranks_up([2, 3])
    failed(job, 2, "RuntimeError: No CUDA GPUs are available")
    job.tick()
    assert job.state.seats == ("n1", "n4")
    assert "rule gpu-lost" in lines(job)[-1]


def test_exit_code_that_a_rule_calls_the_nodes_or_the_jobs() -> None:
    own = (
        Rule(
            "health-check", Kind.PERMANENT, "the node failed its check", exit_codes=frozenset({77})
        ),
        Rule("licence", Kind.JOB, "no licence is left", exit_codes=frozenset({78})),
    )
    job = training(rules=own)
    job.exited(3, exit_code=77)
    job.tick()
    assert lines(job) == [
        "n2 is given up (rank 3 died: exit code 77, seen; rule health-check: the node failed its "
        "check); n3 takes ranks 2-3, epoch 2"
    ]
    job = training(rules=own)
    job.exited(3, exit_code=78)
    assert job.finish is not None
    assert (job.finish.exit_code, job.finish.reason) == (
        ExitCode.JOB_FAULT,
        "rank 3 on n2 died (exit code 78, seen; rule licence: no licence is left)",
    )


@pytest.mark.parametrize("kind", list(Kind))
def test_whatever_a_rule_says_every_job_ends_with_a_verdict(kind: Kind) -> None:
    """The fake script's own error, and now and then a crash, is of this kind."""
    rules = (
        Rule("peers", Kind.ECHO, "a peer is gone", error="^RuntimeError"),
        Rule("own", kind, "it is said", error="ValueError"),
        Rule("crash", kind, "it is said", signals=frozenset({9})),
    )
    seen = set()
    for seed in range(25):
        dice = random.Random(seed)
        config = quick_config(
            dice.randint(1, 3), dice.randint(0, 3), dice.randint(1, 3), "at-start"
        )
        known = rules[: dice.randint(2, 3)]
        kinds = ("raise", "fail") if seed % 2 else FAULT_KINDS
        faults = [
            Fault(dice.uniform(0.0, 6.0), dice.choice(kinds), dice.randrange(9))
            for _ in range(dice.randint(1, 4))
        ]
        cluster = FakeCluster(replace(config, rules=known), seed, faults, True)
        finish = cluster.run()
        assert cluster.bench.state.phase is Phase.ENDED
        seen.add(ExitCode(finish.exit_code))
    assert (ExitCode.JOB_FAULT in seen) == (kind is Kind.JOB)


@pytest.mark.parametrize(("over", "where"), [(False, "in step 21"), (True, "after step 20")])
def test_rank_that_ended_before_the_others_is_named(over: bool, where: str) -> None:
    job = training()
    if over:
        job.said(1, protocol.StepsEnded(job.state.epoch, 20))
    job.exited(1, exit_code=0)
    for rank in (0, 2, 3):
        raised(job, rank, CLOSED)
    for rank in (0, 2, 3):
        failed(job, rank, CLOSED)
    assert job.finish is not None
    assert job.finish.exit_code == ExitCode.SCRIPT_FAILED
    assert job.finish.reason.startswith(
        f"rank 1 ended with exit code 0 {where}, before the others; rank 0: "
    )
