"""How each fault strikes the simulated cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from deadpool_launch.controller.states import Phase
from deadpool_launch.sim.faults import DISK_KINDS, RANK_KINDS, Fault, FaultKind, Scope
from deadpool_launch.sim.modes import Mode
from deadpool_launch.sim.ranks import PEER_GONE, Process

if TYPE_CHECKING:
    from deadpool_launch.sim.cluster import Cluster

#: The longest that the last words of a process take that come late.
LATE_S = 1.0
#: How many times as long everything takes on a slow node.
SLOWER = 10.0


class Striking:
    """The faults of one job, each of which strikes once, if its target is there then."""

    def __init__(self, cluster: Cluster, faults: tuple[Fault, ...]) -> None:
        self._cluster = cluster
        self._queue = cluster.queue
        self._waiting = [fault for fault in faults if fault.phase is not None]
        self._timed = [fault for fault in faults if fault.phase is None]
        self._phases: dict[Phase, int] = {}

    def start(self) -> None:
        """The job begins."""
        for fault in self._timed:
            self._queue.later(fault.at, self.strike, fault)

    def came_to(self, phase: Phase) -> None:
        """The job comes to a phase."""
        count = self._phases[phase] = self._phases.get(phase, 0) + 1
        for fault in self._waiting:
            if fault.phase is phase and fault.nth == count:
                self._queue.later(fault.at, self.strike, fault)

    def strike(self, fault: Fault) -> None:
        """Bring the fault about."""
        if fault.kind is FaultKind.LIMIT:
            node, hit = "", True
            self._queue.later(0.0, self._cluster.launcher.limit_near)
        elif fault.kind in DISK_KINDS:
            node, hit = "", self._strike_disk(fault.kind)
        elif fault.kind in RANK_KINDS:
            process = self._cluster.current.get(int(fault.target))
            if process is None or process.mode is Mode.GONE:
                return
            node, hit = process.node, self._strike_process(fault.kind, process)
        else:
            node = fault.target
            hit = node not in self._cluster.arenas.dead and self._strike_node(fault, node)
        if hit:
            self._cluster.promises.hit(fault, node)
            self._cluster.trace.note(self._queue.now, str(fault))

    def _strike_disk(self, kind: FaultKind) -> bool:
        if kind is FaultKind.DISK:
            return self._cluster.disk.damage(self._cluster.dice)
        self._cluster.disk.full = True
        return self._cluster.disk.every > 0

    # ------------------------------------------------------------ nodes

    def _strike_node(self, fault: Fault, node: str) -> bool:
        cluster = self._cluster
        agent = cluster.agents.get(node)
        match fault.kind:
            case FaultKind.POWER:
                self._power_off(fault, node, seen=cluster.dice.random() < 0.5)
            case FaultKind.VANISH:
                self._power_off(fault, node, seen=False)
            case FaultKind.FREEZE_NODE:
                self._freeze_node(fault, node)
            case FaultKind.PARTITION:
                self._cut(fault, node)
            case FaultKind.SLOW:
                cluster.network.slow[node] = SLOWER
                if fault.for_s:
                    self._queue.later(fault.for_s, self._fast_again, node)
            case FaultKind.AGENT:
                if agent is None or not agent.alive:
                    return False
                agent.end(seen=True)
            case FaultKind.REPLICATOR:
                if agent is None or not agent.alive:
                    return False
                cluster.arenas.move_replicator(node)
                self._queue.later(self._queue.delay(), agent.new_replicator)
            case FaultKind.DAMAGE:
                kept = cluster.arenas.kept.get(node)
                if not kept:
                    return False
                cluster.dice.choice(sorted(kept.items(), key=lambda item: item[0]))[
                    1
                ].damaged = True
            case FaultKind.DRAIN:
                self._queue.later(0.0, cluster.launcher.drain, node)
            case FaultKind.MUTE:
                cluster.mute.add(node)
            case FaultKind.SRUN:
                cluster.launcher.slurm.bad.add(node)
            case FaultKind.SLOW_UP:
                cluster.slow_starts.add(node)
            case _:
                raise AssertionError(f"{fault.kind} strikes no node")
        return True

    def _power_off(self, fault: Fault, node: str, *, seen: bool) -> None:
        cluster = self._cluster
        cluster.arenas.dead.add(node)
        agent = cluster.agents.get(node)
        if agent is not None and agent.alive:
            if not seen:
                agent.watch_silence()
            agent.end(seen=seen)
        if fault.for_s:
            self._queue.later(fault.for_s, self._power_on, node)

    def _power_on(self, node: str) -> None:
        """The node has booted; who still waits for its agent learns that there is none."""
        cluster = self._cluster
        cluster.arenas.dead.discard(node)
        cluster.arenas.move_replicator(node)
        wire = cluster.network.wires.get(node)
        agent = cluster.agents.get(node)
        if wire is not None and wire.launcher_open and agent is not None and not agent.alive:
            cluster.launcher.lost(node, "agent connection closed", "seen")

    def _freeze_node(self, fault: Fault, node: str) -> None:
        self._cut(Fault(FaultKind.PARTITION, node, for_s=fault.for_s), node)
        agent = self._cluster.agents.get(node)
        stopped = [] if agent is None else [p for p in agent.processes.values() if not p.frozen]
        for process in stopped:
            process.freeze()
        if fault.for_s:
            self._queue.later(fault.for_s, self._thaw, stopped)

    def _thaw(self, processes: list[Process]) -> None:
        for process in processes:
            process.thaw()

    def _cut(self, fault: Fault, node: str) -> None:
        network = self._cluster.network
        network.cut(node, fault.scope)
        agent = self._cluster.agents.get(node)
        # Also one that has just ended: the launcher may never hear of that end.
        if fault.scope is not Scope.PEERS and agent is not None:
            agent.watch_silence()
        if fault.for_s:
            self._queue.later(fault.for_s, network.heal, node, fault.scope)

    def _fast_again(self, node: str) -> None:
        self._cluster.network.slow.pop(node, None)

    # ------------------------------------------------------------ processes

    def _strike_process(self, kind: FaultKind, process: Process) -> bool:
        match kind:
            case FaultKind.KILL:
                process.exit(signal=9)
            case FaultKind.LATE:
                process.exit(signal=9)
                self._queue.later(self._queue.delay(LATE_S), process.say_last)
            case FaultKind.FREEZE | FaultKind.UNKILLABLE:
                process.freeze()
                process.unkillable = kind is FaultKind.UNKILLABLE
                process.agent.watch_frozen(process)
            case FaultKind.DEAF:
                process.deaf = True
            case FaultKind.CORRUPT:
                process.corrupt = True
            case FaultKind.HANG | FaultKind.LOCK:
                if process.mode is not Mode.COMPUTE:
                    return False
                process.hung = True
                process.deaf = process.deaf or kind is FaultKind.LOCK
            case FaultKind.MESSAGE:
                if process.mode is not Mode.COLLECTIVE:
                    return False
                self._cluster.training.lose_message(process)
            case FaultKind.LINK:
                if process.mode is not Mode.COLLECTIVE or process.frozen:
                    return False
                process.raise_in_step(PEER_GONE)
            case FaultKind.RAISE:
                if process.mode is not Mode.COMPUTE or process.frozen:
                    return False
                process.raise_in_step("ValueError: no")
            case FaultKind.FAIL:
                if process.mode not in (Mode.SCRIPT, Mode.COMPUTE) or process.frozen:
                    return False
                process.fail("ValueError: no")
            case _:
                assert_never(kind)  # type: ignore[arg-type]
        return True
