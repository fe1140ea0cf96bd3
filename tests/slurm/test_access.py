"""How the way to ask Slurm is chosen, and pyslurm in its child process, on stand-ins for it."""

from __future__ import annotations

import signal
import sys
import textwrap
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_slurm import access, parse, pyslurm_child, ways
from deadpool_slurm.client import EndStep, SlurmError
from deadpool_slurm.commands import CommandLineClient, complaint
from deadpool_slurm.pyslurm_client import PyslurmClient, job_facts
from deadpool_slurm.ways import Choice, choose

USABLE, NOT_INSTALLED = "", "it is not installed"


@pytest.mark.parametrize(
    ("asked", "absent", "why_not", "chosen"),
    [
        (None, [], NOT_INSTALLED, Choice("commands", "they are on the PATH")),
        (None, ["scontrol"], USABLE, Choice("pyslurm", "scontrol is not on the PATH")),
        (
            None,
            ["scontrol", "squeue"],
            NOT_INSTALLED,
            Choice(
                "commands",
                "",
                "scontrol and squeue are not on the PATH, and pyslurm cannot be used "
                "(it is not installed)",
            ),
        ),
        ("pyslurm", [], USABLE, Choice("pyslurm", "DEADPOOL_SLURM_ACCESS says so")),
        (
            "pyslurm",
            [],
            NOT_INSTALLED,
            Choice(
                "pyslurm",
                "DEADPOOL_SLURM_ACCESS says so",
                "pyslurm, which DEADPOOL_SLURM_ACCESS asks for, cannot be used "
                "(it is not installed)",
            ),
        ),
        ("commands", [], USABLE, Choice("commands", "DEADPOOL_SLURM_ACCESS says so")),
        (
            "commands",
            ["scancel"],
            USABLE,
            Choice("commands", "DEADPOOL_SLURM_ACCESS says so", "scancel is not on the PATH"),
        ),
    ],
)
def test_choice(asked: str | None, absent: Sequence[str], why_not: str, chosen: Choice) -> None:
    assert choose(asked, absent, lambda: why_not) == chosen


def test_pyslurm_is_not_tried_where_the_commands_are() -> None:
    def probe() -> str:
        raise AssertionError

    assert choose(None, [], probe).way == ways.COMMANDS


def test_another_way_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ways.BadAccess, match="DEADPOOL_SLURM_ACCESS=rest: must be commands or"):
        access.find({"DEADPOOL_SLURM_ACCESS": "rest"})


def stand_in(folder: Path, code: str) -> dict[str, str]:
    """An environment without Slurm's commands and with a pyslurm of this code."""
    package = folder / "modules" / "pyslurm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(textwrap.dedent(code))
    return {
        "PATH": str(folder),
        "PYTHONPATH": str(package.parent),
        "DEADPOOL_PYSLURM_PYTHON": sys.executable,
    }


def test_without_the_commands_a_pyslurm_that_can_be_imported_is_taken(tmp_path: Path) -> None:
    client, choice = access.find(
        stand_in(tmp_path, "__version__ = '25.11.2'\nclass PyslurmError(Exception): ...")
    )
    assert isinstance(client, PyslurmClient)
    assert client.version() == "25.11.2"
    assert choice.reason == "scontrol and squeue and scancel are not on the PATH"


FATAL = (
    "import os\nos.write(2, b'fatal: Could not establish a configuration source\\n')\nos._exit(1)"
)


def test_a_pyslurm_that_ends_its_process_is_not_taken(tmp_path: Path) -> None:
    client, choice = access.find(stand_in(tmp_path, FATAL))
    assert isinstance(client, CommandLineClient)
    assert "(fatal: Could not establish a configuration source)" in choice.missing


def test_a_pyslurm_that_does_not_answer_has_a_deadline(tmp_path: Path) -> None:
    client = PyslurmClient(stand_in(tmp_path, "import time\ntime.sleep(600)"), timeout_s=0.2)
    with pytest.raises(SlurmError, match=r"pyslurm did not answer within 0\.2 s"):
        client.steps("7")


