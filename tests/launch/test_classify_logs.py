"""Logs: lines as they really appear, and which of them is the root."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from deadpool_launch.classify.model import Kind, Rule
from deadpool_launch.classify.rules import default_rules
from deadpool_launch.classify.scan import Finding, find_root
from deadpool_launch.classify.traces import root_error

RULES = default_rules()
#: Rule and line.
LINES = [
    tuple(line.split(": ", 1))
    for line in Path(__file__).with_name("fault_lines.txt").read_text().splitlines()
    if not line.startswith("#")
]
#: Those that need more than a line: a clock, a state, several ranks or attempts, a traceback.
OTHERS = {
    *("walltime", "walltime-signal", "node-state", "same-fault-same-step"),
    *("same-error-everywhere", "python-exception"),
}


def scan(log: str | bytes, *own: Rule, time_left_s: float | None = None) -> Finding | None:
    raw = log.encode() if isinstance(log, str) else log
    return find_root(enumerate(raw.split(b"\n"), 1), (*own, *RULES), time_left_s, own)


def test_every_packaged_rule_has_a_line() -> None:
    assert {rule for rule, _ in LINES} | OTHERS == {rule.name for rule in RULES}


@pytest.mark.parametrize(("rule", "line"), LINES)
def test_line_is_known(rule: str, line: str) -> None:
    found = scan(f"step 1 loss 0.5\n{line}\nstep 2 loss 0.4\n")
    assert found is not None
    assert (found.verdict.rule, found.number) == (rule, 2)


TRACE = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    main()\n'


def test_root_of_a_chain_is_its_first() -> None:
    log = (
        f"{TRACE}torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\n\n"
        f"During handling of the above exception, another exception occurred:\n\n"
        f"{TRACE}ValueError: no batch\n"
    )
    found = scan(log)
    assert found is not None
    assert (found.verdict.kind, found.number) == (Kind.PERMANENT, 4)
    assert root_error(log).startswith("torch.AcceleratorError")


def test_exception_that_no_rule_names_is_the_scripts() -> None:
    found = scan(f"{TRACE}my.package.Odd\n")
    assert found is not None
    assert (found.verdict.rule, found.text) == ("python-exception", "my.package.Odd")


def test_source_lines_of_a_traceback_are_no_errors() -> None:
    found = scan(
        'Traceback (most recent call last):\n  File "a.py", line 1\n'
        '    raise RuntimeError("No space left on device? Connection closed by peer")\n'
        "RuntimeError: think\n"
    )
    assert found is not None
    assert (found.verdict.rule, found.number) == ("python-exception", 4)


def test_killed_node_is_told_from_the_innocent() -> None:
    """As in ezpz#238: the innocent are shown first, and with them exit code 143."""
    found = scan(
        "srun: error: nid001320: tasks 0-3: Terminated\n"
        "srun: error: nid001322: tasks 8-11: Exited with exit code 143\n"
        "srun: error: nid001321: tasks 4-7: Killed\n"
        "srun: Force Terminated StepId=7.0\n"
    )
    assert found is not None
    assert (found.verdict.rule, found.number) == ("killed", 3)
    assert (sorted(found.ranks), found.all_ranks) == ([4, 5, 6, 7], 12)


def test_numbers_of_any_length_are_text() -> None:
    digits = "7" * 5000
    log = (
        f"srun: error: n1: task {digits}: Exited with exit code 1\n"
        f"srun: error: n1: task 1: Exited with exit code {digits}\n"
        f"exitcode  : {digits} (pid: 1)\n"
    )
    found = scan(log + "srun: error: n1: tasks 2: Killed\n")
    assert found is not None
    assert (found.number, sorted(found.ranks)) == (4, [2])


def test_time_limit_needs_the_clock() -> None:
    log = (
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-08-21T10:00:00 DUE TO TIME LIMIT ***"
    )
    rules = [
        found.verdict.rule for left in (None, 40_000, -2) if (found := scan(log, time_left_s=left))
    ]
    assert rules == ["cancelled", "cancelled", "walltime"]


def test_cause_between_echoes_of_many_ranks_is_found() -> None:
    log = ""
    for rank in (0, 1, 2):
        for line in f"{TRACE}RuntimeError: [pair.cc:5] Connection closed by peer [1]:{rank}".split(
            "\n"
        ):
            log += f"{rank}: [rank{rank}]: {line}\n"
    log += "".join(f"3: [rank3]: {line}\n" for line in f"{TRACE}ValueError: bad\n".splitlines())
    found = scan(log)
    assert found is not None
    assert (found.verdict.rule, set(found.ranks), found.all_ranks) == ("script-mistake", {3}, 4)


