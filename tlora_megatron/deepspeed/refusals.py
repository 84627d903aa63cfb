"""Refuses what Hugging Face's Trainer takes for one model and many jobs cannot honour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import Trainer

from tlora_megatron.config.job import JobSpec
from tlora_megatron.config.reader import ConfigError, must

NOT_TAKEN = {
    "train_dataset": "each job has data.train",
    "eval_dataset": "each job has data.eval",
    "data_collator": "each job's rows are tokenized and packed here",
    "model_init": "there is one frozen model; give it as model",
    "compute_loss_func": "each job's loss is cross entropy over its targets",
    "compute_metrics": "each job is evaluated by loss and exact match",
    "preprocess_logits_for_metrics": "each job is evaluated by loss and exact match",
    "optimizers": "each job has its own AdamW and schedule",
    "optimizer_cls_and_kwargs": "each job has its own AdamW",
}
"""Trainer's arguments for one model, each with the reason why it cannot be honoured."""
_NEVER_CALLED = (
    *("compute_loss", "training_step", "prediction_step", "evaluation_loop"),
    *("create_optimizer", "create_scheduler", "create_optimizer_and_scheduler"),
    *("get_train_dataloader", "get_eval_dataloader", "get_batch_samples"),
)
"""Methods that a subclass would override in vain."""


def refuse_what_is_not_taken(kind: type[Trainer], given: Mapping[str, Any]) -> None:
    """Refuses arguments of a Trainer, and overridden methods that rounds of many jobs never call.

    Raises:
        ConfigError: naming the argument.
        NotImplementedError: naming the method.
    """
    for name, reason in NOT_TAKEN.items():
        value = given.get(name)
        if value is not None and value != (None, None):
            raise ConfigError(
                f"{name} must be left out, got a {type(value).__name__}: {reason} (tlora.jobs)"
            )
    for name in _NEVER_CALLED:
        if getattr(kind, name, None) is not getattr(Trainer, name, None):
            raise NotImplementedError(
                f"{kind.__name__}.{name} must not be overridden: rounds of many jobs never call it"
            )


def check_evaluation(strategy: Any, jobs: Sequence[JobSpec]) -> None:
    """Refuses a strategy of evaluation where no job has data for it."""
    if strategy != "no" and not any(job.data.eval for job in jobs):
        raise must("args.eval_strategy", "be no without data.eval in any job", strategy.value)
