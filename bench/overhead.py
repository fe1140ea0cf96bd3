"""What protection costs while nothing fails, on the real mini cluster.

Two nodes, one rank a node. In each case the same processes train with and without copies of the
state by turns (see ``scripts/train_sized.py``); a step's time is set against that of its neighbours
of the other kind, and the ratio's 95 % interval comes from resampling whole blocks (bootstrap,
10,000 draws, fixed seed). No step is left out; the ratio of medians, which ignores outliers, stands
beside the ratio of means, which does not. Writes ``bench/results/overhead.json``.

The cases differ in how much is computed for each byte of state. A step of a dense transformer
takes about 6 operations for each parameter and token (Kaplan et al. 2020, section 2.1), so a rank
that copies B bytes for each of its parameters computes 6 * tokens / B operations a byte, ``tokens``
being those that pass through its parameters in a step. Published runs: Llama 3 405B, 16 M tokens a
step over 128 data-parallel groups (Grattafiori et al. 2024, table 4), so 131,000 tokens and, at 16
bytes, 49,000 operations a byte even if nothing were sharded; OLMo 7B, 4 M tokens a step on 216 to
1,024 GPUs (Groeneveld et al. 2024): 4,000 tokens a GPU or more, and sharding leaves 16/216 bytes.

Run it as root on a machine with nothing else to do: ``python bench/overhead.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
for folder in ("cluster", "support"):
    sys.path.insert(0, str(ROOT / "tests" / folder))

from mini_cluster import MiniCluster  # noqa: E402
from paired import ratios  # noqa: E402
from training_job import TrainingJob, submit  # noqa: E402

SCRIPT = Path(__file__).parent / "scripts" / "train_sized.py"
#: Steps before the first that is measured: copies begin, sizes become final.
WARM_UP = 3


@dataclass(frozen=True)
class Case:
    """One model in one layout, and how many tokens a rank takes in a step."""

    layout: str
    width: int
    layers: int
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.layout}, {self.layers} layers of {self.width}, {self.tokens} tokens"


CASES = (
    Case("ddp", 256, 4, 64),
    Case("ddp", 256, 4, 512),
    Case("ddp", 256, 4, 4096),
    Case("ddp", 512, 6, 512),
    Case("ddp", 512, 6, 2048),
    Case("zero1", 512, 6, 512),
    Case("zero1", 512, 6, 2048),
    Case("fsdp", 512, 6, 512),
    Case("fsdp", 512, 6, 2048),
    # A sixth of the operations a byte of the first run above, in steps short enough to be many.
    Case("ddp", 64, 2, 16_384),
    Case("zero1", 64, 2, 16_384),
    Case("fsdp", 64, 2, 16_384),
    # As many operations a byte as the runs above: little state, many tokens.
    Case("ddp", 64, 2, 98_304),
    Case("zero1", 64, 2, 98_304),
    Case("fsdp", 64, 2, 98_304),
)


def run(cluster: MiniCluster, case: Case, block: int, rounds: int) -> dict[str, Any]:
    """Train once; returns what the ranks wrote and what the processes beside them used."""
    job: TrainingJob = submit(
        cluster,
        nodes=2,
        launch=["--spares=0"],
        script=SCRIPT,
        script_args=[
            *(f"--layout={case.layout}", f"--width={case.width}", f"--layers={case.layers}"),
            *(f"--tokens={case.tokens}", f"--block={block}", f"--rounds={rounds}"),
            f"--out={cluster.base}",
        ],
    )
    job.wait_step(WARM_UP)
    before = helpers_cpu_s(cluster)
    steps = WARM_UP + 4 * rounds * block
    job.wait("the last step", lambda: job.records("step", step=steps, rank=0), timeout_s=3600)
    after = helpers_cpu_s(cluster)
    end = job.wait_end()
    if end["exit_code"] != 0:
        raise SystemExit(f"the job failed\n{job.everything()}")
    ranks = [json.loads((cluster.base / f"rank-{rank}.json").read_text()) for rank in range(2)]
    cluster.reset()
    used = {name: round(after[name] - before.get(name, 0.0), 3) for name in after}
    return {"ranks": ranks, "helpers_cpu_s": used, "copied_steps": 2 * rounds * block}


def helpers_cpu_s(cluster: MiniCluster) -> dict[str, float]:
    """CPU seconds of agents and replicators so far, all nodes together."""
    used = {"agent": 0.0, "replicator": 0.0}
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline())
            times = process.cpu_times()
        except psutil.Error:
            continue
        for name, module in (
            ("agent", "-m deadpool_launch.agent"),
            ("replicator", "-m deadpool_runtime.replication.replicator"),
        ):
            if module in words and "srun" not in words.split()[0]:
                used[name] += times.user + times.system
    return used


def summary(case: Case, result: dict[str, Any]) -> dict[str, Any]:
    """The figures of one case."""
    ranks = result["ranks"]
    kinds = ranks[0]["kinds"]
    # Both ranks take part in every step, so rank 0 tells the time of both.
    times = [end - start for start, end in pairwise(ranks[0]["starts"])]
    figures: dict[str, Any] = ratios(times, kinds, WARM_UP)
    copied = ranks[0]["segments"]
    nbytes = sum(copied.values())
    waits = [
        wait
        for rank in ranks
        for number, wait in enumerate(rank["blocked_s"])
        if number >= WARM_UP and kinds[number]
    ]
    alone = sum(size for key, size in copied.items() if "," not in key)
    operations = 6 * ranks[0]["parameters"] * case.tokens
    figures |= {
        "operations_a_byte": operations / nbytes,
        "d2h_nbytes_a_step": nbytes,
        "h2h_nbytes_a_step": alone,
        "arena_nbytes_a_node": 3 * (nbytes + alone),
        "blocked_ms_a_step": 1e3 * statistics.fmean(waits),
        "blocked_ms_worst": 1e3 * max(waits),
        "unprotected_steps": sum(rank["unprotected"] for rank in ranks),
        **{
            f"{name}_cpu_ms_a_step": 1e3 * value / len(kinds)
            for name, value in result["helpers_cpu_s"].items()
        },
    }
    return {name: round(value, 4) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--block", type=int, default=5, help="steps in a row of the same kind")
    parser.add_argument("--rounds", type=int, default=6, help="times with, without, without, with")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    options = parser.parse_args()
    print(
        f"{'case':<38}{'op/byte':>8}{'step ms':>9}{'ratio':>8}{'95 % interval':>17}"
        f"{'medians':>9}{'blocked ms':>12}{'unprotected':>13}"
    )
    with MiniCluster(nodes=2) as cluster:
        for case in CASES:
            if options.case not in case.name:
                continue
            figures = summary(case, run(cluster, case, options.block, options.rounds))
            write(case.name, figures, options)
            print(
                f"{case.name:<38}{figures['operations_a_byte']:>8.0f}"
                f"{1e3 * figures['median_step_s']:>9.1f}{figures['ratio_of_means']:>8.3f}"
                f"{figures['low']:>9.3f}-{figures['high']:<7.3f}"
                f"{figures['ratio_of_medians']:>9.3f}{figures['blocked_ms_a_step']:>12.2f}"
                f"{figures['unprotected_steps']:>13}",
                flush=True,
            )


def write(name: str, figures: dict[str, Any], options: argparse.Namespace) -> None:
    """Keep the figures with what they were measured on, beside those of other cases."""
    path = ROOT / "bench" / "results" / "overhead.json"
    path.parent.mkdir(exist_ok=True)
    before = json.loads(path.read_text())["results"] if path.exists() else {}
    record = {
        "command": "python bench/overhead.py --block BLOCK --rounds ROUNDS",
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "deadpool": version("deadpool-launch"),
        "results": {
            **before,
            name: {"block": options.block, "rounds": options.rounds, **figures},
        },
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
