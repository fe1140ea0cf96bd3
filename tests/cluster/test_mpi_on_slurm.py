"""The MPI carrier on real Slurm: movers are a job step of their own, and what befalls them befalls
neither the ranks' steps nor the replicators.
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mini_cluster import MiniCluster
from mini_cluster_nodes import wait_until

from deadpool_runtime.replication.manifest import CHUNK_NBYTES

pytestmark = pytest.mark.cluster

SCRIPTS = Path(__file__).parents[1] / "scripts"
PATIENCE_S = 90.0
SMALL_NBYTES, LARGE_NBYTES = 64 << 20, 512 << 20
#: Stands for the ranks: one step on each node.
RANKS = """#!/bin/bash
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    srun --overlap --no-kill --mpi=none -N1 -n1 -w "$node" sleep 100000 &
done
while true; do sleep 1; done
"""


class End:
    """The replicator's part on one node, as a process there."""

    def __init__(self, slurm: MiniCluster, job: int, node: str, secret: Path) -> None:
        self.node = node
        argv = [
            *(sys.executable, str(SCRIPTS / "replicator_end.py")),
            *(str(job), node, str(secret)),
        ]
        pipe = subprocess.PIPE
        self.process = slurm.popen_on(node, argv, stdin=pipe, stdout=pipe)
        self.offer: str | None = None
        self.world_id: int | None = None
        self.events: list[dict[str, Any]] = []
        self.changed = threading.Condition()
        #: Told of each ticket and each chunk.
        self.on_event: Callable[[dict[str, Any]], None] = lambda event: None
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            with self.changed:
                if event["event"] == "offer":
                    self.offer, self.world_id = event["offer"], event["world_id"]
                elif event["event"] != "chunk":
                    self.events.append(event)
                self.changed.notify_all()
            self.on_event(event)

    def tell(self, *words: object) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(words) + "\n")
            self.process.stdin.flush()

    def wait(self, *kinds: str) -> dict[str, Any]:
        """The first event of one of these kinds, taken away."""

        def found() -> dict[str, Any] | None:
            return next((event for event in self.events if event["event"] in kinds), None)

        with self.changed:
            event = self.changed.wait_for(found, PATIENCE_S)
            assert event, f"{self.node}: none of {kinds} in {self.events}"
            self.events.remove(event)
            return event

    def wait_world(self, world_id: int | None) -> None:
        with self.changed:
            right = self.changed.wait_for(lambda: self.world_id == world_id, PATIENCE_S)
            assert right, f"{self.node}: world {self.world_id} instead of {world_id}"

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(PATIENCE_S)
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Movers:
    """A job with stand-ins for ranks, an end on every node, and the launcher's ``MoverStep``."""

    def __init__(self, slurm: MiniCluster, netmod: str) -> None:
        self.slurm = slurm
        self.job = slurm.submit(RANKS, nodes=4)
        self.nodes = ("n1", "n2", "n3", "n4")
        for node in self.nodes:
            self.wait_rank(node)
        self.log_dir = slurm.base / f"movers-{self.job}"
        self.log_dir.mkdir()
        secret = self.log_dir / "secret"
        secret.write_bytes(secrets.token_bytes(32))
        self.ends = {node: End(slurm, self.job, node, secret) for node in self.nodes}
        self.said: queue.Queue[str] = queue.Queue()
        argv = [
            *(sys.executable, str(SCRIPTS / "mover_launcher.py")),
            *(str(self.job), str(secret), str(self.log_dir), netmod),
        ]
        pipe = subprocess.PIPE
        self.launcher = slurm.popen_on("n1", argv, stdin=pipe, stdout=pipe)
        self._pump = threading.Thread(target=self._listen)
        self._pump.start()

    def _listen(self) -> None:
        assert self.launcher.stdout is not None
        for line in self.launcher.stdout:
            self.said.put(line.strip())

    def rank(self, node: str) -> list[int]:
        return [p.pid for p in self.slurm.find_processes(node, "sleep 100000") if p.name == "sleep"]

    def wait_rank(self, node: str) -> None:
        wait_until(lambda: self.rank(node), bool, what=f"rank on {node}", timeout_s=PATIENCE_S)

    def movers(self, node: str) -> list[int]:
        found = self.slurm.find_processes(node, "deadpool_runtime.replication.mover")
        return [process.pid for process in found if process.name.startswith("python")]

    def restart(self, epoch: int, *nodes: str) -> float:
        """Start a world and wait until it is up; seconds that took."""
        began_at = time.monotonic()
        assert self.launcher.stdin is not None
        self.launcher.stdin.write(" ".join([str(epoch), *nodes]) + "\n")
        self.launcher.stdin.flush()
        for node in nodes:
            self.ends[node].wait_world(epoch)
        return time.monotonic() - began_at

    def stream(self, source: str, target: str, nbytes: int) -> threading.Event:
        """Begin to move bytes; the event is set when it is well under way."""
        under_way = threading.Event()
        sender, receiver = self.ends[source], self.ends[target]

        def carry(event: dict[str, Any]) -> None:
            if event["event"] == "ticket":
                receiver.tell("ticket", event["ticket"], event["offset"])
                if event["offset"] >= 24 * CHUNK_NBYTES:
                    under_way.set()

        sender.on_event = carry
        receiver.tell("receive", sender.offer, "held-0-0", nbytes)
        sender.tell("send", receiver.offer, "own-0-0", nbytes)
        return under_way

    def whole(self, source: str, target: str) -> float:
        """Wait for the end of a stream and compare; GiB a second."""
        sent = self.ends[source].wait("sent", "broken")
        received = self.ends[target].wait("received", "broken")
        assert sent.get("sha") == received.get("sha", "none"), f"{sent} {received}\n{self.logs()}"
        return float(received["took_s"])

    def logs(self) -> str:
        """All that helps to understand a failed test."""
        paths = sorted(self.log_dir.glob("*.log*"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in paths)

    def close(self) -> None:
        assert self.launcher.stdin is not None
        self.launcher.stdin.close()
        self.launcher.wait(PATIENCE_S)
        self._pump.join()
        assert self.launcher.stdout is not None
        self.launcher.stdout.close()
        for end in self.ends.values():
            end.close()


@pytest.fixture
def movers(slurm: MiniCluster, request: pytest.FixtureRequest) -> Iterator[Movers]:
    running = Movers(slurm, getattr(request, "param", "ofi"))
    try:
        yield running
    finally:
        running.close()


@pytest.mark.matrix
@pytest.mark.parametrize("movers", ["ofi", "ucx"], indirect=True)
@pytest.mark.parametrize("fault", ["power_off", "vanish"])
def test_node_lost_in_the_middle_of_a_transfer(movers: Movers, fault: str) -> None:
    slurm, ends = movers.slurm, movers.ends
    up_s = movers.restart(1, "n1", "n2", "n3")
    ranks = {node: movers.rank(node) for node in ("n1", "n3", "n4")}

    movers.stream("n1", "n2", SMALL_NBYTES)
    movers.whole("n1", "n2")
    movers.stream("n2", "n1", SMALL_NBYTES)
    took_s = movers.whole("n2", "n1")

    assert movers.stream("n1", "n2", LARGE_NBYTES).wait(PATIENCE_S)
    getattr(slurm, fault)("n2")
    struck_at = time.monotonic()
    broken = ends["n1"].wait("broken", "sent")
    broken_s = time.monotonic() - struck_at
    assert broken["event"] == "broken", broken
    assert broken_s < 5.0 + 10.0
    assert ends["n1"].process.poll() is None
    assert ends["n3"].process.poll() is None

    again_s = movers.restart(2, "n1", "n3", "n4")
    assert "DOWN" not in slurm.node_state("n2")
    movers.stream("n4", "n1", SMALL_NBYTES)
    movers.whole("n4", "n1")
    movers.stream("n1", "n3", SMALL_NBYTES)
    movers.whole("n1", "n3")

    assert {node: movers.rank(node) for node in ranks} == ranks
    assert slurm.job_state(movers.job) == "RUNNING"
    assert {node: len(movers.movers(node)) for node in ranks} == dict.fromkeys(ranks, 1)
    print(
        f"world of 3 up after {up_s:.2f} s, {SMALL_NBYTES / took_s / 2**30:.2f} GiB/s, broken "
        f"{broken_s:.2f} s after the loss ({broken['reason']}), next world up {again_s:.2f} s "
        "after it was asked for"
    )


def test_a_killed_mover_ends_its_world_and_the_launcher_starts_another(movers: Movers) -> None:
    movers.restart(1, "n1", "n2", "n3")
    ranks = {node: movers.rank(node) for node in movers.nodes}
    (pid,) = movers.movers("n3")
    subprocess.run(["kill", "-9", str(pid)], check=True)
    for node in ("n1", "n2", "n3"):
        movers.ends[node].wait_world(2)
    movers.stream("n3", "n2", SMALL_NBYTES)
    movers.whole("n3", "n2")
    assert {node: movers.rank(node) for node in movers.nodes} == ranks
    assert movers.slurm.job_state(movers.job) == "RUNNING"


def test_an_mpi_kind_that_slurm_lacks_costs_one_line(slurm: MiniCluster) -> None:
    job = slurm.submit(RANKS, nodes=2)
    slurm.wait_job_state(job, "RUNNING", PATIENCE_S)
    log_dir = slurm.base / f"movers-{job}"
    log_dir.mkdir()
    (log_dir / "secret").write_bytes(bytes(32))
    script = (SCRIPTS / "mover_launcher.py").read_text().replace('"pmi2"', '"cray_shasta"')
    (log_dir / "launcher.py").write_text(script)
    with slurm.popen_on(
        "n1",
        [sys.executable, str(log_dir / "launcher.py"), str(job), "x", str(log_dir), "ofi"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as launcher:
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        launcher.stdin.write("1 n1 n2\n")
        launcher.stdin.flush()
        line = launcher.stdout.readline()
        launcher.stdin.close()
        rest = launcher.stdout.read()
    assert line.startswith("MPI cannot be used on these nodes (")
    assert "replicas go over TCP" in line
    assert rest == ""
