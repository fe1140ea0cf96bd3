"""An operator at a real launcher's port: what is answered, by whom, and when the launcher leads no
more.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from job_specs import job_spec

from deadpool_launch import channel, operators
from deadpool_launch.backends.local import LocalBackend
from deadpool_launch.controller import events
from deadpool_launch.controller.config import Config
from deadpool_launch.controller.driver import JobDriver
from deadpool_launch.journal import Journal
from deadpool_launch.questions import Questions
from deadpool_launch.statelog import StateLog
from deadpool_launch.succession import result
from deadpool_runtime import protocol

LONG_S = 120.0
DRAIN = protocol.DrainNode("n1", "fan 2")
STANDING = protocol.JobStanding("training", 1, 1, 7, {"n1": "active"}, 1, False, None)


def asked_of(
    question: protocol.Question, host: str, act: Callable[[Questions, int], None]
) -> protocol.Answer:
    """What the operator hears when ``act`` follows on the question."""

    async def ask() -> protocol.Answer:
        questions = Questions(
            lambda event: act(questions, _request(event)), lambda: 0.0, lambda: STANDING, host
        )
        async with asyncio.timeout(LONG_S):
            return await questions.ask(question)

    return asyncio.run(ask())


def _request(event: events.Event) -> int:
    assert isinstance(event, events.DrainRequested)
    return event.request


def moves(questions: Questions, request: int) -> None:
    questions.answered(events.Answered(request, True, "rank 0 will move to a spare"))


def test_drain_of_the_launchers_own_node_says_that_the_launcher_stays() -> None:
    text = "rank 0 will move to a spare"
    assert asked_of(DRAIN, "n2", moves) == protocol.Done(text)
    assert asked_of(DRAIN, "n1", moves) == protocol.Done(
        f"{text}; the launcher stays on n1 until the job ends, so leave the node running until then"
    )


def test_how_the_job_stands_is_answered_without_a_turn_of_the_controller() -> None:
    assert asked_of(protocol.AskStanding(), "n1", moves) == STANDING


def test_node_that_is_not_drained_is_left_running_anyway() -> None:
    def denied(questions: Questions, request: int) -> None:
        questions.answered(events.Answered(request, False, "no spare is left"))

    assert asked_of(DRAIN, "n1", denied) == protocol.Denied("no spare is left")


@pytest.mark.parametrize("before", [True, False], ids=["waits already", "comes later"])
def test_operator_of_a_launcher_that_leads_no_more_is_told_so(tmp_path: Path, before: bool) -> None:
    """Nothing but this launcher answers, and it never comes to the question."""
    (tmp_path / "logs").mkdir()
    secret = channel.write_secret(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        answer, code = asyncio.run(_superseded(tmp_path, secret, listening, before))
    assert answer == protocol.Denied("the launcher on n2 leads this job now: ask once more")
    assert code == 7


async def _superseded(
    run_dir: Path, secret: bytes, listening: socket.socket, before: bool
) -> tuple[protocol.Answer, int]:
    driver = _driver(run_dir, secret, listening)
    await driver._server.listen(listening)
    host, port = listening.getsockname()
    waiting = [asyncio.create_task(operators._ask(host, port, secret, DRAIN))] if before else []
    async with asyncio.timeout(LONG_S):
        while before and driver._queue.empty():
            await asyncio.sleep(0.01)
        standing_by = asyncio.create_task(driver.stand_by("n2"))
        while not result.somebody_waits(run_dir):
            await asyncio.sleep(0.01)
        answer = await (waiting[0] if before else driver._questions.ask(DRAIN))
        result.record(run_dir, result.Result("completed", 7, "", "n2", 2))
        return answer, await standing_by


def _driver(run_dir: Path, secret: bytes, listening: socket.socket) -> JobDriver:
    return JobDriver(
        config=Config(("n1",), (), 1),
        backend=LocalBackend(),
        journal=Journal(run_dir, print),
        spec=job_spec(run_dir=str(run_dir)),
        secret=secret,
        state_log=StateLog(run_dir / "launcher.state", b"", print),
        listening=listening,
        run_dir=run_dir,
        agent_argv=lambda *_: [],
        launcher_host="127.0.0.1",
        fault_plan={},
    )
