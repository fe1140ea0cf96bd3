"""The real driver and controller with thousands of scripted agents on this machine.

The agents are coroutines of a second process. They speak the real protocol over real, authenticated
connections and answer for their ranks as agents do; nothing trains. One of them goes away, a spare
takes its place, and it is measured how long each agent waits for what it is told: from the moment
at which the last thing happened that the launcher had to know, and from the decision, to the moment
at which the last agent has the order.

Larger clusters than this machine has memory for are simulated: the same controller, its decisions
timed, in a simulated cluster (``deadpool_launch/sim``), and the what-if simulation of a long job
(``deadpool simulate``).

Prints the figures and writes ``bench/results/scale.json``.

``python bench/scale.py [--agents 64 1024 4096] [--simulated 25000] [--nproc 4] [--steady 20]``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import records

from deadpool_launch import channel
from deadpool_launch.backends.base import AgentHandle, Allocation, Check, Sight
from deadpool_launch.controller.config import Config
from deadpool_launch.controller.driver import JobDriver
from deadpool_launch.driver import listen
from deadpool_launch.journal import Journal
from deadpool_launch.journal import read as read_journal
from deadpool_launch.options import LaunchOptions
from deadpool_launch.sim.scale import measure as measure_sim
from deadpool_launch.statelog import STATE_NAME, StateLog
from deadpool_launch.whatif.estimate import estimate
from deadpool_launch.whatif.faults import Renewal
from deadpool_launch.whatif.job import Job
from deadpool_launch.whatif.reading import NODE_MTBF_S
from deadpool_launch.whatif.strategies import DEADPOOL
from deadpool_runtime import protocol

AGENTS = records.ROOT / "bench" / "scripts" / "scripted_agents.py"
#: From the order that was decided on to the last agent that has it.
GOAL_S = 1.0
#: The phase of an incident with which each order was decided.
_DECIDED = {
    "Revoke": "detected",
    "TakeInventory": "spare ready",
    "Plan": "inventory",
    "Resume": "state restored",
}
_SPARES = 2
_HEARTBEAT_TIMEOUT_S = 30.0
_JOB_S = 600.0


@dataclass
class Figures:
    """What was measured. Times in seconds; ``told`` by order."""

    agents: int
    ranks: int
    #: From the start of the driver until every agent was told to begin training.
    start_s: float = 0.0
    #: Of one core, for the launcher, while every rank reports a step each ``step_s``.
    steady_cpu: float = 0.0
    #: Bytes a second over the loopback device meanwhile, in both directions, for each agent.
    steady_nbytes_an_agent: float = 0.0
    step_s: float = 0.0
    #: From what the launcher had to know last to the last agent that has the order.
    told_s: dict[str, float] = field(default_factory=dict)
    #: The part of it after the decision: from there on nothing has to be known any more.
    decided_s: dict[str, float] = field(default_factory=dict)
    #: From the loss until the last agent was told to go on.
    loss_to_resume_s: float = 0.0
    #: What the incident took on the wire to the agents, in bytes, and in orders.
    incident_nbytes: int = 0
    incident_orders: int = 0
    verdict: str = ""


class _Handle:
    """A scripted agent, which ends by itself."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        await self._ended.wait()
        return 0

    async def stop(self, grace_s: float) -> None:
        self._ended.set()

    def last_words(self) -> str:
        return ""

    def saved(self) -> dict[str, Any]:
        return {}


