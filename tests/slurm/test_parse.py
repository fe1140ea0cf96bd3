"""Readers of Slurm's output, on what Slurm 22.05.8 and 25.11.7 printed, and on other shapes."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool_slurm import parse, submission
from deadpool_slurm.parse import Health
from deadpool_slurm.submission import SubmitText

RECORDED = Path(__file__).with_name("recorded")


def recorded(name: str, version: str = "22.05.8") -> str:
    """What a real Slurm printed."""
    return (RECORDED / f"{version}-{name}.txt").read_text()


def test_nodes_of_a_real_cluster() -> None:
    nodes = parse.parse_nodes(recorded("show-node"))
    assert list(nodes) == ["n1", "n2", "n3", "n4"]
    assert [node.health for node in nodes.values()] == [
        Health.OK,
        Health.CORDONED,
        Health.SUSPECT,
        Health.OK,
    ]
    assert nodes["n1"].address == "198.18.0.11"
    assert nodes["n1"].cpus == 8
    assert nodes["n2"].reason.startswith("mini cluster")


def test_a_cluster_of_slurm_25_11() -> None:
    job = parse.parse_job(recorded("show-job", "25.11.7"))
    assert job is not None
    assert (job.state, job.nodes, job.batch_host) == ("RUNNING", ("n1", "n2"), "n1")
    assert (job.end_time, job.work_dir, job.stepmgr) == (None, "/cluster/shared", False)
    nodes = parse.parse_nodes(recorded("show-node", "25.11.7"))
    assert [node.health for node in nodes.values()] == [Health.OK, Health.OK, Health.CORDONED]
    assert (nodes["n1"].address, nodes["n1"].cpus) == ("198.18.0.11", 8)
    config = parse.parse_config(recorded("show-config", "25.11.7"))
    assert (config["SLURM_VERSION"], config["KillOnBadExit"]) == ("25.11.7", "0")
    steps = parse.parse_steps(recorded("squeue-steps", "25.11.7"))
    assert steps == {"deadpool-n2-1": "1.0", "batch": "1.batch"}


def test_what_text_cuts_short_is_whole_in_json() -> None:
    job = parse.parse_job(recorded("show-job", "25.11.7"))
    assert job is not None
    assert job.submit_line is not None
    assert (job.submit_line[-3:], job.comment) == ("t=a", "a")
    line, comment = parse.parse_whole_values((RECORDED / "25.11.7-show-job.json").read_text())
    assert line is not None
    assert (line.endswith("/job.sh lr=3"), comment) == (True, "a b=c")


def test_sinfo_of_the_same_moment_agrees() -> None:
    nodes = parse.parse_nodes(recorded("show-node"))
    by_sinfo = parse.parse_sinfo(recorded("sinfo"))
    assert by_sinfo == {name: node.health for name, node in nodes.items()}


def test_job_of_a_real_cluster() -> None:
    job = parse.parse_job(recorded("show-job"))
    end = datetime(2027, 11, 30, 6, 40, 31)
    nodes = ("n1", "n2", "n3", "n4")
    assert job == parse.JobFacts(
        "1", "RUNNING", nodes, "n1", None, False, end, False, "/cluster/shared"
    )


def test_job_that_lost_a_node_has_only_the_others() -> None:
    job = parse.parse_job(recorded("show-job-after-resize"))
    assert job is not None
    assert job.nodes == ("n1", "n2", "n4")


def test_submit_line_of_later_versions() -> None:
    line = recorded("show-job").rstrip("\n") + " SubmitLine=sbatch -N4 --no-kill job.sh lr=3 Power="
    job = parse.parse_job(line)
    assert job is not None
    assert job.submit_line is not None
    assert job.submit_line.startswith("sbatch -N4 --no-kill job.sh")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        # 25.11 and later (data_parser v0.0.44, v0.0.45).
        (
            '{"jobs": [{"job_id": 7, "job_state": ["RUNNING"], "comment": "a b=c", '
            '"submit_line": "sbatch --comment=\\"a b=c\\" -k job.sh"}], "errors": []}',
            ('sbatch --comment="a b=c" -k job.sh', "a b=c"),
        ),
        # 23.02 (v0.0.39): a state is one word, and there is no submit line.
        ('{"jobs": [{"job_state": "RUNNING", "comment": "x"}]}', (None, "x")),
        # What there is not is empty.
        ('{"jobs": [{"comment": "", "submit_line": ""}]}', (None, None)),
        ('{"jobs": [{"comment": {"set": false}, "submit_line": 7}]}', (None, None)),
        ('{"jobs": []}', (None, None)),
        ('["jobs"]', (None, None)),
        ("scontrol: unrecognized option '--json'", (None, None)),
    ],
)
def test_values_that_text_cuts_short(text: str, values: tuple[str | None, str | None]) -> None:
    assert parse.parse_whole_values(text) == values


def test_job_made_with_stepmgr_is_known() -> None:
    job = parse.parse_job("JobId=9 JobState=RUNNING NodeList=a1 StepMgrEnabled=Yes BatchHost=a1")
    assert job is not None
    assert job.stepmgr


@pytest.mark.parametrize("text", ["", "slurm_load_jobs error: Invalid job id specified", "\n\n"])
def test_text_without_a_job_is_none(text: str) -> None:
    assert parse.parse_job(text) is None
    assert parse.parse_nodes(text) == {}


def test_config_of_a_real_cluster() -> None:
    config = parse.parse_config(recorded("show-config"))
    assert config["SLURM_VERSION"] == "22.05.8"
    assert config["KillOnBadExit"] == "0"
    assert config["SlurmdTimeout"] == "300 sec"
    assert config["SchedulerParameters"] == "batch_sched_delay=0,sched_interval=2,bf_interval=2"


def test_steps_by_name() -> None:
    assert parse.parse_steps(recorded("squeue-steps")) == {
        "deadpool-n2-1": "1.1",
        "batch": "1.batch",
    }


@pytest.mark.parametrize(
    ("state", "health"),
    [
        ("IDLE", Health.OK),
        ("allocated", Health.OK),
        ("MIXED+CLOUD", Health.OK),
        ("ALLOCATED+RESERVED+PLANNED", Health.OK),
        ("mixed-", Health.OK),
        ("idle#", Health.OK),
        ("COMPLETING", Health.OK),
        ("draining", Health.CORDONED),
        ("drained", Health.CORDONED),
        ("ALLOCATED+DRAIN", Health.CORDONED),
        ("ALLOCATED+MAINTENANCE", Health.CORDONED),
        ("IDLE+REBOOT_REQUESTED", Health.CORDONED),
        ("alloc@", Health.CORDONED),
        ("idle$", Health.CORDONED),
        ("IDLE+POWER_DOWN", Health.CORDONED),
        ("FAILING", Health.CORDONED),
        ("IDLE+BLOCKED", Health.CORDONED),
        ("alloc*", Health.SUSPECT),
        ("ALLOCATED+NOT_RESPONDING", Health.SUSPECT),
        ("ALLOCATED+DRAIN+NOT_RESPONDING", Health.SUSPECT),
        ("DOWN", Health.DEAD),
        ("down*", Health.DEAD),
        ("DOWN*+DRAIN", Health.DEAD),
        ("DOWN+DRAIN+NOT_RESPONDING", Health.DEAD),
        ("idle~", Health.DEAD),
        ("IDLE+CLOUD+POWERED_DOWN", Health.DEAD),
        ("IDLE+POWERING_DOWN", Health.DEAD),
        ("alloc^", Health.DEAD),
        ("IDLE+INVALID_REG", Health.DEAD),
        ("inval", Health.DEAD),
        ("ERROR", Health.DEAD),
        ("UNKNOWN", Health.DEAD),
        ("FUTURE", Health.DEAD),
        ("", Health.SUSPECT),
    ],
)
def test_health_of_each_spelling(state: str, health: Health) -> None:
    assert parse.health_of(state) is health


def test_worst_line_of_a_node_in_two_partitions_counts() -> None:
    assert parse.parse_sinfo("n1|idle|none\nn1|drained|bad\nn1|idle|none\n") == {
        "n1": Health.CORDONED
    }


@given(st.text())
def test_any_text_is_read_without_an_exception(text: str) -> None:
    parse.parse_job(text)
    parse.parse_nodes(text)
    parse.parse_config(text)
    parse.parse_steps(text)
    parse.parse_whole_values(text)
    parse.parse_sinfo(text)
    parse.expand_nodes(text)
    submission.asks_no_kill(submission.sbatch_options(text))
    submission.asks_no_kill(submission.submit_line_options(text))


@given(
    st.lists(
        st.tuples(st.sampled_from(["n", "gpu-", "x12c0s", "nid"]), st.integers(0, 2000)),
        min_size=1,
        unique=True,
    )
)
def test_expanding_a_folded_list_gives_the_same_nodes(parts: list[tuple[str, int]]) -> None:
    names = [f"{prefix}{number}" for prefix, number in parts]
    assert set(parse.expand_nodes(parse.fold_nodes(names))) == set(names)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n[1-3],m7", ("n1", "n2", "n3", "m7")),
        ("nid[000009-000011]", ("nid000009", "nid000010", "nid000011")),
        ("a[1,3]b[0-1]", ("a1b0", "a1b1", "a3b0", "a3b1")),
        ("login", ("login",)),
        ("n1,n1", ("n1",)),
        ("", ()),
        ("n[1-", ()),
    ],
)
def test_node_lists(text: str, names: tuple[str, ...]) -> None:
    assert parse.expand_nodes(text) == names


@pytest.mark.parametrize(
    ("script", "asked"),
    [
        ("#!/bin/bash\n#SBATCH --no-kill\nsrun x\n", True),
        ("#!/bin/bash\n#SBATCH -k\n", True),
        ("#!/bin/bash\n#SBATCH -N 4 -t 10 --no-kill --exclusive\n", True),
        ("#!/bin/bash\n#SBATCH -N4 -k # keep going\n", True),
        ("#!/bin/bash\n\n# a remark\n#SBATCH --no-kill\n", True),
        ("#!/bin/bash\n#SBATCH -Hk\n", True),
        ("#!/bin/bash\n#SBATCH --no-kil\n", True),
        ("#!/bin/bash\n#SBATCH --no-kill\n#SBATCH --no-kill=off\n", False),
        ("#!/bin/bash\n#SBATCH -k4\n", True),
        ("#!/bin/bash\n#SBATCH -koff\n", False),
        ("#!/bin/bash\n#SBATCH -N4\n", False),
        ("#!/bin/bash\n##SBATCH --no-kill\n", False),
        ("#!/bin/bash\n #SBATCH --no-kill\n", False),
        ("#!/bin/bash\n# SBATCH --no-kill\n", False),
        ("#!/bin/bash\n#SBATCH -N4 # --no-kill\n", False),
        ("#!/bin/bash\nmodule load x\n#SBATCH --no-kill\n", False),
        ("#!/bin/bash\n#SBATCH --job-name=--no-kill\n", False),
        ("#!/bin/bash\n#SBATCH --comment='keep --no-kill'\n", False),
        ("#!/bin/bash\n#SBATCH -J task\n", False),
        ("#!/bin/bash\n#SBATCH --no-requeue\n", False),
        ("", False),
    ],
)
def test_no_kill_in_a_batch_script(script: str, asked: bool) -> None:
    assert SubmitText(script, None).asks_no_kill() is asked


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ("sbatch --no-kill job.sh", True),
        ("/usr/bin/sbatch -N 4 --exclusive -k job.sh", True),
        ("salloc -N2 -k", True),
        ("sbatch -N4 job.sh --no-kill", False),
        ("sbatch --exclusive job.sh -k", False),
        ("sbatch -J -k job.sh", True),
        ("sbatch job.sh", False),
        ("", False),
    ],
)
def test_no_kill_in_a_submit_line(line: str, asked: bool) -> None:
    assert SubmitText(None, line).asks_no_kill() is asked


def test_submit_line_overrides_the_script() -> None:
    script = "#!/bin/bash\n#SBATCH --no-kill\n"
    assert not SubmitText(script, "sbatch --no-kill=off job.sh").asks_no_kill()
