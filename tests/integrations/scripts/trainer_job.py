"""A small job of ``transformers.Trainer`` with every part that an adapter must bring back."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from marks import CLASSES, FEATURES, VOCABULARY, Numbered, Texts, die_at, tell
from torch import nn
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from deadpool_runtime.integrations.transformers import DeadpoolTrainer

RANK = int(os.environ.get("RANK", "0"))


class Net(nn.Module):
    """Dropout draws numbers, the norm's buffers change in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 24)
        self.norm = nn.BatchNorm1d(24)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(24, CLASSES)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.last(self.drop(torch.relu(self.norm(self.first(inputs)))))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def language_model() -> Any:
    """One of the library's own, in which the loss is divided by the words of all ranks."""
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 8}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes))


class Samples(TrainerCallback):
    """Which samples this rank has trained on, and how often each hook was called."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.hooks: dict[str, int] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"ids": list(self.ids), "hooks": dict(self.hooks)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.ids, self.hooks = list(saved["ids"]), dict(saved["hooks"])

    def _count(self, hook: str) -> None:
        self.hooks[hook] = self.hooks.get(hook, 0) + 1

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self._count("epoch_begin")

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self._count("epoch_end")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._count("step_end")

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self._count("evaluate")

    def on_save(self, *_: Any, **__: Any) -> None:
        self._count("save")


class Trainer(DeadpoolTrainer):
    samples: Samples
    die: str

    def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
        inputs = dict(inputs)
        self.samples.ids += inputs.pop("ids").tolist()
        if self.accelerator.sync_gradients:
            die_at(f"{RANK}:forward:{self.state.global_step + 1}", self.die)
        return super().training_step(model, inputs, *rest)

    def prediction_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        die_at(f"{RANK}:evaluate:{self.state.global_step}", self.die)
        inputs = {name: value for name, value in inputs.items() if name != "ids"}
        return super().prediction_step(model, inputs, *rest, **more)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output")
    parser.add_argument("--die", default="", metavar="RANK:PLACE:STEP")
    parser.add_argument("--iterable", action="store_true")
    parser.add_argument("--samples", type=int, default=43)
    parser.add_argument("--language-model", action="store_true")
    args = parser.parse_args()
    data = Texts if args.language_model else Numbered
    train: Any = data(args.samples, seed=1)
    if args.iterable:
        train = torch.utils.data.ChainDataset([])
    samples = Samples()
    set_seed(3)
    trainer = Trainer(
        model=language_model() if args.language_model else Net(),
        args=TrainingArguments(
            output_dir=args.output,
            use_cpu=True,
            seed=3,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=4,
            gradient_accumulation_steps=2,
            num_train_epochs=3,
            max_steps=8 if args.iterable else -1,
            learning_rate=1e-2,
            warmup_steps=3,
            lr_scheduler_type="cosine",
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=4,
            save_strategy="steps",
            save_steps=4,
            save_total_limit=2,
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
            remove_unused_columns=False,
            label_names=["labels"],
            report_to=[],
            disable_tqdm=True,
            dataloader_num_workers=0,
        ),
        train_dataset=train,
        eval_dataset=data(10, seed=2),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=50), samples],
    )
    trainer.samples, trainer.die = samples, args.die
    trainer.train()
    log = [
        {
            name: value
            for name, value in each.items()
            if "runtime" not in name and "per_s" not in name
        }
        for each in trainer.state.log_history
    ]
    tell(RANK, ids=samples.ids, hooks=samples.hooks, log=log, step=trainer.state.global_step)


if __name__ == "__main__":
    main()
