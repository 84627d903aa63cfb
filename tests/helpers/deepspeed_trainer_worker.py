"""Trains through the Trainer: `deepspeed_trainer_worker.py CONFIG OUT [STOP]`; STOP = rounds.

`deepspeed_trainer_worker.py ROOT` trains as users do: ROOT holds `stage3.json` and `stage2.json`.
The first is trained to its end and handled like a Hugging Face example script does; the second is
stopped by Hugging Face's own callback. The first process writes what it saw and heard.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    TrainerCallback,
    TrainingArguments,
)

from tests.helpers.lean import compile_no_collective
from tests.helpers.variants import end_world
from tlora_megatron.deepspeed.trainer import MultiLoRATrainer


class Recorder(TrainerCallback):
    def __init__(self, stop: int | None) -> None:
        self.stop = stop
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if state.global_step == self.stop:  # else as the other callbacks have left it
            control.should_training_stop = True
        return control


def train_config(config: Path, out: Path, stop: str | None = None) -> None:
    recorder = Recorder(int(stop) if stop else None)
    base = json.loads(config.read_text())["tlora"]["base_model"]["path"]
    args = TrainingArguments(output_dir=str(out), deepspeed=str(config), use_cpu=True, report_to=[])
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    result = MultiLoRATrainer(model=model, args=args, callbacks=[recorder]).train()
    if dist.get_rank() == 0:
        heard = {"logs": recorder.logs, "rounds": result.global_step, "metrics": result.metrics}
        (out / "heard.json").write_text(json.dumps(heard))
    end_world()


class Events(TrainerCallback):
    """Keeps the name of each event with the state at that time."""

    def __init__(self) -> None:
        self.heard: list[list[Any]] = []

    def _note(self, event: str, state: Any) -> None:
        self.heard.append([event, state.global_step, state.epoch, state.max_steps])

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._note("epoch_begin", state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._note("epoch_end", state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Noted; asks for a checkpoint once."""
        self._note("step_end", state)
        control.should_save |= state.global_step == 2
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._note("save", state)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        self._note("evaluate", state)
        self.heard[-1].append(metrics["eval_loss"])


def train_files(root: Path) -> None:
    seen = {"stage3": _whole(root), "stage2": _stopped(root)}
    if dist.get_rank() == 0:
        (root / "seen.json").write_text(json.dumps(seen))
    end_world()


def _trainer(root: Path, name: str, callbacks: list[Any], **given: Any) -> MultiLoRATrainer:
    args = TrainingArguments(
        str(root / name), deepspeed=str(root / f"{name}.json"), use_cpu=True, learning_rate=4e-3,
        weight_decay=0.1, lr_scheduler_type="cosine", seed=5, logging_steps=2, **given,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    return MultiLoRATrainer(model=model, args=args, callbacks=callbacks)


def _whole(root: Path) -> dict[str, Any]:
    events = Events()
    trainer = _trainer(
        root, "stage3", [events], num_train_epochs=2, warmup_steps=0.25, eval_strategy="epoch"
    )
    before = trainer.evaluate()
    result = trainer.train()
    trainer.save_model()
    trainer.save_model(str(root / "saved"))
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    again = trainer.train(resume_from_checkpoint=True)
    return {
        "before": before, "events": events.heard, "metrics": result.metrics,
        "rounds": result.global_step, "after": trainer.evaluate(), "again": again.global_step,
    }  # fmt: skip


def _stopped(root: Path) -> dict[str, Any]:
    events, never_better = Events(), EarlyStoppingCallback(1, early_stopping_threshold=100.0)
    trainer = _trainer(
        root, "stage2", [events, never_better], max_steps=12, save_strategy="epoch",
        eval_strategy="steps", eval_steps=3, metric_for_best_model="eval_mlp_loss",
    )  # fmt: skip
    rounds = trainer.train().global_step
    trainer.save_model(str(root / "stopped"))
    return {
        "rounds": rounds, "events": events.heard, "best": trainer.state.best_metric,
        "history": trainer.state.log_history, "after": trainer.evaluate(),
    }  # fmt: skip


if __name__ == "__main__":
    compile_no_collective()
    if len(sys.argv) == 2:
        train_files(Path(sys.argv[1]))
    else:
        train_config(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
