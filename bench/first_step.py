"""How long a job stands still when a node or a process dies, on the real mini cluster.

Three active nodes and one spare, one rank a node, everything on this machine. Each case is run
several times, each time as a Slurm job of its own; the clock starts just before the fault and stops
when the last phase is reached. Prints a table (medians, and the slowest run) and writes
``bench/results/first_step.json``.

Run it as root: ``python bench/first_step.py [--runs 5]``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
for folder in ("cluster", "support"):
    sys.path.insert(0, str(ROOT / "tests" / folder))

import records  # noqa: E402
from mini_cluster import MiniCluster  # noqa: E402
from training_job import TrainingJob, submit  # noqa: E402

STEPS, FAULT_STEP, RANK = 10, 5, 1
#: Name of the case, fault, when the spare's agent starts, limit for the first step in seconds.
CASES = (
    ("power-off, spare at-start", "power-off", "at-start", 2.0),
    ("power-off, spare on-failure", "power-off", "on-failure", 8.0),
    ("vanish, spare at-start", "vanish", "at-start", 5.0),
    ("vanish, spare on-failure", "vanish", "on-failure", 11.0),
    ("kill of one process", "kill", "at-start", 2.0),
)
PHASES = (
    *("detected", "revoked", "parked", "spare ready", "plan"),
    *("groups rebuilt", "state restored", "first step"),
)


def one_run(cluster: MiniCluster, fault: str, spare_start: str) -> dict[str, float]:
    """Seconds from the fault to each phase."""
    job: TrainingJob = submit(
        cluster,
        launch=["--spares=1", f"--spare-start={spare_start}"],
        script_args=[f"--steps={STEPS}", f"--hold={RANK}:{FAULT_STEP}:backward"],
    )
    job.wait_held(RANK, FAULT_STEP)
    # The spare's parked process must be warm, as it is in any job older than a few seconds.
    if spare_start == "at-start":
        spare = job.records("job")[0]["spares"][0]
        job.wait("the spare is warm", lambda: job.records("event", name="AgentWarm", node=spare))
    quiet()
    job.strike(fault, RANK)
    end = job.wait_end()
    if end["exit_code"] != 0:
        raise SystemExit(f"the job failed\n{job.everything()}")
    phases = job.phases()
    cluster.reset()
    return {name: phases[name] for name in PHASES}


def quiet(limit: float = 1.0, patience_s: float = 60.0) -> None:
    """Wait until the machine has been idle enough for a second, so that start-up is over."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        before = os.times(), busy_s()
        time.sleep(1.0)
        if busy_s() - before[1] < limit * 0.3:
            return


def busy_s() -> float:
    """CPU seconds used by all processes of the machine so far."""
    fields = [int(text) for text in Path("/proc/stat").read_text().split("\n")[0].split()[1:8]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--case", help="only cases whose name contains this")
    parser.add_argument("--out", type=Path, default=records.RESULTS / "first_step.json")
    options = parser.parse_args()
    failed = []
    with MiniCluster(nodes=4) as cluster:
        for name, fault, spare_start, limit_s in CASES:
            if options.case and options.case not in name:
                continue
            runs = [one_run(cluster, fault, spare_start) for _ in range(options.runs)]
            medians = {
                phase: round(statistics.median(run[phase] for run in runs), 3) for phase in PHASES
            }
            slowest = max(run["first step"] for run in runs)
            records.keep(
                options.out,
                f"python bench/first_step.py --runs {options.runs}",
                {name: {"runs": runs, "median": medians, "limit_s": limit_s}},
            )
            print(f"\n{name}: median of {options.runs}, seconds after the fault")
            for phase in PHASES:
                print(f"  {phase:<16}{medians[phase]:8.3f}")
            print(
                f"  slowest first step {slowest:.3f}; limit for the median {limit_s:g}", flush=True
            )
            if medians["first step"] > limit_s:
                failed.append(name)
            if fault == "kill" and medians["parked"] > 0.5:
                failed.append(f"{name}: abort")
    if failed:
        raise SystemExit(f"over the limit: {', '.join(failed)}")


if __name__ == "__main__":
    main()
