"""Trains through the Trainer: `deepspeed_trainer_worker.py CONFIG OUT [STOP]`; STOP = rounds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, TrainerCallback, TrainingArguments

from tests.helpers.lean import compile_no_collective
from tests.helpers.variants import end_world
from tlora_megatron.deepspeed.trainer import MultiLoRATrainer


class Recorder(TrainerCallback):
    """Keeps what callbacks hear, and stops the training after so many rounds."""

    def __init__(self, stop: int | None) -> None:
        self.stop = stop
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if state.global_step == self.stop:  # else as the other callbacks have left it
            control.should_training_stop = True
        return control


def main() -> None:
    compile_no_collective()
    config, out = Path(sys.argv[1]), Path(sys.argv[2])
    recorder = Recorder(int(sys.argv[3]) if len(sys.argv) > 3 else None)
    base = json.loads(config.read_text())["tlora"]["base_model"]["path"]
    args = TrainingArguments(output_dir=str(out), deepspeed=str(config), use_cpu=True, report_to=[])
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    result = MultiLoRATrainer(model=model, args=args, callbacks=[recorder]).train()
    if dist.get_rank() == 0:
        heard = {"logs": recorder.logs, "rounds": result.global_step, "metrics": result.metrics}
        (out / "heard.json").write_text(json.dumps(heard))
    end_world()


if __name__ == "__main__":
    main()
