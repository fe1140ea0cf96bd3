"""What the rows of ``deadpool preflight`` say: each check where all is well and where it is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from deadpool_launch.backends.base import Check
from deadpool_launch.exits import ExitCode, PreflightCode
from deadpool_launch.options import LaunchOptions
from deadpool_launch.plan import make_plan
from deadpool_launch.preflight import fabric_rules, room, rules, slurm_rules, table
from deadpool_launch.preflight.calls import to_call
from deadpool_launch.preflight.facts import Answers, Directories, Facts, MpiWorld, SlurmFacts
from deadpool_launch.sites.model import SiteConfig
from deadpool_launch.whatif.sizes import Layout, Model, sizes, sizes_of_rank
from deadpool_slurm import parse
from deadpool_slurm.mpi import parse_kinds
from deadpool_slurm.ways import Choice

NODES = ("n1", "n2", "n3")
CONFIG = {
    "SLURM_VERSION": "23.11.4",
    "SlurmdTimeout": "300 sec",
    "ReturnToService": "1",
    "KillOnBadExit": "0",
    "SlurmctldParameters": "(null)",
    "SwitchType": "switch/none",
    "SwitchParameters": "(null)",
}
SAID: dict[str, Any] = {
    "python": "3.11.7",
    "deadpool": "0.1.0",
    "torch": "2.13.0",
    "mpi4py": "4.1.0",
    "nccl": "2.28.9",
    "gpus": 0,
    "run_dir": "",
    "shm_free_nbytes": 8 << 30,
    "memory_nbytes": 8 << 30,
    "memory_limit": "what is free in /dev/shm",
    "calls": {"launcher": "", "unreached": [], "called": 2},
    "names": {"asked": False, "slowest_s": 0.0, "address": "", "done": True},
    "clock": 1000.0,
    "received_at": 1000.0,
}
LAYOUT = Layout(nodes=2, spares=1, nproc_per_node=2, sharding="ddp")
HEALTHY = {node: parse.NodeFacts(node, node, "IDLE", "", 4, parse.Health.OK) for node in NODES}
NOTHING_SAID = room.State()
DURABLE = {"checkpoint_dir": "/c", "checkpoint_every": 9}


def options(**changes: Any) -> LaunchOptions:
    return LaunchOptions(script="", site="slurm", **{"spares": 1, **changes})


def facts(
    config: dict[str, str] | None = None, *, world: MpiWorld | None = None, **changes: Any
) -> Facts:
    """A job of three nodes where all is well; ``changes``: of nodes by name, or of Slurm."""
    said = {node: {**SAID, "node": node, **changes.pop(node, {})} for node in NODES}
    job = parse.JobFacts("7", "RUNNING", NODES, "n1", None, changes.pop("stepmgr", False))
    known: dict[str, Any] = {"no_kill": "seen", "job": job, "nodes": HEALTHY, "mpi_kinds": ()}
    slurm = SlurmFacts(config={**CONFIG, **(config or {})}, **{**known, **changes})
    answers = Answers(
        own={**SAID, "node": "n1"}, asked=NODES, said=said, directories=Directories("/runs/7")
    )
    return Facts(nodes=NODES, slurm=slurm, answers=answers, world=world)


def told(
    found: Facts, state: room.State = NOTHING_SAID, **changes: Any
) -> dict[str, tuple[str, str]]:
    """Result and text by check; of several the first."""
    rows: dict[str, tuple[str, str]] = {}
    for check in rules.table(options(**changes), found, LAYOUT, state):
        rows.setdefault(check.name, (rules.result_of(check), check.text))
    return rows


def test_where_all_is_well_every_check_says_so() -> None:
    rows = told(facts())
    assert list(rows) == [
        *("Slurm version", "stepmgr", "--no-kill", "KillOnBadExit", "SlurmdTimeout"),
        *("ReturnToService", "network", "MPI kind", "node state", "nodes answer"),
        *("run directory", "libraries", "clock", "ports", "names of addresses", "memory", "NCCL"),
        "MPI world",
    ]
    assert {result for result, _ in rows.values()} == {"ok"}
    checks = rules.table(options(), facts(), LAYOUT, room.State())
    assert rules.verdict(checks) == ExitCode.OK
    assert rules.verdict_text(checks) == "Hot swap can work here."


def test_where_slurm_cannot_be_asked_nothing_else_is_judged() -> None:
    lost = facts(way=Choice("commands", "", "scontrol is not on the PATH"))
    for checks in (
        rules.table(options(), lost, LAYOUT, NOTHING_SAID),
        rules.at_start(NODES, options(), lost),
    ):
        (check,) = checks
        assert check.text == "Slurm cannot be asked: scontrol is not on the PATH"
        assert rules.verdict_text(checks) == "Hot swap cannot work here: Slurm access."


SLINGSHOT = {"SwitchType": "switch/hpe_slingshot", "SwitchParameters": "job_vni=all"}
LATE = "no answer within 10 s"
UNCALLED = {"calls": None}


def asked(slowest_s: float, *, done: bool = True) -> dict[str, Any]:
    """Of a node on which ranks ask for names."""
    return {"names": {"asked": True, "slowest_s": slowest_s, "address": "10.0.0.2", "done": done}}


@pytest.mark.parametrize(
    ("found", "check", "result", "text"),
    [
        (facts(way=Choice("pyslurm", "told")), "Slurm access", "ok", "by pyslurm, as told"),
        (facts(has_srun=False), "Slurm access", "fail", "srun is not on the PATH"),
        (facts({"SLURM_VERSION": "22.05.8"}), "Slurm version", "warn", "3 known defects around"),
        (facts({"SLURM_VERSION": "20.11.8"}), "Slurm version", "fail", "is too old"),
        (facts({"SLURM_VERSION": "?"}), "Slurm version", "warn", "does not say which version"),
        (facts(no_kill=None), "--no-kill", "fail", "does not seem to be submitted with"),
        (facts({"KillOnBadExit": "1"}), "KillOnBadExit", "ok", "turns that off"),
        (facts({"SlurmdTimeout": "0"}), "SlurmdTimeout", "warn", "never takes a silent node"),
        (facts({"SlurmdTimeout": "10 sec"}), "SlurmdTimeout", "warn", "silent for 10 s"),
        (facts({"SlurmdTimeout": ""}), "SlurmdTimeout", "unknown", "does not show it"),
        (facts({"ReturnToService": "2"}), "ReturnToService", "warn", "takes the job for ended"),
        (facts({"ReturnToService": "x"}), "ReturnToService", "unknown", "does not show it"),
        (
            facts({"SlurmctldParameters": "enable_stepmgr"}),
            *("stepmgr", "fail", "makes steps through the batch host"),
        ),
        (facts(stepmgr=True), "stepmgr", "fail", "submitted with --stepmgr"),
        (facts(SLINGSHOT), "network", "warn", "ask for no virtual network"),
        (
            facts(SLINGSHOT, network="job_vni,single_node_vni"),
            *("network", "warn", "does not allow single_node_vni (SwitchParameters)"),
        ),
        (facts(SLINGSHOT, network="job_vni"), "network", "ok", "which is allowed"),
        (facts(mpi_kinds=None), "MPI kind", "unknown", "names no kinds"),
        (facts(mpi_kinds=("pmi2",)), "MPI kind", "ok", "srun has pmi2, --mpi KIND sends them"),
        (facts(nodes={}), "node state", "warn", "Slurm says nothing about n1"),
        (facts(job_problem="asleep"), "node state", "unknown", "cannot be read: asleep"),
        (facts(n2={"run_dir": "is another"}), "run directory", "fail", "on n2 is another"),
        (facts(n2={"torch": "2.10.0"}), "torch", "fail", "n2 has torch 2.10.0"),
        (facts(n2={"mpi4py": None}), "mpi4py", "warn", "n2 has mpi4py None"),
        (facts(n2={"clock": 1060.0}), "clock", "warn", "differs from the launcher's by +60.0 s"),
        (
            facts(n2={"calls": {"launcher": LATE, "unreached": [], "called": 0}}),
            *("ports", "fail", f"n2 cannot reach the launcher ({LATE})"),
        ),
        (
            facts(n1={"calls": {"launcher": "", "unreached": ["n3"], "called": 2}}),
            *("ports", "fail", "n3 is not reached by n1"),
        ),
        (
            facts(n1=UNCALLED, n2=UNCALLED, n3=UNCALLED),
            *("ports", "unknown", "did not call each other"),
        ),
        (
            facts(n1=asked(0.001), n2=asked(0.002)),
            *("names of addresses", "ok", "n2 takes 2 ms to look up 10.0.0.2, and the store of"),
        ),
        (
            facts(n2=asked(0.3)),
            *("names of addresses", "warn", "one after the other: 1.2 s for 4 ranks"),
        ),
        (
            facts(n2=asked(5.0, done=False)),
            *("names of addresses", "warn", "n2 does not learn the names of two addresses within"),
        ),
        (facts(n3={"memory_nbytes": 64 << 20}), "memory", "ok", "n3 has 64 MiB (what is free"),
        (facts(n2={"gpus": 4, "nccl": "2.21.5"}), "NCCL", "warn", "NCCL 2.21.5 on n2: commun"),
        (facts(n2={"gpus": 4, "nccl": None}), "NCCL", "unknown", "no package brings it"),
        (facts(n2={"gpus": 4}), "NCCL", "warn", "2.28.9 has no known defect of abort, but"),
        (
            facts(world=MpiWorld("pmi2", 3, 0.84, "MPICH 4.2")),
            *("MPI world", "ok", "3 nodes were one world after 0.8 s (pmi2, MPICH 4.2)"),
        ),
        (
            facts(world=MpiWorld("pmi2", 3, 0.0, "", "n2: it was not up within 60 s")),
            *("MPI world", "warn", "no world with pmi2: n2: it was not up within 60 s"),
        ),
    ],
)
def test_what_is_not_as_it_should_be_is_told(
    found: Facts, check: str, result: str, text: str
) -> None:
    rows = told(found)
    assert rows[check][0] == result
    assert text in rows[check][1]


def test_what_cannot_be_read_of_slurm_is_not_taken_for_well() -> None:
    silent = SlurmFacts(config_problem="scontrol cannot be run", no_kill="seen")
    found = Facts(nodes=NODES, slurm=silent, answers=facts().answers)
    rows = told(found)
    assert rows["Slurm version"][0] == "unknown"
    assert "SlurmdTimeout" not in rows
    checks = rules.table(options(), found, LAYOUT, room.State())
    assert rules.verdict(checks) == PreflightCode.NOT_KNOWN


def test_outside_of_a_job_what_its_nodes_would_say_is_not_known() -> None:
    outside = Facts(slurm=SlurmFacts(config=CONFIG, mpi_kinds=("pmix",)))
    checks = rules.table(options(), outside, None, room.State())
    unknown = {check.name for check in checks if check.unknown}
    assert unknown == {
        *("--no-kill", "nodes answer", "run directory", "clock", "ports"),
        *("names of addresses", "NCCL", "MPI world", "memory"),
    }
    assert {check.remedy for check in checks if check.unknown} == {rules.RUN_INSIDE}
    assert rules.verdict(checks) == PreflightCode.NOT_KNOWN
    assert "not known: --no-kill, nodes answer, " in rules.verdict_text(checks)
    old = Facts(slurm=SlurmFacts(config={**CONFIG, "SLURM_VERSION": "20.11.8"}))
    checks = rules.table(options(), old, None, room.State())
    assert rules.verdict(checks) == ExitCode.UNSUITABLE
    assert rules.verdict_text(checks) == "Hot swap cannot work here: Slurm version."


def test_node_that_fails_alone_is_done_without() -> None:
    found = facts(n2={"torch": "2.10.0"})
    checks = rules.table(options(), found, LAYOUT, room.State())
    assert rules.verdict(checks) == ExitCode.OK
    assert rules.verdict_text(checks) == "Hot swap can work here, without n2."


def test_number_of_spares_is_a_check() -> None:
    with_one = make_plan(NODES, "n1", options())
    without = make_plan(NODES, "n1", options(spares=0))
    assert rules.plan_check(with_one, "").ok is True
    assert rules.plan_check(without, "").ok is None
    assert "the loss of a node ends the job" in rules.plan_check(without, "").text
    assert rules.plan_check(None, "too few").ok is False


@pytest.mark.parametrize(
    ("can_requeue", "changes", "remedy"),
    [
        (None, {}, "submit with sbatch --requeue, and have durable checkpoints (--checkpoint-dir)"),
        (False, DURABLE, "submit with sbatch --requeue"),
        (True, {}, "have durable checkpoints (--checkpoint-dir)"),
        (True, DURABLE, None),
        (False, {**DURABLE, "chain": "seven"}, None),
    ],
)
def test_early_return_of_the_batch_host_is_warned_of_where_something_can_be_done(
    can_requeue: bool | None, changes: dict[str, Any], remedy: str | None
) -> None:
    job = parse.JobFacts("7", "RUNNING", NODES, "n1", None, stepmgr=False, can_requeue=can_requeue)
    found = facts({"ReturnToService": "2"}, job=job)
    warned = rules.at_start(NODES, options(**changes), found)
    assert [each.remedy for each in warned if each.name == "ReturnToService"] == (
        [remedy] if remedy else []
    )
    row = next(
        each
        for each in rules.table(options(**changes), found, LAYOUT, NOTHING_SAID)
        if each.name == "ReturnToService"
    )
    assert "takes the job for ended" in row.text
    assert row.ok is (None if remedy else True)


def test_start_is_not_told_what_is_well_and_is_told_what_is_not() -> None:
    def at_start(found: Facts, **changes: Any) -> list[tuple[str, bool | None]]:
        checks = rules.at_start(NODES, options(**changes), found)
        return [(check.name, check.ok) for check in checks if check.ok is not True]

    assert at_start(facts()) == []
    assert at_start(facts({"ReturnToService": "2"})) == [("ReturnToService", None)]
    assert at_start(facts(n1={"gpus": 1, "nccl": "2.18.1"})) == [("NCCL", None)]
    assert at_start(facts(n3={"mpi4py": None})) == []
    assert at_start(facts(n3=asked(0.3)), nproc_per_node=2) == [("names of addresses", None)]
    assert at_start(facts(n3=asked(0.3)), nodes=1) == []
    assert at_start(facts(n3={"mpi4py": None}), mpi="pmi2") == [
        ("MPI kind", None),
        ("mpi4py", None),
    ]


# ---------------------------------------------------------------- MPI


LISTED = """\
MPI plugin types are...
\tnone
\tcray_shasta
\tpmi2
\tpmix
specific pmix plugin versions available: pmix_v4
"""


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (LISTED, ("cray_shasta", "pmi2", "pmix")),
        ("srun: MPI types are...\nsrun: none\nsrun: pmi2\n", ("pmi2",)),
        ("MPI plugin types are...\n\tnone\n", ()),
        ("srun: fatal: Could not establish a configuration source\n", None),
        ("", None),
    ],
)
def test_kinds_of_mpi_are_read(text: str, kinds: tuple[str, ...] | None) -> None:
    assert parse_kinds(text) == kinds


@pytest.mark.parametrize(
    ("asked", "of_the_site", "listed", "ok", "kind"),
    [
        ("pmix", (), ("pmi2",), None, None),
        ("pmi2", (), ("pmi2",), True, "pmi2"),
        ("none", ("cray_shasta",), ("pmi2",), None, None),
        ("none", ("pmix", "pmi2"), ("pmi2",), True, "pmi2"),
        ("none", (), ("pmi2",), True, None),
        ("pmi2", (), None, None, "pmi2"),
    ],
)
def test_kind_of_mpi_must_be_one_of_sruns(
    asked: str,
    of_the_site: tuple[str, ...],
    listed: tuple[str, ...] | None,
    ok: bool | None,
    kind: str | None,
) -> None:
    (check,) = slurm_rules.mpi_check(asked, of_the_site, listed)
    assert check.ok is ok
    assert slurm_rules.mpi_kind(asked, of_the_site, listed) == kind


def test_world_that_nobody_tried_is_explained() -> None:
    def text(asked: str = "none", mpi4py: str | None = "4", nodes: tuple[str, ...] = NODES) -> str:
        check = fabric_rules.world_check(None, asked, mpi4py, nodes)
        return f"{check.ok} {check.text}"

    assert text().startswith("True not tried, as no kind is named")
    assert text(nodes=("n1",)) == "True one node needs none"
    assert text(mpi4py=None).startswith("True mpi4py is not installed")
    assert text("pmi2", mpi4py=None).startswith("None mpi4py is not installed")


# ---------------------------------------------------------------- memory


def test_state_that_fits_does_and_a_little_more_does_not() -> None:
    for sharding in ("ddp", "fsdp"):
        layout = Layout(nodes=3, spares=1, nproc_per_node=4, sharding=sharding)
        most = room.fits_nbytes(layout, 64 << 30)
        assert most > 1 << 30
        assert sizes_of_rank(most, layout).memory_nbytes <= 64 << 30
        assert sizes_of_rank(most + (1 << 20), layout).memory_nbytes > 64 << 30
    assert room.fits_nbytes(LAYOUT, 1 << 10) == 0


@pytest.mark.parametrize("sharding", ["ddp", "fsdp", "hsdp"])
def test_bytes_of_a_rank_are_counted_like_the_model_that_has_them(sharding: str) -> None:
    layout = Layout(nodes=4, spares=1, nproc_per_node=2, sharding=sharding, shard=4)
    parts = {"ddp": 1, "fsdp": 8, "hsdp": 4}[sharding]
    model = Model(parameters=8 << 20)
    assert sizes_of_rank(12 * (8 << 20) // parts, layout) == sizes(model, layout)


def test_every_holder_takes_memory() -> None:
    one, two = (
        Layout(nodes=4, spares=1, nproc_per_node=1, sharding="fsdp", factor=factor)
        for factor in (1, 2)
    )
    found = [sizes_of_rank(1 << 30, layout) for layout in (one, two)]
    assert found[1].need.held_nbytes == pytest.approx(2 * found[0].need.held_nbytes, rel=0.01)
    assert found[1].sent_nbytes == pytest.approx(2 * found[0].sent_nbytes, rel=0.01)


def test_an_interval_takes_memory_for_more_copies_and_spares_without_an_agent_hold_none() -> None:
    layout = Layout(nodes=1, spares=1, nproc_per_node=1, sharding="fsdp")
    needs = [
        sizes_of_rank(1 << 30, replace(layout, interval=interval)).need for interval in (1, 2, 9)
    ]
    assert [need.copies for need in needs] == [3, 4, 5]
    assert needs[2].nbytes - needs[0].nbytes == 2 * needs[0].copy_nbytes
    assert sizes_of_rank(1 << 30, layout).sent_nbytes > 1 << 30
    assert sizes_of_rank(1 << 30, replace(layout, warm_spares=False)).sent_nbytes == 0


def test_memory_is_compared_with_the_state() -> None:
    small, large = room.State(rank_nbytes=64 << 20), room.State(rank_nbytes=8 << 30)
    assert told(facts(), small)["memory"][0] == "ok"
    result, text = told(facts(), large)["memory"]
    assert result == "fail"
    assert "n1 has 8 GiB (what is free in /dev/shm)" in text
    found = facts(n3={"memory_nbytes": 1 << 20})
    checks = rules.table(options(), found, LAYOUT, small)
    assert [check.leave_out for check in checks if check.ok is False] == ["n3"]
    # Nodes of one machine have its memory together.
    (alone,) = room.room_checks({"n1": SAID}, LAYOUT, small)
    (together,) = room.room_checks({"n1": SAID}, LAYOUT, small, sharers=64)
    assert (alone.ok, together.ok) == (True, False)


# ---------------------------------------------------------------- calls


@pytest.mark.parametrize("count", [2, 3, 17, 18, 64, 1000])
def test_every_node_is_called_by_as_many_as_it_calls(count: int) -> None:
    nodes = [f"n{number}" for number in range(count)]
    called = {node: to_call(node, nodes) for node in nodes}
    most = min(16, count - 1)
    by = [other for others in called.values() for other in others]
    assert {len(set(others) - {node}) for node, others in called.items()} == {most}
    assert {by.count(node) for node in nodes[:3]} == {most}


# ---------------------------------------------------------------- the table


def lines(checks: list[Check], width: int) -> list[str]:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table.draw(checks, width))
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [80, 120])
def test_table_keeps_its_width_and_names_what_to_do(width: int) -> None:
    checks = rules.table(
        options(site_config=SiteConfig(mpi_kinds=("pmix",))),
        facts({"ReturnToService": "2", "SLURM_VERSION": "20.11.8"}, no_kill=None),
        LAYOUT,
        room.State(),
    )
    text = lines(checks, width)
    assert max(map(len, text)) <= width
    assert "what to do" in text[0]
    assert ("what it means, and" in text[0]) == (width == 80)
    words = " ".join(" ".join(text).split())
    assert "#SBATCH" in words
    assert "fail" in words


def test_thousand_nodes_with_one_fault_are_a_few_rows() -> None:
    checks = [Check("torch", False, f"n{n} has none", leave_out=f"n{n}") for n in range(1000)]
    text = "\n".join(lines(checks, 80))
    assert text.count("torch") == 3
    assert "(and 997 more such, --json has them)" in " ".join(text.split())
    assert len(table.as_json(checks)) == 1000
