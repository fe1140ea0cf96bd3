"""Rules: what a file may say, what each mistake is told as, and how conditions combine."""

from __future__ import annotations

from pathlib import Path

import pytest

from deadpool_launch.classify.model import Kind, Observation, Rule, Verdict, classify, count_alike
from deadpool_launch.classify.rules import all_rules, default_rules, load_rules, parse_rules
from deadpool_launch.errors import UsageError

RULE = "rules:\n  - {name: a, kind: job, reason: r, when: {%s}}\n"


def test_every_condition_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "rules:\n"
        "  - name: all-of-it\n"
        "    kind: transient\n"
        "    reason: because of\n"
        "      it.\n"
        "    when: {error: 'a.b', traceback: c, exit_code: [7, 8], signal: [SIGBUS, 9], xid: 79,\n"
        "           node_state: [down, DRAIN], everywhere: false, repeats: 3, time_left_s: 60}\n"
    )
    (rule,) = load_rules(path)
    assert rule == Rule(
        name="all-of-it",
        kind=Kind.TRANSIENT,
        reason="because of it",
        error="a.b",
        traceback="c",
        exit_codes=frozenset({7, 8}),
        signals=frozenset({7, 9}),
        xids=frozenset({79}),
        node_states=frozenset({"DOWN", "DRAIN"}),
        everywhere=False,
        repeats=3,
        time_left_s=60.0,
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rules: [", r"^f\.yaml, line 1: is not YAML"),
        ("", r"^f\.yaml: must begin with rules:"),
        ("rules: {}", r"^f\.yaml: must begin with rules:"),
        ("rules: []\nmore: 1", r"^f\.yaml: more is not a key here; valid are rules$"),
        ("rules: [1]", r"^f\.yaml: rule 1: is not a mapping with name, kind, reason, when"),
        ("rules: [{name: a, knd: job}]", r"rule a: knd is not a key here; valid are name, kind"),
        ("rules: [{name: a, kind: job}]", r"rule a: reason is missing"),
        (
            "rules: [{name: a, kind: bad, reason: r, when: {xid: 1}}]",
            r"rule a: kind is 'bad', must be transient, permanent, user, job or echo",
        ),
        ("rules: [{name: A b, kind: job, reason: r, when: {xid: 1}}]", r"name is 'A b', must"),
        (RULE % "", r"rule a: when must have at least one condition: error, traceback, exit_code"),
        (RULE % "eror: x", r"rule a: eror is not a key here; valid are error, traceback, exit_"),
        (RULE % "error: '(x'", r"rule a: error: '\(x' is not a regular expression \(missing \)"),
        (RULE % "error: 7", r"rule a: error: 7 must be a regular expression in quotes"),
        (RULE % "signal: SIGFOO", r"signal: 'SIGFOO' must be a signal by name"),
        (RULE % "signal: 900", r"signal: 900 must be a signal by name"),
        (RULE % "exit_code: [1, -1]", r"exit_code: -1 must be a whole number"),
        (RULE % "exit_code: []", r"exit_code: the list is empty"),
        (RULE % "xid: true", r"xid: True must be a whole number"),
        (RULE % "node_state: DOWN*", r"node_state: 'DOWN\*' must be a node state without marks"),
        (RULE % "everywhere: 1", r"everywhere: 1 must be true or false"),
        (RULE % "repeats: 1", r"repeats: 1 must be at least 2"),
        (RULE % "time_left_s: 0", r"time_left_s: 0 must be a number of seconds above 0"),
        (RULE % "xid: 1, xid: 2", r"line 2: is not YAML \(the key xid stands twice\)"),
        (
            RULE % "xid: 1" + "  - {name: a, kind: job, reason: r, when: {xid: 2}}",
            r"rule a: an earlier rule has the same name",
        ),
    ],
)
def test_mistake_is_told_with_file_rule_and_key(text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        parse_rules(text, "f.yaml")


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.yaml: cannot be read \(No such file"):
        load_rules(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UsageError, match=r"bad\.yaml, line 1: is not UTF-8"):
        load_rules(tmp_path / "bad.yaml")


def test_users_rules_come_before_the_packaged_ones(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "rules: [{name: mine, kind: transient, reason: ours, when: {error: No space left}}]"
    )
    seen = Observation(error="OSError: [Errno 28] No space left on device")
    assert classify(seen, all_rules(path)) == Verdict(Kind.TRANSIENT, "mine", "ours")
    packaged = classify(seen, all_rules(None))
    assert packaged is not None
    assert (packaged.kind, packaged.rule) == (Kind.JOB, "disk-full")


def test_all_conditions_must_hold() -> None:
    rule = Rule("r", Kind.USER, "", error="boom", exit_codes=frozenset({3}))
    assert rule.fits(Observation(error="boom", exit_code=3))
    assert not rule.fits(Observation(error="boom"))
    assert not rule.fits(Observation(error="bang", exit_code=3))


def test_unknown_fits_no_condition() -> None:
    nothing = Observation()
    for rule in default_rules():
        assert not rule.fits(nothing), rule.name


def test_exit_code_of_a_shell_is_a_signal_too() -> None:
    killed = Rule("r", Kind.USER, "", signals=frozenset({9}))
    assert killed.fits(Observation(exit_code=137))
    assert killed.fits(Observation(signal=9))
    assert not killed.fits(Observation(exit_code=9))
    assert not killed.fits(Observation(exit_code=255))


def test_marks_of_node_states_are_not_compared() -> None:
    rule = Rule("r", Kind.PERMANENT, "", node_states=frozenset({"DOWN", "DRAIN"}))
    assert rule.fits(Observation(node_state="down*"))
    assert rule.fits(Observation(node_state="IDLE+DRAIN"))
    assert not rule.fits(Observation(node_state="IDLE"))


def test_a_job_of_one_rank_shows_nothing_everywhere() -> None:
    rule = Rule("r", Kind.JOB, "", everywhere=True)
    assert rule.fits(Observation(ranks_alike=4, ranks=4))
    assert not rule.fits(Observation(ranks_alike=3, ranks=4))
    assert not rule.fits(Observation(ranks_alike=1, ranks=1))


def test_errors_are_alike_but_for_numbers_and_the_types_module() -> None:
    shown = ["a.b.Bad: rank 1 at 0xff", "Bad: rank 2 at 0x1a", "Worse: rank 3 at 0xff"]
    assert count_alike("Bad: rank 7 at 0x0", shown) == 2


@pytest.mark.parametrize(
    ("seen", "rule"),
    [
        # The clock decides whether it was the time limit, and 143 alone never is.
        (Observation(error="CANCELLED AT 12 DUE TO TIME LIMIT", time_left_s=-3), "walltime"),
        (Observation(error="CANCELLED AT 12 DUE TO TIME LIMIT", time_left_s=40_000), "cancelled"),
        (Observation(error="CANCELLED AT 12 DUE TO TIME LIMIT"), "cancelled"),
        (Observation(exit_code=143), "ended-on-request"),
        (Observation(exit_code=143, time_left_s=42_000), "ended-on-request"),
        (Observation(exit_code=143, time_left_s=-1), "walltime-signal"),
        (Observation(error="std::bad_alloc", exit_code=143), "host-out-of-memory"),
        (Observation(exit_code=137), "killed"),
        # A script makes these itself, unless the driver says that the hardware did.
        (Observation(error="CUDA error: an illegal memory access was en"), "cuda-bad-access"),
        (
            Observation(error="CUDA error: an illegal memory access", xids=frozenset({31})),
            "cuda-bad-access",
        ),
        (
            Observation(error="CUDA error: an illegal memory access", xids=frozenset({31, 79})),
            "xid-hardware",
        ),
        # The same at the same step again is not hardware, on all ranks no node's.
        (Observation(error="uncorrectable ECC error"), "gpu-ecc"),
        (Observation(error="uncorrectable ECC error", times_at_step=2), "same-fault-same-step"),
        (
            Observation(error="no CUDA-capable device is detected", ranks_alike=8, ranks=8),
            "same-error-everywhere",
        ),
        (Observation(error="ImportError: no", ranks_alike=8, ranks=8), "import"),
        (Observation(error="OSError: [Errno 28] No space", ranks_alike=8, ranks=8), "disk-full"),
        # An echo stays one however many show it, however often.
        (
            Observation(error="Connection closed by peer", ranks_alike=8, ranks=8, times_at_step=2),
            "connection-lost",
        ),
        (Observation(node_state="DOWN*+DRAIN"), "node-state"),
    ],
)
def test_packaged_rules_weigh_the_evidence(seen: Observation, rule: str) -> None:
    verdict = classify(seen, default_rules())
    assert verdict is not None
    assert verdict.rule == rule
