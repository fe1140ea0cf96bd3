"""One rank of ``gpu_overhead.py``: trains a transformer, with protection on and off by turns.

Weights are float32 and run in bfloat16 under autocast, which casts each weight once in a forward
pass: so the state is what mixed-precision training has, the float32 master weights and AdamW's two
float32 moments, 12 bytes a parameter. (What keeps bfloat16 weights as well has 14; those are
the master weights rounded.)

Blocks of steps with and without copies of the state follow each other in the order A B B A, as in
``train_sized.py``. The host waits for nothing but what the job makes it wait for, so it is ahead of
the GPU as in real training; the time of a step is that between two events on the GPU, at the start
of its body and at that of the next one. Writes the figures to the file given by ``--out``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import deadpool_runtime as deadpool

_cuda: Any = torch.cuda
#: Steps before ``attach``: torch chooses kernels, and the optimizer makes its state.
WARM_UP = 4
#: Steps after it that do not count: each of the three slots is used and page-locked once.
SETTLING = 4
#: The part of the state that is copied once more in the plain way, at most.
PLAIN_NBYTES = 4 << 30


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mixed = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixed(mixed.transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return out


class Model(nn.Module):
    """Token and position embeddings, layers, and a head that shares the token embedding."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.tokens = nn.Embedding(options.vocabulary, options.width)
        self.positions = nn.Parameter(torch.zeros(options.length, options.width))
        self.layers = nn.ModuleList(
            Layer(options.width, options.width // options.head) for _ in range(options.layers)
        )
        self.norm = nn.LayerNorm(options.width)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        logits = nn.functional.linear(self.norm(x), self.tokens.weight)
        return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


class Clock:
    """Moments in the GPU's time, or the host's where there is none."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._moments: list[Any] = []

    def tick(self) -> None:
        """Note the present moment in the queue of the GPU's work."""
        if self._gpu:
            event = _cuda.Event(enable_timing=True)
            event.record()
            self._moments.append(event)
        else:
            self._moments.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """The times between the moments; waits for all of them."""
        if not self._gpu:
            return [end - start for start, end in pairwise(self._moments)]
        self._moments[-1].synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairwise(self._moments)]


def plain_copies(tensors: list[torch.Tensor], device: torch.device) -> dict[str, Any]:
    """Bytes a second from the device into page-locked memory: one large tensor, and the state's
    own tensors one after the other, the best of five each."""
    chosen, nbytes = [], 0
    for tensor in tensors:
        if tensor.device == device and nbytes + tensor.nbytes <= PLAIN_NBYTES:
            chosen.append(tensor.detach().reshape(-1).view(torch.uint8))
            nbytes += tensor.nbytes
    gpu = device.type == "cuda"
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=gpu)
    large = torch.empty(nbytes, dtype=torch.uint8, device=device)
    targets = torch.split(host, [each.numel() for each in chosen])

    def copy_later(target: torch.Tensor, tensor: torch.Tensor) -> None:
        target.copy_(tensor, non_blocking=True)

    def best(copy: Callable[[], object]) -> float:
        times = []
        for _ in range(5):
            if gpu:
                _cuda.synchronize()
            started = time.perf_counter()
            copy()
            if gpu:
                _cuda.synchronize()
            times.append(time.perf_counter() - started)
        return nbytes / min(times)

    return {
        "plain_nbytes": nbytes,
        "plain_one_tensor_per_s": best(lambda: copy_later(host, large)),
        "plain_same_tensors_per_s": best(lambda: list(map(copy_later, targets, chosen))),
    }


