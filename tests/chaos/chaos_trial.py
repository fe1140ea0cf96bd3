"""One run on the mini cluster that is to go wrong: orders, strikes, waits, what came of it."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chaos_outcome
from mini_cluster import MiniCluster
from mini_cluster_nodes import NodeProcess, wait_until
from training_job import TrainingJob, submit

from deadpool_launch.follow import JournalTail
from deadpool_launch.view import RunView
from deadpool_runtime.replication.slots import SlotFile

SCRIPT = Path(__file__).parents[1] / "scripts" / "chaos_train.py"
RANKS = 3
#: For a machine that has other things to do.
PATIENCE = "--agent-start-timeout=300"
#: The longest that a single thing may take; longer is a hang. Until all ranks are there it is more,
#: as that is work for the whole machine.
LONG_S, START_S = 240.0, 600.0
#: From Slurm's word that a job has ended to the launcher's verdict, at most.
VERDICT_S = 30.0
#: How soon a mark in the journal is seen, at best.
_SOON_S = 0.001
#: How long processes of a job that has ended may take to be gone.
_CLEAN_S = 20.0

_numbers = itertools.count(1)


class Hang(Exception):
    """Something did not come about in time."""


@dataclass
class Trial:
    """A submitted job and the folder of its orders; see ``chaos_train.py``."""

    job: TrainingJob
    orders: Path
    #: What is to be undone once the job has ended.
    undo: contextlib.ExitStack
    view: RunView = field(default_factory=RunView)
    #: When the first fault struck, on the clock of the journal.
    struck_at: float | None = None
    #: What the table says instead of the incidents' verdicts.
    told: str = ""

    def __post_init__(self) -> None:
        self._tail = JournalTail(self.job.run_dir)

    @property
    def cluster(self) -> MiniCluster:
        return self.job.cluster

    # ------------------------------------------------------------ waiting

    def look(self) -> RunView:
        """The run as the journal tells it by now."""
        with contextlib.suppress(ValueError):  # a line that a full disk cut off
            self.view.apply_all(self._tail.records())
        return self.view

    def wait(
        self,
        what: str,
        holds: Callable[[], Any],
        timeout_s: float = LONG_S,
        interval_s: float = 0.02,
    ) -> Any:
        """What ``holds`` returns once that is true; Hang after the time, or if the job ends."""
        deadline = time.monotonic() + timeout_s
        while not (found := holds()):
            if self.look().end is not None and not (found := holds()):
                raise Hang(f"the job ended before {what}")
            if found:
                break
            if time.monotonic() > deadline:
                raise Hang(f"not within {timeout_s:g} s: {what}")
            time.sleep(interval_s)
        return found

    def wait_ranks(self) -> None:
        """Wait until every rank has a process."""
        self.wait("all ranks", lambda: len(self.look().ranks) == RANKS, START_S, interval_s=0.1)

    def wait_step(self, step: int, timeout_s: float = LONG_S) -> None:
        """Wait until every rank has completed the step."""
        self.wait(f"step {step}", lambda: self.look().step >= step, timeout_s)

    def wait_mark(self, phase: str, incident: int = 1) -> None:
        """Wait until the incident comes to a phase, and look very often."""

        def reached() -> bool:
            found = self.look().incidents.get(incident)
            return found is not None and any(r["phase"] == phase for r in found.records)

        self.wait(f"{phase} of incident {incident}", reached, interval_s=_SOON_S)

    def wait_closed(self, count: int = 1, timeout_s: float = LONG_S) -> None:
        """Wait until so many incidents have their verdict."""

        def closed() -> bool:
            return sum(i.verdict is not None for i in self.look().incidents.values()) >= count

        self.wait(f"verdict {count}", closed, timeout_s)

    def wait_event(self, name: str, **fields: Any) -> None:
        """Wait for an event of the journal."""
        self.wait(name, lambda: self.job.records("event", name=name, **fields), interval_s=0.1)

    def wait_digest(self, step: int) -> None:
        """Wait until every rank has completed the step, by what the ranks themselves write."""

        def reached() -> bool:
            return chaos_outcome.common_step(digests(self.orders)) >= step

        self.wait(f"step {step} of every rank", reached, interval_s=0.1)

    # ------------------------------------------------------------ striking

    def strike(self) -> None:
        """The first call notes the time of the fault."""
        if self.struck_at is None:
            self.struck_at = time.time()

    def order(self, rank: int, step: int, place: str, kind: str) -> Path:
        """Give an order; returns the file that says that it is being carried out."""
        path = self.orders / f"{rank}.{step}.{place}.{kind}"
        path.touch()
        return path.with_name(f"{path.name}.done")

    def wait_order(self, rank: int, step: int, place: str, kind: str) -> None:
        """Wait until an order is being carried out, which is the strike."""
        done = self.orders / f"{rank}.{step}.{place}.{kind}.done"
        self.wait(f"order {done.name}", done.exists)
        self.struck_at = self.struck_at or done.stat().st_ctime

    def held(self, rank: int, step: int, place: str = "backward") -> None:
        """Wait until a rank that was ordered to stand still does so."""
        path = self.orders / f"{rank}.{step}.{place}.hold.held"
        self.wait(f"rank {rank} stands still in step {step}", path.exists)

    def release(self, rank: int, step: int, place: str) -> None:
        """Let a rank that stands still go on."""
        (self.orders / f"{rank}.{step}.{place}.hold.release").touch()

    def node(self, fault: str, rank: int) -> str:
        """Strike the node or the process of a rank: see ``TrainingJob.strike``."""
        self.strike()
        return self.job.strike(fault, rank)

    def stop_soon(self, steps: int = 20) -> None:
        """Let the run end after a few more steps."""
        newest = max(lines[-1][0] for lines in digests(self.orders).values() if lines)
        path = self.orders / "stop"
        path.with_suffix(".new").write_text(str(newest + steps))
        path.with_suffix(".new").rename(path)

    def kill(self, processes: Sequence[NodeProcess], number: signal.Signals) -> None:
        """A signal to each of these processes."""
        self.strike()
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def helpers(self, node: str, module: str) -> list[NodeProcess]:
        """The processes of the job on a node that run this module."""
        return [
            process
            for process in self.cluster.find_processes(node, module)
            if process.name not in ("srun", "slurmstepd") and process.job_id == self.job.job_id
        ]

    def agent(self, node: str) -> list[NodeProcess]:
        """The node's agent."""
        return self.helpers(node, "deadpool_launch.agent")[:1]

    def replicas(self, rank: int) -> list[tuple[int, Path]]:
        """Step and file of each sealed replica of a rank, newest last."""
        found = []
        for node in self.cluster.node_names:
            for arena in self.cluster.private_files(node):
                for path in arena.glob(f"held-{rank}-*"):
                    with SlotFile.open(path) as slot:
                        sealed = slot.read()
                    if sealed is not None:
                        found.append((sealed[0].step, path))
        return sorted(found)

    def on_node(self, node: str, *argv: str) -> None:
        """Run a command on a node; RuntimeError if it fails."""
        done = self.cluster.run_on(node, argv)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(argv)} on {node}: {done.stderr.strip()}")

    # ------------------------------------------------------------ the end

    def outcome(self, expected: chaos_outcome.Digests, timeout_s: float) -> chaos_outcome.Outcome:
        """Wait for the job's end; what became of it. ``left`` is not known yet."""
        state = "RUNNING"
        with contextlib.suppress(TimeoutError):
            record = self.cluster.wait_job(self.job.job_id, timeout_s, accept_completing=True)
            state = record.state
            # At a time limit Slurm says so while the launcher still ends what it started.
            with contextlib.suppress(Hang):
                self.wait("the verdict", lambda: self.look().end, VERDICT_S, interval_s=0.1)
        records = _records(self.job)
        end = [record for record in records if record["kind"] == "end"]
        closed = chaos_outcome.incidents(records)
        firsts = [one.first_step_at for one in closed if one.first_step_at is not None]
        since = self.struck_at
        found = digests(self.orders)
        whole = bool(end) and end[0]["exit_code"] == 0
        difference = chaos_outcome.compare(expected, found, whole=whole)
        steps = chaos_outcome.common_step(found)
        return chaos_outcome.Outcome(
            exit_code=end[0]["exit_code"] if end else None,
            reason=end[0]["reason"] if end else "",
            incidents=closed,
            slurm_state=state,
            same_bits=not difference if steps else None,
            difference=difference,
            steps=steps,
            first_step_s=round(firsts[-1] - since, 2) if firsts and since is not None else None,
            left=(),
        )

    def keep(self, folder: Path, name: str) -> Path:
        """Copy what explains the run to a folder that outlives the cluster."""
        target = folder / name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.job.run_dir, target, ignore_dangling_symlinks=True)
        shutil.copytree(self.orders, target / "orders")
        (target / "output.txt").write_text(self.job.output())
        return target


