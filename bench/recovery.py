"""What a fault costs the same training under DEADPOOL and under what people use today.

On the mini cluster, three nodes that train and a spare one. All systems run the same script
(``scripts/train_struck.py``) and are struck in the middle of a step; systems that go on from a
checkpoint are struck halfway between two of them. What was lost is read from the times of completed
steps, for all systems alike (``struck.py``), and the losses of all steps are compared with an
undisturbed run, bit for bit. Every run is a Slurm job of its own.

Faults: ``power-off`` and ``vanish`` of a node, ``kill`` of a process; under DEADPOOL also broken
connections of a rank (``cut``) and death of all processes at once (``kill-all``): to the other
systems these are what ``kill`` is, the end of all processes.

Run it as root on a machine with nothing else to do: ``python bench/recovery.py [--runs 5]``. Writes
``bench/results/recovery.json``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for folder in ("cluster", "support"):
    sys.path.insert(0, str(ROOT / "tests" / folder))

import records  # noqa: E402
import struck  # noqa: E402
import systems  # noqa: E402
from mini_cluster import MiniCluster  # noqa: E402
from mini_cluster_nodes import wait_until  # noqa: E402
from systems import AT_START, ON_FAILURE, REQUEUE, TORCHRUN, WORLD, Started, System  # noqa: E402
from training_job import bring_about, pid_on_host  # noqa: E402

STEP_S, EVERY, RANK = 0.5, 10, 1
#: The fault comes after a step that is half an interval behind a checkpoint, and not earlier.
EARLIEST = 15
#: Steps of the undisturbed run that losses are compared with.
REFERENCE_STEPS = 60
PATIENCE_S = 900.0

FAULTS = ("power-off", "vanish", "kill")
CASES: tuple[tuple[System, str], ...] = (
    *((system, fault) for fault in ("power-off", "vanish") for system in (AT_START, ON_FAILURE)),
    *((AT_START, fault) for fault in ("kill", "cut", "kill-all")),
    *((system, fault) for system in (TORCHRUN, REQUEUE) for fault in FAULTS),
)
#: What each number is, in the order of the table.
COLUMNS = {
    "detected_s": "detected",
    "restarted_s": "restarted",
    "resumed_s": "first step",
    "new_step_s": "new step",
    "replayed_steps": "replayed",
    "lost_s": "lost",
}
_numbers = itertools.count(1)


@dataclass
class Diary:
    """What the ranks of one job wrote so far."""

    folder: Path

    def lines(self) -> list[struck.Line]:
        """All lines, those of each rank in order; a line that is being written is left out."""
        found = []
        for path in sorted(self.folder.glob("rank-*.jsonl")):
            for text in path.read_text().splitlines(keepends=True):
                if text.endswith("\n"):
                    found.append(json.loads(text))
        return found

    def completed(self, since: float = 0.0) -> dict[int, float]:
        """When each step was completed, as far as that was after ``since``."""
        return struck.completions([each for each in self.lines() if each["at"] >= since], WORLD)

    def newest(self, rank: int) -> struck.Line:
        """Where the rank's newest process is."""
        return [e for e in self.lines() if (e["kind"], e["rank"]) == ("begun", rank)][-1]


def wait(what: str, holds: Callable[[], Any], started: Started) -> Any:
    """Wait until ``holds`` is true; otherwise all that the job said is shown."""
    try:
        return wait_until(holds, bool, what=what, timeout_s=PATIENCE_S, interval_s=0.05)
    except TimeoutError as error:
        raise SystemExit(f"{error}\n{started.said()}") from error


def begin(
    cluster: MiniCluster, system: System, *arguments: str, step_s: float = STEP_S
) -> tuple[Diary, Started]:
    """Start a job of the system."""
    folder = cluster.base / f"struck-{next(_numbers)}"
    folder.mkdir()
    given = [f"--out={folder}", f"--step-s={step_s}", f"--every={EVERY}", *arguments]
    return Diary(folder), system.start(cluster, folder, given)


def reference(cluster: MiniCluster) -> list[struck.Line]:
    """The lines of an undisturbed run, without sleeping."""
    diary, started = begin(cluster, TORCHRUN, f"--steps={REFERENCE_STEPS}", step_s=0.0)
    wait("the undisturbed run ends", lambda: REFERENCE_STEPS in diary.completed(), started)
    cluster.reset()
    return diary.lines()


