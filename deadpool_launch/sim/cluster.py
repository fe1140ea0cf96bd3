"""The simulated cluster: all its parts, and the loop that lets things happen."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from deadpool_launch.controller.events import Finish, IncidentClosed
from deadpool_launch.controller.node import AgentStage
from deadpool_launch.controller.states import Phase
from deadpool_launch.controller.states import State as JobState
from deadpool_launch.sim.agents import Agent
from deadpool_launch.sim.arenas import Arenas
from deadpool_launch.sim.clock import EventQueue
from deadpool_launch.sim.copying import Copying
from deadpool_launch.sim.disk import Disk
from deadpool_launch.sim.launcher import Launcher
from deadpool_launch.sim.network import Network
from deadpool_launch.sim.promises import PromiseBroken, Promises
from deadpool_launch.sim.ranks import Process
from deadpool_launch.sim.scenario import CONFIRM_S, Scenario
from deadpool_launch.sim.striking import Striking
from deadpool_launch.sim.trace import Trace
from deadpool_launch.sim.training import Training
from deadpool_launch.sim.values import Layout, Lineages, State, mix

#: Long after every deadline of ``quick_config`` was used to its end many times.
END_OF_TIME_S = 1000.0


class Cluster:
    """One job on one cluster; ``run`` lets it come to its verdict."""

    def __init__(self, scenario: Scenario, *, trace: bool = False) -> None:
        self.scenario = scenario
        self.config = scenario.config
        self.confirm_s = CONFIRM_S
        self.end_of_time_s = END_OF_TIME_S
        self.queue = EventQueue(scenario.seed)
        self.trace = Trace(trace)
        self.layout = Layout(scenario.layout, self.config.world_size, self.config.nproc_per_node)
        self.lineages = Lineages()
        self.arenas = Arenas(self.layout)
        self.disk = Disk(self.config.world_size, scenario.checkpoint_every, self.lineages)
        self.network = Network(self.queue)
        self.promises = Promises(self)
        self.training = Training(self)
        self.copying = Copying(self)
        self.launcher = Launcher(self)
        self.striking = Striking(self, scenario.faults)
        self.agents: dict[str, Agent] = {}
        #: The newest process of each rank; older ones may be left where nobody reaches them.
        self.current: dict[int, Process] = {}
        #: Epoch before which nothing is written to the arena of a node any more.
        self.fenced: dict[str, int] = {}
        #: Nodes whose agent does not tell its copies, and those where processes never come up.
        self.mute: set[str] = set()
        self.slow_starts: set[str] = set()
        self._going_on: dict[int, int] = {}

    @property
    def dice(self) -> random.Random:
        """The job's only source of randomness."""
        return self.queue.dice

    def run(self) -> Finish:
        """Let everything happen until the verdict. Raises ``PromiseBroken`` or what the controller
        raises.
        """
        self.striking.start()
        self.launcher.start()
        while (finish := self.launcher.finish) is None:
            deadline, next_at = self.launcher.deadline(), self.queue.next_at
            if deadline is not None and (next_at is None or deadline <= next_at):
                self.queue.now = max(self.queue.now, deadline)
                self.launcher.tick()
            elif next_at is None:
                raise PromiseBroken(f"the job waits for nothing, phase {self._phase}")
            else:
                self.queue.run_next()
            if self.queue.now > self.end_of_time_s:
                raise PromiseBroken(f"the job does not end, phase {self._phase}")
        return finish

    @property
    def _phase(self) -> Phase:
        return self.launcher.state.phase

    # ------------------------------------------------------------ what parts ask for

    def processes(self) -> Iterator[Process]:
        """Every process of every agent, the newest of each rank there."""
        for agent in self.agents.values():
            yield from agent.processes.values()

    def came_up(self, process: Process) -> None:
        """A process was started. A node that was cut off may do so long after it was asked to."""
        there = self.current.get(process.rank)
        if there is None or there.born < process.born:
            self.current[process.rank] = process

    def came_to(self, phase: Phase) -> None:
        """The job comes to a phase."""
        self.striking.came_to(phase)

    def is_silent(self, node: str, since: float) -> bool:
        """Whether the launcher has heard nothing of the node since that time."""
        return node in self.arenas.dead or self.network.far.get(node, since + 1) <= since

    def reaches(self, node: str, other: str) -> bool:
        """Whether one node gets an answer from another."""
        return other not in self.arenas.dead and not {node, other} & self.network.apart

    def newest_whole(self, state: JobState, refused: frozenset[int]) -> int:
        """The newest step that can be had from the nodes that the launcher knows to live."""
        living = {n.name for n in state.nodes.values() if n.stage is AgentStage.WARM}
        present = {rank.rank: rank.adopts for rank in state.present()}
        return self.arenas.newest_whole(living, state.history, refused, present)

    def resumed(self, process: Process, epoch: int) -> None:
        """A rank goes on in this epoch; the first one to do so shows what all have.

        One that others have replaced, as on a node that thaws, shows nothing.
        """
        if self.current[process.rank] is process and epoch not in self._going_on:
            self._going_on[epoch] = process.rank
            states = {
                rank: each.state
                for rank, each in self.current.items()
                # One that died just now may have a successor, which has no part in this epoch.
                if rank not in process.aside and each.born <= epoch
            }
            self.promises.resumed(states, shrunk=bool(process.aside))

    def spoilt(self, rank: int, state: State) -> State:
        """The state with a wrong value wherever another rank would show it."""
        values = tuple(
            mix(value, rank + 1) if len(ranks) > 1 else value
            for ranks, value in zip(self.layout.segments[rank], state.values, strict=True)
        )
        return State(state.step, state.lineage, values, state.own)


@dataclass(frozen=True)
class Outcome:
    """What came of one job. ``broken``: the promise that was broken, if any was."""

    scenario: Scenario
    verdict: str
    reason: str
    broken: str
    virtual_s: float
    events: int
    incidents: int
    trace: tuple[str, ...]


def simulate(scenario: Scenario, *, trace: bool = False) -> Outcome:
    """Run one job; whatever goes wrong in it is in the outcome."""
    cluster = Cluster(scenario, trace=trace)
    broken = ""
    try:
        cluster.run()
    except Exception as error:  # the search must go on, whatever a defect raises
        broken = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        cluster.trace.note(cluster.queue.now, f"BROKEN {broken}")
    finish = cluster.launcher.finish
    closed = sum(isinstance(action, IncidentClosed) for action in cluster.launcher.actions)
    return Outcome(
        scenario=scenario,
        verdict="broken" if broken or finish is None else finish.verdict,
        reason=finish.reason if finish is not None else "",
        broken=broken,
        virtual_s=cluster.queue.now,
        events=cluster.launcher.events,
        incidents=closed,
        trace=tuple(cluster.trace.lines),
    )