def test_interleaved_tracebacks_of_labelled_ranks_are_kept_apart() -> None:
    one = [f" 2: {line}" for line in f"{TRACE}my.Odd: two".splitlines()]
    two = [
        f"13: {line}" for line in f"{TRACE}OSError: [Errno 30] Read-only file system".splitlines()
    ]
    log = "\n".join(line for pair in zip(two, one, strict=True) for line in pair)
    found = scan(log)
    assert found is not None
    assert (found.verdict.rule, set(found.ranks), found.number) == ("read-only-disk", {13}, 7)


def test_same_error_of_every_labelled_rank_is_the_jobs() -> None:
    error = "CUDA error: no CUDA-capable device is detected"
    everywhere = scan("".join(f"{rank}: RuntimeError: {error}\n" for rank in range(4)))
    some = scan("3: step 1\n" + "".join(f"{rank}: RuntimeError: {error}\n" for rank in range(3)))
    assert everywhere is not None
    assert some is not None
    assert everywhere.verdict.rule == "same-error-everywhere"
    assert some.verdict.rule == "gpu-lost"


def test_xid_makes_an_illegal_access_hardware_even_when_it_comes_later() -> None:
    log = f"{TRACE}RuntimeError: CUDA error: an illegal memory access was encountered\n"
    xid = "NVRM: Xid (PCI:0000:3b:00): {}, pid=9, name=python\n"
    rules = [
        found.verdict.rule
        for more in ("", xid.format(31), xid.format(45) + xid.format(79))
        if (found := scan(log + more)) is not None and found.number == 4
    ]
    assert rules == ["cuda-bad-access", "cuda-bad-access", "xid-hardware"]


def test_torchruns_table_is_read_for_its_root_cause() -> None:
    table = (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        "train.py FAILED\nFailures:\n"
        "[1]:\n  rank      : 2 (local_rank: 2)\n  exitcode  : 1 (pid: 102932)\n"
        f"  traceback : {TRACE.replace(chr(10), chr(10) + '  ')}ValueError: the wrong one\n"
        "Root Cause (first observed failure):\n"
        "[0]:\n  rank      : 4 (local_rank: 4)\n  exitcode  : -9 (pid: 208585)\n"
        "  traceback : Signal 9 (SIGKILL) received by PID 208585\n"
    )
    found = scan(table)
    assert found is not None
    assert (found.verdict.rule, found.text) == ("killed", "exitcode  : -9 (pid: 208585)")


def test_hardware_error_followed_by_echoes_stays_one() -> None:
    found = scan(
        f"{TRACE}torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\n"
        "DistBackendError: NCCL error: remote process exited or there was a network error\n"
    )
    assert found is not None
    assert found.verdict.rule == "gpu-ecc"


def test_nccl_message_that_goes_on_with_a_closed_connection_is_an_echo() -> None:
    error = "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled system error"
    alone = scan(f"{TRACE}{error}\n")
    closed = scan(
        f"{TRACE}{error}\nncclSystemError: System call failed.\nLast error:\n"
        "socketProgress: Connection closed by remote peer n2<4>\n"
    )
    assert alone is not None
    assert closed is not None
    assert (alone.verdict.kind, closed.verdict.kind) == (Kind.TRANSIENT, Kind.ECHO)


def test_exception_group_is_entered() -> None:
    found = scan(
        "  + Exception Group Traceback (most recent call last):\n"
        '  |   File "a.py", line 1, in <module>\n'
        "  | ExceptionGroup: two (2 sub-exceptions)\n"
        "  +-+---------------- 1 ----------------\n"
        "    | Traceback (most recent call last):\n"
        '    |   File "a.py", line 2, in f\n'
        "    | OSError: [Errno 28] No space left on device\n"
    )
    assert found is not None
    assert (found.verdict.rule, found.number) == ("disk-full", 7)


def test_colours_noise_and_progress_bars_hide_nothing() -> None:
    noise = random.Random(1).randbytes(20_000).replace(b"\n", b"")
    log = (
        noise + b"\n\xff\xfe\x00" + b"\x1b[32m 50%|####\r\x1b[1;35mRuntimeError\x1b[0m: "
        b"\x1b[35mCUDA error: unc\x00orrectable ECC error\x1b[0m encountered\n" + noise
    )
    found = scan(log)
    assert found is not None
    assert found.text == "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    assert found.number == 2


def test_users_rule_is_tried_on_lines_without_a_word_of_an_error() -> None:
    own = Rule("ours", Kind.JOB, "so it is", error="^BURST BUFFER GONE$")
    assert scan("all is well\nBURST BUFFER GONE\n") is None
    found = scan("all is well\nBURST BUFFER GONE\n", own)
    assert found is not None
    assert (found.verdict.rule, found.number) == ("ours", 2)


def test_flood_of_different_echoes_does_not_push_out_the_cause() -> None:
    words = ["".join(random.Random(n).choices("abcdefgh", k=9)) for n in range(2_000)]
    log = "".join(f"Connection closed by peer {word}\n" for word in words)
    found = scan(f"{log}OSError: [Errno 28] No space left on device\n")
    assert found is not None
    assert (found.verdict.rule, found.number) == ("disk-full", 2_001)
