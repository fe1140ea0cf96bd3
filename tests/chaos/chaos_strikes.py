"""How the faults of the table are brought about: each function strikes a run that was submitted."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

from chaos_machine import fill, memory_limit
from chaos_trial import Trial

STEP = 8
#: Much more than a rank takes for itself from one step to the next, much less than it would take.
MEMORY_NBYTES = 192 << 20
#: How long slurmctld is away.
AWAY_S = 60.0

Act = Callable[[Trial], None]


def nothing(trial: Trial) -> None:
    """What is to happen comes by itself."""


def held(fault: str) -> Act:
    """Strike rank 1 or its node while it stands still in its step."""

    def act(trial: Trial) -> None:
        trial.held(1, STEP)
        trial.node(fault, 1)

    return act


def ordered(rank: int, step: int, place: str, kind: str) -> Act:
    """The rank does it itself."""
    return lambda trial: trial.wait_order(rank, step, place, kind)


def out_of_memory(trial: Trial) -> None:
    trial.held(1, STEP)
    limit = memory_limit(trial.job.rank_process(1), MEMORY_NBYTES)
    try:
        trial.undo.enter_context(limit)
    except OSError as error:
        trial.told = f"cannot be made here: {error}"
        (trial.orders / f"1.{STEP + 1}.start.oom").unlink()
    trial.release(1, STEP, "backward")
    if not trial.told:
        trial.wait_order(1, STEP + 1, "start", "oom")
        trial.wait_closed()


def frozen_node(trial: Trial) -> None:
    trial.held(1, STEP)
    node = trial.node("freeze-node", 1)
    trial.wait_closed()
    trial.cluster.thaw(node)


def partition(*, heals: bool) -> Act:
    """Cut the node of rank 1 off."""

    def act(trial: Trial) -> None:
        trial.held(1, STEP)
        node = trial.job.node_of(1)
        trial.strike()
        trial.cluster.partition(node)
        if heals:
            trial.wait_closed()
            trial.cluster.heal(node)

    return act


def two_nodes(trial: Trial) -> None:
    trial.held(1, STEP)
    nodes = [trial.job.node_of(1), trial.job.node_of(2)]
    trial.strike()
    for node in nodes:
        trial.cluster.power_off(node)


def owner_and_holder(trial: Trial) -> None:
    trial.held(1, STEP)
    trial.wait("a checkpoint", lambda: trial.job.records("checkpoint"))
    two_nodes(trial)


def second_at(mark: str) -> Act:
    """Lose the node of rank 2 as the recovery of rank 1 comes to this mark."""

    def act(trial: Trial) -> None:
        trial.held(1, STEP)
        second = trial.job.node_of(2)
        trial.node("power-off", 1)
        trial.wait_mark(mark)
        trial.cluster.power_off(second)

    return act


def spare_refused(trial: Trial) -> None:
    trial.held(1, STEP)
    first = trial.job.records("job")[0]["spares"][0]
    (trial.cluster.base / f"refuse-{first}").touch()
    trial.node("power-off", 1)
    trial.wait_closed()
    assert trial.job.node_of(1) != first


def spare_dies(trial: Trial) -> None:
    trial.held(1, STEP)
    trial.node("power-off", 1)
    trial.held(1, 0, "build")
    trial.cluster.power_off(trial.job.node_of(1))
    trial.wait_closed()


def agent_killed(trial: Trial) -> None:
    trial.wait_step(STEP)
    trial.kill(trial.agent(trial.job.node_of(1)), signal.SIGKILL)


def replicators_killed(trial: Trial) -> None:
    trial.wait_step(STEP)
    victims = [
        process
        for node in trial.cluster.node_names
        for process in trial.helpers(node, "replication.replicator")
    ]
    trial.kill(victims, signal.SIGKILL)
    reason = "ended (signal 9)"

    def again() -> bool:
        found = trial.job.records("event", name="ReplicatorUp", reason=reason)
        return len(found) >= len(victims)

    trial.wait("new replicators", again, interval_s=0.1)
    trial.wait_step(trial.look().step + 10)
    trial.struck_at = None
    trial.node("power-off", 1)


def launcher_killed(trial: Trial) -> None:
    trial.wait_step(STEP)
    trial.strike()
    os.kill(trial.job.launcher_process(), signal.SIGKILL)
    trial.wait("the next launcher", lambda: trial.job.records("launcher"), interval_s=0.1)


def batch_host_off(trial: Trial) -> None:
    trial.wait("standby launchers", lambda: "standby launchers: " in trial.job.said())
    trial.wait_step(STEP)
    host = trial.cluster.job_info(trial.job.job_id).batch_host
    trial.strike()
    trial.cluster.power_off(host)
    trial.wait("the next launcher", lambda: trial.job.records("launcher"), interval_s=0.1)
    trial.stop_soon()


def controller_stopped(trial: Trial) -> None:
    trial.wait_step(STEP)
    trial.cluster.stop_controller()
    back_at = time.monotonic() + AWAY_S
    trial.undo.callback(_controller_on, trial)
    trial.node("power-off", 1)
    trial.wait_closed()
    trial.wait("a minute", lambda: time.monotonic() > back_at, interval_s=0.5)
    trial.cluster.start_controller()
    trial.stop_soon()


def _controller_on(trial: Trial) -> None:
    if trial.cluster.run_on("head", ["scontrol", "ping"]).returncode != 0:
        trial.cluster.start_controller()


def full_shm(*, active: bool) -> Act:
    """Leave no room in /dev/shm of the node of rank 1, or of the first spare."""

    def act(trial: Trial) -> None:
        trial.held(1, STEP)
        node = trial.job.node_of(1) if active else trial.job.records("job")[0]["spares"][0]
        used = "$(df --output=used -k /dev/shm | tail -1 | tr -d ' ')"
        trial.on_node(node, "sh", "-c", f"mount -o remount,size={used}k /dev/shm")
        trial.undo.callback(_whole_shm, trial, node)
        trial.node("kill" if active else "power-off", 1)
        trial.wait_closed()

    return act


def _whole_shm(trial: Trial, node: str) -> None:
    with contextlib.suppress(RuntimeError):
        trial.on_node(node, "mount", "-o", "remount,size=50%", "/dev/shm")


def full_disk(trial: Trial) -> None:
    trial.wait_step(STEP)
    pid = trial.job.rank_process(1)
    filler = fill(trial.job.run_dir.parent)
    try:
        before = trial.look().step
        trial.strike()
        os.kill(pid, signal.SIGKILL)
        trial.wait_digest(before + 30)
    finally:
        filler.unlink()
    trial.stop_soon()


def bit_flipped(trial: Trial) -> None:
    trial.held(1, STEP)
    flip(trial, 1, offset=4096 + 8, bit=3)
    trial.node("power-off", 1)


def flip(trial: Trial, rank: int, offset: int, bit: int) -> bool:
    """Flip a bit of the newest replica of a rank; False if there is none, or it is shorter."""
    replicas = trial.replicas(rank)
    if not replicas:
        return False
    with replicas[-1][1].open("r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, offset)
        if byte:
            os.pwrite(file.fileno(), bytes([byte[0] ^ (1 << bit)]), offset)
    return bool(byte)


def drained(trial: Trial) -> None:
    trial.wait_step(STEP)
    node = trial.job.node_of(1)
    trial.strike()
    trial.cluster.drain(node)
    trial.wait_closed()
    trial.stop_soon()


def cancelled(trial: Trial) -> None:
    trial.wait_step(STEP)
    trial.strike()
    trial.cluster.cancel(trial.job.job_id)
