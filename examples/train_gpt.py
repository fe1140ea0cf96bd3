"""Train a small GPT on the bytes of Python's own standard library.

Runs unchanged as

    python examples/train_gpt.py
    torchrun --nproc-per-node 2 examples/train_gpt.py
    deadpool-launch examples/train_gpt.py --spares 1

The three lines marked DEADPOOL are what fault tolerance takes; without ``deadpool-launch`` they do
nothing.
"""

import argparse
import math
import os
import random
import sysconfig
from contextlib import nullcontext
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import deadpool_runtime as deadpool

VOCABULARY = 256  # one token per byte value


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """The text in windows of ``length`` bytes; the target is the window shifted by one byte."""

    def __init__(self, length: int, max_nbytes: int = 2 << 20) -> None:
        library = Path(sysconfig.get_path("stdlib"))
        text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))
        self.text = torch.frombuffer(bytearray(text[:max_nbytes]), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * self.length : (index + 1) * self.length + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    """One transformer block: causal self-attention, then a two-layer MLP, each with a residual."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norm1(x)), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.norm2(x)), self.dropout, self.training)


class GPT(nn.Module):
    """Returns the mean cross-entropy of the next byte."""

    def __init__(self, layers: int, dim: int, heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, dim)
        self.positions = nn.Parameter(torch.zeros(length, dim))
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.drop(self.tokens(inputs) + self.positions[: inputs.size(1)])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def seed_everything(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=4, help="windows per rank and micro-batch")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step")
    parser.add_argument("--length", type=int, default=64, help="bytes per window")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=10, help="steps of linear warm-up")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def train(args: argparse.Namespace, device: torch.device, rank: int, world_size: int) -> None:
    seed_everything(args.seed)  # the same weights on every rank …
    model: nn.Module = GPT(args.layers, args.dim, args.heads, args.length, args.dropout).to(device)
    seed_everything(args.seed + 1 + rank)  # … but other dropout
    if world_size > 1:
        model = DistributedDataParallel(model, [device] if device.type == "cuda" else None)
    model.train()

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)

    def rate(step: int) -> float:
        if step < args.warmup:
            return (step + 1) / args.warmup
        progress = (step - args.warmup) / max(1, args.steps - args.warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))

    scheduler = LambdaLR(optimizer, rate)

    dataset = Windows(args.length)
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=args.seed)
    loader = DataLoader(
        dataset, batch_size=args.batch * args.accumulate, sampler=sampler, drop_last=True
    )

    job = deadpool.attach(model, optimizer, scheduler)  # DEADPOOL 1: what the state is
    for step, batch in job.steps(loader, max_steps=args.steps):  # DEADPOOL 2: where to go on
        with step:  # DEADPOOL 3: a failed step comes again
            inputs, targets = (part.to(device).chunk(args.accumulate) for part in batch)
            mean_loss = torch.zeros((), device=device)
            for micro in range(args.accumulate):
                last = micro == args.accumulate - 1
                # Gradients are averaged over the ranks once a step, in the last micro-batch.
                with model.no_sync() if world_size > 1 and not last else nullcontext():
                    loss = model(inputs[micro], targets[micro]) / args.accumulate
                    loss.backward()
                mean_loss += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step.report(loss=mean_loss.item())
        if rank == 0 and step.completed and step.number % 10 == 0:
            print(f"step {step.number}: loss {step.loss:.4f}", flush=True)


def main() -> None:
    args = arguments()
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if world_size == 1:
        train(args, device, rank, world_size)
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    # A function of its own, since the model must be gone before its process group is: freed the
    # other way round, DDP can deadlock with a thread of Gloo's that waits for Python's lock.
    train(args, device, rank, world_size)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