class ScriptedBackend:
    """``Backend`` that has an agent of the other process connect."""

    def __init__(self, agents: asyncio.subprocess.Process) -> None:
        self._agents = agents

    def discover(self, options: LaunchOptions) -> Allocation:
        raise AssertionError("the bench neither looks for nodes, nor takes over, nor requeues")

    async def preflight(self, options: LaunchOptions) -> list[Check]:
        return []

    async def start_agent(self, node: str, argv: Sequence[str], log_path: Path) -> AgentHandle:
        self.order("start", node)
        return _Handle()

    def restore(self, allocation: Allocation, term: int) -> None:
        raise AssertionError("the bench neither looks for nodes, nor takes over, nor requeues")

    def adopt(self, node: str, saved: Mapping[str, Any]) -> AgentHandle:
        raise AssertionError("the bench neither looks for nodes, nor takes over, nor requeues")

    def agent_command(self, node: str, argv: Sequence[str], log_path: Path) -> list[str]:
        return list(argv)

    def ends_at(self) -> float | None:
        return None

    def look(self, nodes: Sequence[str]) -> Sight | None:
        return None

    def requeue(self) -> None:
        raise AssertionError("the bench neither looks for nodes, nor takes over, nor requeues")

    def cancel_waiting(self, name: str) -> None: ...

    def comment(self, text: str) -> None:
        pass

    def leave(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def order(self, what: str, node: str) -> None:
        """Tell the process of the agents."""
        assert self._agents.stdin is not None
        self._agents.stdin.write(f"{what} {node}\n".encode())


async def measure(agents: int, nproc: int, steady_s: float, directory: Path) -> Figures:
    """Start a job, let it be for ``steady_s``, lose a node, and end it when it goes on."""
    _allow_descriptors(agents + _SPARES)
    step_s = max(1.0, agents * nproc / 4096)
    config = Config(
        active=tuple(f"n{i}" for i in range(agents)),
        spares=tuple(f"s{i}" for i in range(_SPARES)),
        nproc_per_node=nproc,
        heartbeat_timeout_s=_HEARTBEAT_TIMEOUT_S,
    )
    (directory / "logs").mkdir()
    secret = channel.write_secret(directory)
    listening = listen("127.0.0.1")
    host, port = listening.getsockname()[:2]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(AGENTS), host, str(port), str(directory), str(nproc), str(step_s)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 26,
    )
    backend = ScriptedBackend(process)
    journal = Journal(directory, lambda text: None)
    driver = JobDriver(
        config=config,
        backend=backend,
        journal=journal,
        spec=_spec(config, directory),
        secret=secret,
        state_log=StateLog(directory / STATE_NAME, b"", lambda why: None),
        listening=listening,
        run_dir=directory,
        agent_argv=lambda node, connect, epoch, term: [],
        launcher_host=host,
        fault_plan={},
    )
    driver.begin_log()
    figures = Figures(agents, config.world_size)
    figures.step_s = step_s
    began_at = time.monotonic()
    running = asyncio.create_task(driver.run())
    try:
        async with asyncio.timeout(_JOB_S):
            figures.start_s = await _heard(process, "training") - began_at
            used, since, carried = time.process_time(), time.monotonic(), _carried()
            await asyncio.sleep(steady_s)
            passed_s = time.monotonic() - since
            figures.steady_cpu = (time.process_time() - used) / passed_s
            figures.steady_nbytes_an_agent = (_carried() - carried) / passed_s / agents
            backend.order("lose", "n1")
            reporting = asyncio.create_task(_report(process))
            await asyncio.wait((reporting, running), return_when=asyncio.FIRST_COMPLETED)
            if not reporting.done():
                raise RuntimeError(f"the job ended before all were told to go on: {directory}")
            report = reporting.result()
            driver.request_stop(2)
            await running
    finally:
        running.cancel()
        process.terminate()
        await process.wait()
        journal.close()
    figures.told_s = {name: round(value, 4) for name, value in report["told_s"].items()}
    figures.loss_to_resume_s = report["loss_to_resume_s"]
    figures.incident_nbytes, figures.incident_orders = report["nbytes"], report["orders"]
    phases = {r["phase"]: r for r in read_journal(directory) if r["kind"] == "incident"}
    figures.decided_s = {
        order: round(report["told_at"][order] - phases[phase]["at"], 4)
        for order, phase in _DECIDED.items()
        if phase in phases
    }
    closed = [r for r in read_journal(directory) if r.get("phase") == "closed"]
    figures.verdict = closed[0]["verdict"] if closed else "not mended"
    return figures