class Watch:
    """Times what the job does in and beside the training thread, by standing before its methods."""

    def __init__(self, job: Any) -> None:
        #: Of the training thread, for each state; for each copy of one.
        self.begin_s: list[float] = []
        self.complete_s: list[float] = []
        #: For each step whose state was copied: two events of the GPU that enclose the copies, and
        #: the moments when the copy was begun and sealed.
        self.copied: dict[int, tuple[Any, Any]] = {}
        self.begun_at: dict[int, float] = {}
        self.sealed_at: dict[int, float] = {}
        self.page_locked = False
        self._time(job, "_copy", self.begin_s)
        self._time(job, "_complete_copy", self.complete_s)
        self._copier = job._snapshots._copier
        self._begin, self._queue = self._copier.begin, self._copier._queue
        self._on_sealed = self._copier._events.on_sealed
        self._copier.begin, self._copier._queue = self._noted_begin, self._noted_queue
        self._copier._events = replace(self._copier._events, on_sealed=self._noted_sealed)

    def _noted_begin(self, step: int, *args: Any) -> None:
        self.begun_at[step] = time.perf_counter()
        self._begin(step, *args)

    def _noted_queue(self, copy: Any, passes: Any) -> None:
        stream = copy.stream._stream
        copy.stream.start(copy.mark)
        first, last = (_cuda.Event(enable_timing=True) for _ in range(2))
        first.record(stream)
        self._queue(copy, passes)
        last.record(stream)
        self.copied[copy.step] = first, last
        pinned = self._copier._pinned
        self.page_locked = bool(pinned._locked) and not pinned._refused

    def _noted_sealed(self, manifest: Any) -> None:
        self._on_sealed(manifest)
        self.sealed_at[manifest.step] = time.perf_counter()

    @staticmethod
    def _time(job: Any, name: str, seconds: list[float]) -> None:
        method = getattr(job, name)

        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*args)
            finally:
                seconds.append(time.perf_counter() - started)

        setattr(job, name, timed)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    for name in ("layers", "width", "head", "vocabulary", "length", "batch", "accumulate"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--block", type=int, required=True, help="steps in a row of a kind")
    parser.add_argument("--rounds", type=int, required=True, help="times A B B A, at most")
    parser.add_argument("--seconds", type=float, required=True, help="for all steps, about")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    torch.manual_seed(1)
    with device:
        model = Model(options)
        shape = (options.accumulate, 2, options.batch, options.length)
        data = torch.randint(options.vocabulary, shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=options.device == "cuda")

    def train(data: torch.Tensor) -> None:
        optimizer.zero_grad()
        for tokens, targets in data:
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(tokens, targets)
            (loss / options.accumulate).backward()
        optimizer.step()

    before = Clock(device)
    for _ in range(WARM_UP):
        before.tick()
        train(data)
    before.tick()
    step_s = min(before.seconds())
    rounds = min(options.rounds, max(int(options.seconds / step_s / (4 * options.block)), 2))

    job: Any = deadpool.attach(model, optimizer)
    watch = Watch(job)
    kinds = [True] * SETTLING
    for _ in range(rounds):
        for kind in (True, False, False, True):
            kinds += [kind] * options.block
    clock = Clock(device)
    waits: list[tuple[float, float]] = []
    for step, batch in job.steps([data], max_steps=len(kinds)):
        with step:
            clock.tick()
            # The copy of this step's end, and so the next step's time, is with or without.
            job._snapshots.paused = not kinds[min(step.number, len(kinds) - 1)]
            train(batch)
        waits.append((job._guard.copy_wait_s, job._guard.confirm_wait_s))
    times = clock.seconds()
    segments = job._snapshots.segments_nbytes()
    result = {
        "parameters": sum(each.numel() for each in model.parameters()),
        "tokens": options.accumulate * options.batch * options.length,
        "kinds": kinds,
        "settling": SETTLING,
        "step_s": times,
        "copy_wait_s": [each for each, _ in waits],
        "confirm_wait_s": [each for _, each in waits],
        "begin_s": watch.begin_s,
        "complete_s": watch.complete_s,
        "d2h_s": [
            first.elapsed_time(last) / 1e3
            for step, (first, last) in watch.copied.items()
            if step >= SETTLING and last.query()
        ],
        "d2h_nbytes": sum(
            each.tensor.nbytes for each in job._training.items() if each.tensor.device == device
        ),
        "sealed_after_s": [
            at - watch.begun_at[step] for step, at in watch.sealed_at.items() if step >= SETTLING
        ],
        "page_locked": watch.page_locked,
        "copies_sealed": len(watch.sealed_at),
        "unprotected": job._guard.unprotected,
        "state_nbytes": sum(segments.values()),
        "host_rss_nbytes": psutil.Process().memory_info().rss,
        "slots_nbytes": sum(slot.nbytes for slot in job._snapshots._slots.every()),
        "device": _cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "device_peak_nbytes": _cuda.max_memory_allocated() if device.type == "cuda" else 0,
        **plain_copies([each.tensor for each in job._training.items()], device),
    }
    options.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
