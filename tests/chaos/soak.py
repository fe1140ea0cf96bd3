"""Job after job on a real Slurm cluster, each struck by faults that are drawn from a seed.

    python tests/chaos/soak.py --faults 300 --seed 1 --hours 2

Nodes that a job lost are there again for the next. Every step of every job is compared with an
undisturbed run. A hang, a wrong bit, a job that ends as it should not and anything that is left
on a node stop the soak with exit code 1 and the command that plays the job again. Needs root.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in ("chaos", "cluster", "support"):
    sys.path.insert(0, str(ROOT / "tests" / folder))

import chaos_draw  # noqa: E402
import chaos_trial  # noqa: E402
from chaos_draw import JobPlan, Strike  # noqa: E402
from chaos_machine import end_in_order  # noqa: E402
from chaos_outcome import Digests  # noqa: E402
from chaos_strikes import flip  # noqa: E402
from chaos_trial import Hang, Trial  # noqa: E402
from mini_cluster import MiniCluster  # noqa: E402

NODES = chaos_draw.RANKS + chaos_draw.SPARES
STEP_S = 0.03
LAUNCH = [f"--spares={chaos_draw.SPARES}", "--collective-timeout=12"]
#: From a fault to the end of its incident, at most.
INCIDENT_S = 120.0
#: How many steps a job goes on after its last fault.
LAST_STEPS = 30


class Player:
    """Brings the faults of one job about."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._cut_off: list[str] = []
        self.frozen: set[str] = set()
        #: Launchers that were started again before the one that is killed.
        self._terms = 0

    def play(self, plan: JobPlan, seen: collections.Counter[str]) -> None:
        """All of them; ``seen`` counts those that struck."""
        for strike in plan.strikes:
            self._whole(strike.after_steps)
            print(f"    step {self._trial.look().step}: {chaos_draw.describe(strike)}", flush=True)
            time.sleep(strike.delay_s)
            if strike.kind in chaos_draw.SILENT:
                self._silent(strike.kind, strike.rank)
            else:
                self._loud(strike)
                if strike.second is not None:
                    seen[f"second: {strike.second.kind}"] += 1
            seen[strike.kind] += 1
        self._whole(3)
        self._trial.stop_soon(LAST_STEPS)
        for node in self._cut_off:
            self._trial.cluster.heal(node)

    def _whole(self, steps: int) -> None:
        """Wait until the job has got over the last fault, every replica included, and has gone so
        many steps further.
        """
        trial = self._trial

        def settled() -> bool:
            found = list(trial.look().incidents.values())
            return all(one.verdict is not None for one in found) and (
                not found or any(r["phase"] == "redundancy restored" for r in found[-1].records)
            )

        trial.wait("the job is whole again", settled, INCIDENT_S)
        trial.wait_step(trial.look().step + steps)

    def _loud(self, strike: Strike) -> None:
        trial = self._trial
        before = len(trial.look().incidents)
        second = strike.second
        # Looked up first: once the fault has struck, a moment counts.
        act = None if second is None else self._prepare(second.kind, second.rank)
        self._strike(strike)
        if second is not None and act is not None:
            trial.wait_mark(second.mark, before + 1)
            act()
            if second.kind == "launcher":
                self._next_launcher()
        trial.wait(
            "an incident", lambda: len(trial.look().incidents) > before, timeout_s=INCIDENT_S
        )
        for incident in list(trial.look().incidents.values())[before:]:
            if incident.verdict not in (None, "continued"):
                raise Hang(f"incident {incident.number} ended: {incident.verdict}")

    def _strike(self, strike: Strike) -> None:
        trial, rank = self._trial, strike.rank
        if strike.kind in chaos_draw.ORDERED:
            place = "start" if strike.kind == "skip" else strike.place
            step = trial.look().step + 1
            trial.order(rank, step, place, strike.kind)
            trial.wait_order(rank, step, place, strike.kind)
        elif strike.kind == "flip":
            node = trial.job.node_of(rank)
            flip(trial, rank, *divmod(strike.offset, 8))
            trial.cluster.power_off(node)
        else:
            self._prepare(strike.kind, rank)()

    def _prepare(self, kind: str, rank: int) -> Callable[[], object]:
        """What brings the fault about, with everything looked up."""
        trial = self._trial
        if kind == "launcher":
            self._terms = len(trial.job.records("launcher"))
            pid = trial.job.launcher_process()
            return lambda: os.kill(pid, signal.SIGKILL)
        node = trial.job.node_of(rank)
        if kind in ("kill", "freeze"):
            pid = trial.job.rank_process(rank)
            number = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
            return lambda: _signal(pid, number)
        if kind == "agent":
            agents = trial.agent(node)
            return lambda: trial.kill(agents, signal.SIGKILL)
        if kind == "partition":
            self._cut_off.append(node)
            return lambda: trial.cluster.partition(node)
        if kind == "freeze-node":
            self.frozen.add(node)
        methods = {
            "power-off": trial.cluster.power_off,
            "vanish": trial.cluster.vanish,
            "freeze-node": trial.cluster.freeze,
        }
        return lambda: methods[kind](node)

    def _silent(self, kind: str, rank: int) -> None:
        """A fault that no rank notices; waits until what died is there again."""
        trial = self._trial
        if kind == "launcher":
            self._prepare(kind, rank)()
            self._next_launcher()
            return
        node = trial.job.node_of(rank)
        module = "replication.replicator" if kind == "replicator" else "deadpool_runtime.zygote"
        victims = trial.helpers(node, module)
        if kind == "parked":
            # Ranks are forked from it and have its command line; its own parent is the agent.
            agent = trial.agent(node)[0].pid
            victims = [one for one in victims if chaos_trial.parent(one.pid) == agent]
            ranks = {trial.job.rank_process(r) for r in range(chaos_draw.RANKS)}
            victims = [one for one in victims if one.pid not in ranks]
        old = {one.pid for one in victims}
        trial.kill(victims, signal.SIGKILL)

        def again() -> bool:
            return any(one.pid not in old for one in trial.helpers(node, module))

        trial.wait(f"the {kind} of {node} is there again", again, interval_s=0.2)

    def _next_launcher(self) -> None:
        trial = self._trial
        terms = self._terms

        def there() -> bool:
            return len(trial.job.records("launcher")) > terms

        trial.wait("the next launcher", there, interval_s=0.2)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def run_job(
    cluster: MiniCluster,
    plan: JobPlan,
    expected: Digests,
    seen: collections.Counter[str],
    keep: Path,
) -> str:
    """Run one job; what is wrong with it, in a sentence, or an empty text."""
    most = max(step for step, _ in expected[0])
    args = [f"--layout={plan.layout}", f"--steps={most}", f"--step-s={STEP_S}"]
    trial = chaos_trial.start(cluster, nodes=NODES, launch=LAUNCH, script_args=args)
    problem = ""
    player = Player(trial)
    try:
        trial.wait_ranks()
        player.play(plan, seen)
        trial.wait("the job's end", lambda: trial.look().end)
    except (Hang, AssertionError, RuntimeError, OSError) as error:
        problem = str(error).splitlines()[0]
    outcome = trial.outcome(expected, 30.0)
    if not problem and outcome.exit_code != 0:
        problem = f"exit code {outcome.exit_code}: {outcome.reason}"
    if not problem and outcome.difference:
        problem = outcome.difference
    if problem:
        problem += f" (end: {outcome.exit_code} {outcome.reason}); kept in "
        problem += str(trial.keep(keep, f"job-{plan.number}"))
    cluster.reset()
    # Slurm ends what is on a node that comes to life after its job, at times before the agent or
    # Slurm itself has deleted the arena there; the user's next agent on the node does.
    left = [
        one
        for one in chaos_trial.left_behind(cluster)
        if not any(one.startswith(f"{node}: file /dev/shm/deadpool-") for node in player.frozen)
    ]
    if left and not problem:
        problem = f"{'; '.join(left)}; kept in {trial.keep(keep, f'job-{plan.number}')}"
    return problem


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--faults", type=int, default=300, help="stop after so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hours", type=float, default=2.0, help="stop after so long")
    parser.add_argument(
        "--steps", type=int, default=3000, help="a job that comes to this step ends, struck or not"
    )
    parser.add_argument("--job", type=int, help="play this job only")
    parser.add_argument("--keep", type=Path, help="where a run that went wrong is copied to")
    options = parser.parse_args()
    keep = options.keep or Path(tempfile.gettempdir()) / "deadpool-soak-kept"
    seen: collections.Counter[str] = collections.Counter()
    began_at = time.monotonic()
    plans = chaos_draw.jobs(options.seed)
    if options.job is not None:
        plans = itertools.islice(plans, options.job, options.job + 1)
    problem, done = "", 0
    end_in_order()
    with MiniCluster(NODES) as cluster:
        expected: dict[str, Digests] = {}
        for plan in plans:
            over = time.monotonic() - began_at > options.hours * 3600
            if over or (options.job is None and seen.total() >= options.faults):
                break
            if plan.layout not in expected:
                expected[plan.layout] = chaos_trial.undisturbed(cluster, plan.layout, options.steps)
                cluster.reset()
            started_at = time.monotonic()
            print(f"job {plan.number} ({plan.layout}, {plan.faults} faults)", flush=True)
            problem = run_job(cluster, plan, expected[plan.layout], seen, keep)
            took_s = time.monotonic() - started_at
            print(f"  {problem or 'same bits'}; {took_s:.0f} s, {seen.total()} faults", flush=True)
            if problem:
                print(f"again: {' '.join(_again(options.seed, plan.number))}")
                break
            done += 1
    minutes = (time.monotonic() - began_at) / 60
    print(f"{seen.total()} faults in {done} whole jobs, {minutes:.1f} min: {dict(seen)}")
    sys.exit(1 if problem else 0)


def _again(seed: int, number: int) -> list[str]:
    return ["python", "tests/chaos/soak.py", f"--seed={seed}", f"--job={number}"]


if __name__ == "__main__":
    main()
