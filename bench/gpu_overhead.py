"""What protection costs on one GPU while nothing fails: a transformer of about 1 B parameters.

One process on one node, under the launcher of the tests: it copies its state into its arena after
every step, seals it, and goes on; there is no other node to send replicas to. The training is that
of ``scripts/train_gpu.py``: bfloat16 under autocast, AdamW, float32 master weights. Steps with and
without copies come in blocks A B B A; the ratio of their times is that of means, its 95 % interval
comes from resampling whole blocks (bootstrap, 10,000 draws, fixed seed), and no step is left out.
Times are the GPU's. That the host was held back costs nothing while the GPU has work in its queue,
so ``blocked`` may be much larger than what a step takes longer.

A step takes 131,072 tokens, as many as pass through the parameters of one data-parallel group in a
step of Llama 3 405B (see ``overhead.py``); ``--tokens`` takes fewer.

``python bench/gpu_overhead.py`` takes less than 4 minutes and writes
``bench/results/gpu_overhead.json``. ``--smoke`` runs the same with a tiny model on the CPU, writes
nothing there, and says nothing about speed. Ends with 2 where the measurement cannot be made.
DEADPOOL need not be installed; torch, msgspec, xxhash, psutil and a C++ compiler must be.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if find_spec("deadpool_runtime") is None:
    sys.path.insert(0, str(ROOT / "runtime"))

import records  # noqa: E402
import torch  # noqa: E402
from paired import ratios  # noqa: E402

from deadpool_runtime.testing import FakeLauncher, ParkedProcess  # noqa: E402

SCRIPT = Path(__file__).parent / "scripts" / "train_gpu.py"
GOAL = 1.002
#: 1.08 B parameters.
MODEL = {"layers": 20, "width": 2048, "head": 128, "vocabulary": 32768, "length": 2048}
TINY = {"layers": 2, "width": 32, "head": 16, "vocabulary": 64, "length": 16}
STATE_NBYTES = 12 * 1_080_000_000


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """The figures of a run, from what its rank wrote."""
    kinds, settling = found["kinds"], found["settling"]
    protected = [number for number, kind in enumerate(kinds) if kind and number >= settling]

    def ms(name: str) -> dict[str, float]:
        values = [1e3 * found[name][number] for number in protected]
        return {"mean": statistics.fmean(values), "worst": max(values)}

    figures: dict[str, Any] = ratios(found["step_s"], kinds, settling)
    figures |= {
        "steps_of_each_kind": len(protected),
        "tokens_a_step": found["tokens"],
        "parameters": found["parameters"],
        "state_nbytes": found["state_nbytes"],
        "operations_a_byte": 6 * found["parameters"] * found["tokens"] / found["state_nbytes"],
        "blocked_by_copy_ms": ms("copy_wait_s"),
        "blocked_by_confirmation_ms": ms("confirm_wait_s"),
        "begin_ms": ms("begin_s"),
        "complete_ms_mean": 1e3 * statistics.fmean(found["complete_s"][settling:]),
        "sealed_after_ms_median": 1e3 * statistics.median(found["sealed_after_s"]),
        "copies_sealed": found["copies_sealed"],
        "unprotected_steps": found["unprotected"],
        "page_locked": found["page_locked"],
        "arena_nbytes": found["slots_nbytes"],
        "host_rss_nbytes": found["host_rss_nbytes"],
        "device_peak_nbytes": found["device_peak_nbytes"],
        "plain_one_tensor_gb_per_s": found["plain_one_tensor_per_s"] / 1e9,
        "plain_same_tensors_gb_per_s": found["plain_same_tensors_per_s"] / 1e9,
    }
    if found["d2h_s"]:
        rate = found["d2h_nbytes"] / statistics.median(found["d2h_s"])
        figures["snapshot_gb_per_s"] = rate / 1e9
        figures["snapshot_to_plain"] = rate / found["plain_same_tensors_per_s"]
        figures["snapshot_to_plain_one_tensor"] = rate / found["plain_one_tensor_per_s"]
    return {name: _rounded(value) for name, value in figures.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return round(value, 5) if isinstance(value, float) else value


def run(device: str, sizes: dict[str, int], seconds: float, rounds: int) -> dict[str, Any]:
    """Train once; returns what the rank wrote."""
    with tempfile.TemporaryDirectory(prefix="deadpool-gpu-") as folder, ParkedProcess() as parked:
        out = Path(folder) / "rank.json"
        args = [f"--{name}={value}" for name, value in sizes.items()]
        args += [f"--device={device}", f"--seconds={seconds}", f"--rounds={rounds}", f"--out={out}"]
        FakeLauncher(
            *(parked, str(SCRIPT), args),
            world_size=1,
            run_dir=Path(folder),
            deadline_s=seconds + 300,
        ).run()
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def micro_batch() -> int:
    """Sequences that this GPU takes at a time, with what the state and activations need."""
    gib = torch.cuda.get_device_properties(0).total_memory / (1 << 30)
    return 8 if gib > 120 else 4 if gib > 60 else 2 if gib > 38 else 1


def refusal() -> str:
    """Why this machine cannot make the measurement; nothing if it can."""
    if not torch.cuda.is_available():
        return "There is no GPU that this torch can use, so nothing was measured (try --smoke)."
    free = shutil.disk_usage("/dev/shm").free
    if free < 3.1 * STATE_NBYTES:
        return (
            f"Three copies of the state need {3.1 * STATE_NBYTES / 1e9:.0f} GB in /dev/shm and "
            f"{free / 1e9:.0f} GB are free there, so nothing was measured."
        )
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--tokens", type=int, default=131072, help="in a step")
    parser.add_argument("--seconds", type=float, default=120.0, help="for all steps, about")
    parser.add_argument("--block", type=int, default=4, help="steps in a row of the same kind")
    parser.add_argument("--out", type=Path, default=records.RESULTS / "gpu_overhead.json")
    options = parser.parse_args()
    if options.smoke:
        sizes = {**TINY, "batch": 2, "accumulate": 2, "block": 2}
        print(json.dumps(summary(run("cpu", sizes, 5.0, rounds=2)), indent=1))
        return 0
    if reason := refusal():
        print(reason, file=sys.stderr)
        return 2
    batch = micro_batch()
    accumulate = max(options.tokens // (batch * MODEL["length"]), 1)
    sizes = {**MODEL, "batch": batch, "accumulate": accumulate, "block": options.block}
    found = run("cuda", sizes, options.seconds, rounds=12)
    figures = summary(found)
    result = {
        **figures,
        "cuda": torch.version.cuda,
        "goal": GOAL,
        "micro_batch": batch,
        "block": options.block,
        "step_s": found["step_s"],
        "kinds": found["kinds"],
    }
    records.keep(options.out, "python bench/gpu_overhead.py", {found["device"]: result})
    print(json.dumps(figures, indent=1))
    print(f"{found['device']}: {figures['ratio_of_means']:.4f}, goal {GOAL}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
