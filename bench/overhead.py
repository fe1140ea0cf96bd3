"""What protection costs while nothing fails, on the real mini cluster.

In each case the same processes train with and without copies of the state by turns (see
``scripts/train_sized.py``); a step's time is set against that of its neighbours of the other kind,
and the ratio's 95 % interval comes from resampling whole blocks (bootstrap, 10,000 draws, fixed
seed). No step is left out; the ratio of medians, which ignores outliers, stands beside the ratio of
means, which does not. Writes ``bench/results/overhead.json``.

There are two sets of cases. *Sizes*: two nodes, one rank a node, and models that differ in how much
is computed for each byte of state. *Layouts*: every kind of parallelism on 1, 2 and 4 nodes with as
much work for each rank; there, by turns as well, every step is also followed by a checkpoint of
``torch.distributed.checkpoint``, to memory and to disk. All nodes share this machine's cores.

A step of a dense transformer takes about 6 operations for each parameter and token (Kaplan et al.
2020, section 2.1), so a rank that copies B bytes for each of its parameters computes 6 * tokens / B
operations a byte, ``tokens`` being those that pass through its parameters in a step. Published
runs: Llama 3 405B, 16 M tokens a step over 128 data-parallel groups (Grattafiori et al. 2024, table
4), so 131,000 tokens and, at 16 bytes, 49,000 operations a byte even if nothing were sharded; OLMo
7B, 4 M tokens a step on 216 to 1,024 GPUs (Groeneveld et al. 2024): 4,000 tokens a GPU or more, and
sharding leaves 16/216 bytes.

Run it as root on a machine with nothing else to do: ``python bench/overhead.py``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
for folder in ("cluster", "support"):
    sys.path.insert(0, str(ROOT / "tests" / folder))

import records  # noqa: E402
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
    nodes: int = 2
    nproc: int = 1
    #: Kinds of steps that take turns.
    kinds: tuple[str, ...] = ("copies", "plain")

    @property
    def name(self) -> str:
        """As it is written down."""
        if len(self.kinds) > 2:
            return f"{self.layout}, {self.nodes} nodes of {self.nproc}"
        return f"{self.layout}, {self.layers} layers of {self.width}, {self.tokens} tokens"

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.nodes * self.nproc


SIZES = (
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
#: Layouts, ranks on each node, and numbers of nodes. With two ranks a node, tensor parallelism and
#: the shards of HSDP stay within it; three kinds at once need eight ranks.
_LAYOUTS = (
    ("ddp", 1, (1, 2, 4)),
    ("zero1", 1, (1, 2, 4)),
    ("fsdp", 1, (1, 2, 4)),
    ("hsdp", 2, (2, 4)),
    ("fsdp_tp", 2, (1, 2, 4)),
    ("fsdp_1f1b", 2, (1, 2, 4)),
    ("fsdp_1f1b_tp", 4, (2,)),
    ("fsdp_1f1b_tp", 2, (4,)),
)
LAYOUTS = tuple(
    Case(layout, 256, 4, 512, count, nproc, ("copies", "plain", "memory", "disk"))
    for layout, nproc, nodes in _LAYOUTS
    for count in nodes
)


def run(cluster: MiniCluster, case: Case, block: int, rounds: int) -> dict[str, Any]:
    """Train once; returns what the ranks wrote and what the processes beside them used."""
    job: TrainingJob = submit(
        cluster,
        nodes=case.nodes,
        launch=["--spares=0", f"--nproc-per-node={case.nproc}"],
        script=SCRIPT,
        script_args=[
            *(f"--layout={case.layout}", f"--width={case.width}", f"--layers={case.layers}"),
            *(f"--tokens={case.tokens}", f"--block={block}", f"--rounds={rounds}"),
            *("--kinds", *case.kinds),
            f"--out={cluster.base}",
        ],
    )
    job.wait_step(WARM_UP)
    before = helpers_cpu_s(cluster)
    steps = WARM_UP + 2 * len(case.kinds) * rounds * block
    job.wait("the last step", lambda: job.records("step", step=steps, rank=0), timeout_s=3600)
    after = helpers_cpu_s(cluster)
    end = job.wait_end()
    if end["exit_code"] != 0:
        raise SystemExit(f"the job failed\n{job.everything()}")
    ranks = [
        json.loads((cluster.base / f"rank-{rank}.json").read_text()) for rank in range(case.world)
    ]
    cluster.reset()
    used = {name: round(after[name] - before.get(name, 0.0), 3) for name in after}
    return {"ranks": ranks, "helpers_cpu_s": used}


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


def against_plain(
    times: Sequence[float], kinds: Sequence[str], kind: str, settling: int = WARM_UP
) -> dict[str, float]:
    """Steps of a kind to plain ones, all others left out."""
    pairs = list(zip(times, kinds, strict=False))[settling:]
    both = [(time_s, each == kind) for time_s, each in pairs if each in (kind, "plain")]
    return ratios([time_s for time_s, _ in both], [is_it for _, is_it in both], 0)


def summary(case: Case, result: dict[str, Any]) -> dict[str, Any]:
    """The figures of one case."""
    ranks = result["ranks"]
    kinds = ranks[0]["kinds"]
    # All ranks take part in every step, so rank 0 tells the time of all.
    times = [end - start for start, end in pairwise(ranks[0]["starts"])]
    figures: dict[str, Any] = against_plain(times, kinds, "copies")
    for kind in case.kinds[2:]:
        found = against_plain(times, kinds, kind)
        figures |= {
            f"{kind}_ratio_of_means": found["ratio_of_means"],
            f"{kind}_low": found["low"],
            f"{kind}_high": found["high"],
        }
    copied = ranks[0]["segments"]
    nbytes = sum(copied.values())
    waits = [
        wait
        for rank in ranks
        for number, wait in enumerate(rank["blocked_s"])
        if number >= WARM_UP and kinds[number] == "copies"
    ]
    alone = sum(size for key, size in copied.items() if "," not in key)
    operations = 6 * ranks[0]["parameters"] * case.tokens
    figures |= {
        "operations_a_byte": operations / nbytes,
        "d2h_nbytes_a_step": nbytes,
        "h2h_nbytes_a_step": alone,
        "arena_nbytes_a_node": 3 * case.nproc * (nbytes + alone),
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
    parser.add_argument("--set", choices=("sizes", "layouts"), help="only these cases")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--out", type=Path, default=records.RESULTS / "overhead.json")
    options = parser.parse_args()
    cases = {"sizes": SIZES, "layouts": LAYOUTS}.get(options.set, SIZES + LAYOUTS)
    print(
        f"{'case':<38}{'op/byte':>8}{'step ms':>9}{'ratio':>8}{'95 % interval':>17}"
        f"{'medians':>9}{'blocked ms':>12}{'unprotected':>13}{'memory':>8}{'disk':>8}"
    )
    with MiniCluster(nodes=4) as cluster:
        for case in cases:
            if options.case not in case.name:
                continue
            figures = summary(case, run(cluster, case, options.block, options.rounds))
            records.keep(
                options.out,
                "python bench/overhead.py --block BLOCK --rounds ROUNDS",
                {case.name: {"block": options.block, "rounds": options.rounds, **figures}},
            )
            checkpoints = "".join(
                f"{figures[key]:>8.2f}" if (key := f"{kind}_ratio_of_means") in figures else ""
                for kind in ("memory", "disk")
            )
            print(
                f"{case.name:<38}{figures['operations_a_byte']:>8.0f}"
                f"{1e3 * figures['median_step_s']:>9.1f}{figures['ratio_of_means']:>8.3f}"
                f"{figures['low']:>9.3f}-{figures['high']:<7.3f}"
                f"{figures['ratio_of_medians']:>9.3f}{figures['blocked_ms_a_step']:>12.2f}"
                f"{figures['unprotected_steps']:>13}{checkpoints}",
                flush=True,
            )


if __name__ == "__main__":
    main()
