"""Hugging Face's Trainer for many jobs: its arguments, callbacks and logs, our training.

trainer = MultiLoRATrainer(model=model, args=TrainingArguments(..., deepspeed="ds.json"))
trainer.train()
"""

from __future__ import annotations

from typing import Any

from transformers import DefaultFlowCallback, Trainer, TrainerControl
from transformers.trainer_utils import TrainOutput

from tlora_megatron.cli.console import open_console
from tlora_megatron.deepspeed.run import DeepSpeedRun, initialize
from tlora_megatron.timeline import time_line
from tlora_megatron.training.super_model import StepReport


class MultiLoRATrainer(Trainer):
    """Trains the jobs of the `tlora` section of `args.deepspeed` on a frozen causal model.

    Data, batches, optimizers, schedules, clipping, evaluation, checkpoints and ends are each job's
    own, as its section says; what Trainer takes for one model (`train_dataset`, `learning_rate`,
    `max_steps`, ...) has no effect. A step of Trainer is a round; callbacks hear of it, and of each
    job's `loss/NAME` and `learning_rate/NAME`, and may stop the training, which saves every job.

    Args:
        model: a causal model of transformers.
        args: with `deepspeed`; its `output_dir` replaces `run.output_dir`.

    Raises:
        ValueError: if `args.deepspeed` is missing.
    """

    control: TrainerControl

    def __init__(self, model: Any, args: Any, **kwargs: Any) -> None:
        if not args.deepspeed:
            raise ValueError("args.deepspeed must name a DeepSpeed JSON with a tlora section")
        super().__init__(model=model, args=args, **kwargs)
        # It would stop at `state.max_steps`: how many rounds the jobs need is not known before.
        self.remove_callback(DefaultFlowCallback)
        self.engine: DeepSpeedRun | None = None

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Trains every job to its end, or until a callback stops it.

        Jobs go on from the checkpoints that `output_dir` holds. Arguments have no effect.

        Returns:
            The number of rounds, the mean of the jobs' last losses, and `loss/NAME` of each.
        """
        engine = self.engine = initialize(
            self.model, self.args.deepspeed, output_dir=str(self.args.output_dir)
        )
        self.model_wrapped = self.model
        self.state.is_world_process_zero = engine.base.groups.is_writer
        try:
            self._train_rounds(engine)
            engine.save()
            summary = engine.finish()
        finally:
            engine.close()
        self._call("on_train_end")
        if summary:
            open_console().print(f"time: {time_line(summary['run'])}")
        last = {f"loss/{j.name}": j.last_loss for j in engine.loop.jobs if j.last_loss is not None}
        mean = sum(last.values()) / len(last) if last else 0.0
        return TrainOutput(self.state.global_step, mean, last)

    def _train_rounds(self, engine: DeepSpeedRun) -> None:
        self._call("on_train_begin")
        while not engine.is_over and not self.control.should_training_stop:
            self._call("on_step_begin")
            reports = engine.train_round()
            self.state.global_step += 1
            self._call("on_step_end")
            if reports:
                self.log(_logs(reports))

    def _call(self, event: str) -> None:
        notify = getattr(self.callback_handler, event)
        self.control = notify(self.args, self.state, self.control)


def _logs(reports: list[StepReport]) -> dict[str, float]:
    """Losses and learning rates of the jobs that stepped, by the names that are logged."""
    logs = {}
    for report in reports:
        logs[f"loss/{report.job.name}"] = report.outcome.loss
        logs[f"learning_rate/{report.job.name}"] = report.lr
    return logs