def strike(cluster: MiniCluster, diary: Diary, started: Started, fault: str) -> float:
    """Bring the fault about in the middle of a step; returns when that was."""
    if fault == "cut":
        marks = wait(
            "the rank breaks its connections",
            lambda: [each["at"] for each in diary.lines() if each["kind"] == "struck"],
            started,
        )
        return float(marks[0])
    wait("the job is ready for a fault", started.ready, started)
    ranks = range(WORLD) if fault == "kill-all" else [RANK]
    places = [diary.newest(rank) for rank in ranks]
    pids = [pid_on_host(cluster, each["node"], each["pid"]) for each in places]
    reached = max(diary.completed())
    after = next(s for s in itertools.count(max(EARLIEST, reached + 2)) if s % EVERY == EVERY // 2)
    wait(f"step {after}", lambda: after in diary.completed(), started)
    time.sleep(STEP_S / 2)
    struck_at = time.time()
    for place, pid in zip(places, pids, strict=True):
        bring_about(cluster, fault.removesuffix("-all"), place["node"], pid)
    return struck_at


def one_run(
    cluster: MiniCluster, system: System, fault: str, undisturbed: Sequence[struck.Line]
) -> dict[str, Any]:
    """Strike one job and see what it lost."""
    cut = [f"--cut={RANK}:{EARLIEST + EVERY + 1}"] if fault == "cut" else []
    diary, started = begin(cluster, system, "--steps=100000", *cut)
    wait("the first steps", lambda: len(diary.completed()) > 3, started)
    wait("the job is ready for a fault", started.ready, started)
    struck_at = strike(cluster, diary, started, fault)
    last = max(each for each, at in diary.completed().items() if at < struck_at)
    wanted = last + struck.AHEAD
    wait(f"step {wanted}", lambda: wanted in diary.completed(struck_at), started)
    lines = diary.lines()
    found = struck.outcome(lines, struck_at, started.signs(), WORLD)
    told = started.told()
    if phases := told.pop("phases_at", None):
        told["phases_s"] = {name: round(at - struck_at, 3) for name, at in phases.items()}
    cluster.reset()
    return {**found.as_dict(), **told, "same_numbers": struck.same_numbers(lines, undisturbed)}


def measure(
    cluster: MiniCluster,
    system: System,
    fault: str,
    runs: int,
    undisturbed: Sequence[struck.Line],
) -> dict[str, Any]:
    """Several runs of one case, and what they have in common."""
    quick = systems.SLURMD_TIMEOUT_S
    if system.slurm_decides:
        cluster.set_slurmd_timeout(quick, message_timeout_s=quick)
    found = [one_run(cluster, system, fault, undisturbed) for _ in range(runs)]
    if system.slurm_decides:
        cluster.set_slurmd_timeout(300)
    return {
        "system": system.name,
        "fault": fault,
        "runs": found,
        "summary": struck.summary(
            [{name: run[name] for name in (*COLUMNS, "standstill_s", "step_s")} for run in found]
        ),
        "same_numbers": all(run["same_numbers"] for run in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument(
        "--missed",
        type=int,
        default=systems.MISSED,
        help="seconds of silence after which a node counts as lost; more on a busy machine",
    )
    parser.add_argument(
        "--peers",
        type=Path,
        metavar="PYTHON",
        help="also NVIDIA's launcher, of the environment that has this interpreter",
    )
    parser.add_argument("--out", type=Path, default=records.RESULTS / "recovery.json")
    options = parser.parse_args()
    systems.MISSED = options.missed
    wrong = []
    cases, visible = list(CASES), []
    if options.peers:
        visible = [options.peers.parents[1]]
        cases += [(systems.resiliency(str(options.peers)), fault) for fault in FAULTS]
    wait_s = systems.REQUEUE_WAIT_S
    with MiniCluster(nodes=WORLD + 1, requeue_wait_s=wait_s, visible=visible) as cluster:
        undisturbed = reference(cluster)
        print(f"{'':<40}" + "".join(f"{title:>12}" for title in COLUMNS.values()))
        for system, fault in cases:
            name = f"{system.name}: {fault}"
            if options.case not in name:
                continue
            result = measure(cluster, system, fault, options.runs, undisturbed)
            keep(options.out, {name: result}, [each for each, _ in cases], options)
            numbers = [result["summary"].get(key, {}).get("median") for key in COLUMNS]
            cells = ["-" if number is None else f"{number:.2f}" for number in numbers]
            print(f"{name:<40}" + "".join(f"{cell:>12}" for cell in cells), flush=True)
            if not result["same_numbers"]:
                wrong.append(name)
    if wrong:
        raise SystemExit(f"losses are not those of the undisturbed run: {', '.join(wrong)}")


def keep(
    path: Path,
    results: dict[str, Any],
    compared: Sequence[System],
    options: argparse.Namespace,
) -> None:
    """Write what was found, with how the systems are set up."""
    torchrun = shlex.join(systems.elastic_command(["torchrun"], ["..."]))
    records.keep(
        path,
        f"python bench/recovery.py --runs {options.runs}",
        results,
        step_s=STEP_S,
        checkpoint_every=EVERY,
        missed_s=options.missed,
        settings={
            **{system.name: system.settings for system in compared},
            "torchrun's command": f"`{torchrun.replace(f'{ROOT}/', '')}`",
        },
    )


if __name__ == "__main__":
    main()