async def _heard(process: asyncio.subprocess.Process, what: str) -> float:
    """When the agents' process said this first; what it says before is left out."""
    assert process.stdout is not None
    while line := await process.stdout.readline():
        word, _, rest = line.decode().partition(" ")
        if word == what:
            return float(rest)
    raise RuntimeError(f"the agents ended before they said {what}")


async def _report(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        word, _, rest = line.decode().partition(" ")
        if word == "report":
            found: dict[str, Any] = json.loads(rest)
            return found
    raise RuntimeError("the agents ended before the job went on")


def _spec(config: Config, directory: Path) -> protocol.JobSpec:
    return protocol.JobSpec(
        job_id="scale",
        run_dir=str(directory),
        script="",
        script_args=[],
        world_size=config.world_size,
        nproc_per_node=config.nproc_per_node,
        env={},
        heartbeat_s=_HEARTBEAT_TIMEOUT_S / 6,
        frozen_after_s=1.0,
        confirm_timeout_s=5.0,
        stop_grace_s=1.0,
        record_final_state=False,
        fault_steps={},
    )


def _carried() -> int:
    """Bytes that this machine has sent to itself so far."""
    sent: int = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
    return sent


def simulated(nodes: int, seeds: int = 3) -> dict[str, float]:
    """The controller's decisions in a job of so many nodes, and how long a what-if takes."""
    growth = measure_sim(nodes, 1)
    job = Job(100_000, 10.0, nodes, max(1, nodes // 100), 3600.0)
    begun = time.monotonic()
    found = estimate(job, Renewal(NODE_MTBF_S), DEADPOOL, range(seeds))
    return {
        "nodes": nodes,
        "events": growth.events,
        "decision_median_us": round(growth.median_us, 1),
        "decision_most_ms": round(growth.most_ms, 1),
        "incident_decisions_s": round(growth.incident_s, 3),
        "incident_messages": growth.incident_messages,
        "incident_mib": round(growth.incident_mib, 2),
        "what_if_s": round((time.monotonic() - begun) / seeds, 3),
        "what_if_faults": round(found.mean("faults").value, 1),
        "what_if_goodput": round(found.mean("goodput").value, 4),
    }


def _allow_descriptors(connections: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections + 256
    if soft < wanted:
        if hard < wanted:
            raise SystemExit(f"{wanted} descriptors are needed, the limit is {hard} (ulimit -Hn)")
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> None:
    """Measure and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--agents", type=int, nargs="*", default=[64, 256, 1024, 4096])
    parser.add_argument("--simulated", type=int, nargs="*", default=[1024, 4096, 25_000])
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--steady", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=records.RESULTS / "scale.json")
    options = parser.parse_args()
    command = f"python bench/scale.py --nproc {options.nproc} --steady {options.steady:g}"
    for agents in options.agents:
        with tempfile.TemporaryDirectory() as directory:
            measuring = measure(agents, options.nproc, options.steady, Path(directory))
            found = asyncio.run(measuring)
        records.keep(options.out, command, {f"{agents} agents": asdict(found)})
        worst, all_in_all = max(found.decided_s.values()), max(found.told_s.values())
        print(
            f"{agents} agents: start {found.start_s:.1f} s, steady {found.steady_cpu:.3f} of a"
            f" core, from a decision to the last agent at most {worst:.3f} s (goal {GOAL_S:g} s),"
            f" from the last word before it {all_in_all:.3f} s,"
            f" from the loss to the last that goes on {found.loss_to_resume_s:.2f} s",
            flush=True,
        )
    for nodes in options.simulated:
        result = simulated(nodes)
        records.keep(options.out, command, {f"{nodes} nodes, simulated": result})
        print(f"{nodes} nodes, simulated: {json.dumps(result)}", flush=True)


if __name__ == "__main__":
    main()