def start(
    cluster: MiniCluster,
    *,
    orders: Sequence[tuple[int, int, str, str]] = (),
    nodes: int = 4,
    launch: Sequence[str] = (),
    script_args: Sequence[str] = (),
    sbatch: Sequence[str] = (),
    runs: Path | None = None,
) -> Trial:
    """Submit a run; ``orders`` are there before its first step: rank, step, place, kind."""
    folder = cluster.base / f"orders-{next(_numbers)}"
    folder.mkdir()
    for rank, step, place, kind in orders:
        (folder / f"{rank}.{step}.{place}.{kind}").touch()
    job = submit(
        cluster,
        nodes=nodes,
        launch=[PATIENCE, *launch],
        script=SCRIPT,
        script_args=[str(folder), *script_args],
        sbatch=sbatch,
        runs=runs,
    )
    return Trial(job, folder, contextlib.ExitStack())


def digests(orders: Path) -> chaos_outcome.Digests:
    """What the ranks have written so far."""
    paths = {rank: orders / f"digests-{rank}" for rank in range(RANKS)}
    return chaos_outcome.read_digests(
        {rank: path.read_text() if path.exists() else "" for rank, path in paths.items()}
    )


def undisturbed(cluster: MiniCluster, layout: str, steps: int) -> chaos_outcome.Digests:
    """The digests of a run to which nothing happens."""
    args = [f"--layout={layout}", f"--steps={steps}"]
    trial = start(cluster, launch=["--spares=1"], script_args=args)
    trial.wait(f"the end of {steps} steps", lambda: trial.look().end, timeout_s=600.0)
    found = digests(trial.orders)
    if trial.view.end is None or trial.view.end.exit_code or trial.view.incidents:
        raise SystemExit(f"the undisturbed run went wrong\n{trial.job.everything()}")
    assert chaos_outcome.common_step(found) == steps
    return found


def parent(pid: int) -> int:
    """The parent of a process of the host; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def left_behind(cluster: MiniCluster) -> tuple[str, ...]:
    """What is on the nodes once processes that are just ending have had time to do so."""
    with contextlib.suppress(TimeoutError):
        what = "nodes are clean"
        wait_until(cluster.leftovers, lambda left: not left, what=what, timeout_s=_CLEAN_S)
        return ()
    found = tuple(cluster.leftovers())
    cluster.sweep()
    return found


def _records(job: TrainingJob) -> list[dict[str, Any]]:
    with contextlib.suppress(ValueError):
        return job.records()
    return []
