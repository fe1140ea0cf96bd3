"""A small job of ``lightning.Trainer`` with every part that an adapter must bring back."""

from __future__ import annotations

import argparse
import os
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from marks import CLASSES, FEATURES, Numbered, die_at, tell
from torch import nn
from torch.utils.data import DataLoader

from deadpool_runtime.integrations.lightning import DeadpoolStrategy

RANK = int(os.environ.get("RANK", "0"))


class Module(lightning.LightningModule):
    """Dropout draws numbers, the norm's buffers change, values are logged per step and epoch."""

    def __init__(self, die: str, manual: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 24),
            nn.BatchNorm1d(24),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(24, CLASSES),
        )
        self.die = die
        self.automatic_optimization = not manual
        self.ids: list[int] = []
        self.epoch_losses: list[float] = []

    def _loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch["inputs"]), batch["labels"])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.ids += batch["ids"].tolist()
        if self.trainer.fit_loop.epoch_loop._accumulated_batches_reached():
            die_at(f"{RANK}:forward:{self.global_step + 1}", self.die)
        loss = self._loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            die_at(f"{RANK}:evaluate:{self.global_step}", self.die)
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.epoch_losses.append(float(self.trainer.callback_metrics["loss_epoch"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Hooks(Callback):
    """How often each hook was called."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.counts)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counts = dict(state_dict)

    def _count(self, hook: str) -> None:
        self.counts[hook] = self.counts.get(hook, 0) + 1

    def on_train_epoch_start(self, *_: Any) -> None:
        self._count("epoch_start")

    def on_train_epoch_end(self, *_: Any) -> None:
        self._count("epoch_end")

    def on_train_batch_end(self, *_: Any) -> None:
        self._count("batch_end")

    def on_validation_epoch_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self._count("validation")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output")
    parser.add_argument("--die", default="", metavar="RANK:PLACE:STEP")
    parser.add_argument("--manual", action="store_true")
    parser.add_argument("--late-validation", action="store_true")
    parser.add_argument("--clock", action="store_true")
    parser.add_argument("--samples", type=int, default=43)
    args = parser.parse_args()
    lightning.seed_everything(3)  # the sampler's seed too, which all ranks must share
    torch.manual_seed(3 + RANK)
    hooks = Hooks()
    trainer = lightning.Trainer(
        strategy=DeadpoolStrategy(),
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("WORLD_SIZE", "1"))
        // int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_epochs=3,
        accumulate_grad_batches=1 if args.manual else 2,
        gradient_clip_val=None if args.manual else 1.0,
        val_check_interval="00:00:10:00" if args.clock else 5,
        check_val_every_n_epoch=2 if args.late_validation else 1,
        num_sanity_val_steps=0 if args.late_validation else 2,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        callbacks=[
            hooks,
            ModelCheckpoint(args.output, monitor="val_loss", save_top_k=2, save_last=True),
            # Lightning cannot find out by itself where to check if the clock decides.
            EarlyStopping(
                "val_loss", patience=50, check_on_train_epoch_end=False if args.clock else None
            ),
        ],
    )
    module = Module(args.die, args.manual)
    trainer.fit(
        module,
        DataLoader(Numbered(args.samples, seed=1), batch_size=2, shuffle=True),
        DataLoader(Numbered(10, seed=2), batch_size=4),
    )
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    tell(
        RANK,
        ids=module.ids,
        hooks=hooks.counts,
        log=[module.epoch_losses, metrics],
        step=trainer.global_step,
    )


if __name__ == "__main__":
    main()