def test_what_a_pyslurm_prints_is_no_answer(tmp_path: Path) -> None:
    code = """\
        import os
        os.write(1, b"noise")
        __version__ = "25.11.2"
        class PyslurmError(Exception): ...
        class RPCError(PyslurmError): ...
        class Node:
            name, address, total_cpus = "n1", "10.0.0.1", 4
            state, reason = "IDLE+DRAIN", "x"
        class Nodes:
            @staticmethod
            def load(): return {"n1": Node}
        class Job:
            @staticmethod
            def load(job_id): raise RPCError(f"Invalid job id specified: {job_id}")
        """
    client = PyslurmClient(stand_in(tmp_path, code))
    assert client.nodes(["n1", "n2"]) == {
        "n1": parse.NodeFacts("n1", "10.0.0.1", "IDLE+DRAIN", "x", 4, parse.Health.CORDONED)
    }
    with pytest.raises(SlurmError, match=r"^pyslurm: Invalid job id specified: 7$"):
        client.job("7")


def test_a_job_without_a_limit_has_no_end() -> None:
    told = {"state": "RUNNING", "nodes": "n[1-2]", "end_time": 1_800_000_000, "time_limit": None}
    assert job_facts("7", told).end_time is None
    limited = job_facts("7", {**told, "time_limit": 60})
    assert limited.end_time == datetime.fromtimestamp(1_800_000_000)
    assert limited.nodes == ("n1", "n2")


class Refusal(Exception):
    """Of pyslurm, for ``PyslurmError`` and ``RPCError`` both."""


class Step:
    def __init__(self, name: str) -> None:
        self.name = name
        self.signals: list[int] = []

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


def ask(steps: Any, **question: Any) -> dict[str, Any]:
    """Ask a pyslurm whose jobs have these steps."""
    slurm = SimpleNamespace(
        PyslurmError=Refusal, RPCError=Refusal, JobSteps=SimpleNamespace(load=steps)
    )
    return pyslurm_child.answer(slurm, question)


def test_of_steps_with_one_name_the_last_is_signalled() -> None:
    steps = {0: Step("agent"), 1: Step("agent"), 2: Step("other")}
    asked = {"ask": "end_step", "job_id": 7, "signal_name": "TERM"}
    assert ask(lambda job_id: steps, name="agent", **asked) == {"value": True}
    assert [step.signals for step in steps.values()] == [[], [signal.SIGTERM], []]
    assert ask(lambda job_id: steps, name="none", **asked) == {"value": False}


def test_a_job_without_steps_is_told_from_no_answer() -> None:
    def refuse(text: str) -> Any:
        raise Refusal(text)

    none = ask(lambda job_id: refuse("Failed to load step info for Job 7."), ask="steps", job_id=7)
    assert none == {"value": []}
    away = ask(lambda job_id: refuse("Unable to contact slurm controller"), ask="steps", job_id=7)
    assert away == {"error": "Unable to contact slurm controller"}


def test_a_step_that_ends_with_its_signal_was_there() -> None:
    class Ending(Step):
        def send_signal(self, number: int) -> None:
            steps.clear()
            raise Refusal("Invalid job id specified")

    steps: dict[int, Step] = {0: Ending("agent")}
    asked = {"ask": "end_step", "job_id": 7, "name": "agent", "signal_name": "TERM"}
    assert ask(lambda job_id: steps, **asked) == {"value": True}


def test_each_change_has_its_question(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def note(self: PyslurmClient, what: str, **about: Any) -> bool:
        asked.append((what, about))
        return True

    monkeypatch.setattr(PyslurmClient, "_ask", note)
    assert PyslurmClient({}).do(EndStep("7", "agent", "KILL"))
    assert asked == [("end_step", {"job_id": 7, "name": "agent", "signal_name": "KILL"})]
    with pytest.raises(SlurmError, match="none is no number"):
        PyslurmClient({}).job("none")


def test_what_a_command_complains_of_is_one_line_without_its_name() -> None:
    wrote = (
        "scontrol: error: fetch_config: DNS SRV lookup failed\n\n"
        "scontrol: fatal: Could not establish a configuration source\n"
    )
    assert complaint("scontrol", wrote) == (
        "fetch_config: DNS SRV lookup failed; Could not establish a configuration source"
    )
    assert complaint("scontrol", "slurm_load_jobs error: Invalid job id specified\n") == (
        "slurm_load_jobs error: Invalid job id specified"
    )
