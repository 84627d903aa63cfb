"""Reads Hugging Face's TrainingArguments as defaults of jobs, or refuses them."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from transformers import Trainer, TrainingArguments

from tlora_megatron.config.reader import ConfigError, must
from tlora_megatron.integrations.deepspeed.job_defaults import TrainerValue, TrainerValues

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


_ADAMW = ("adamw_torch", "adamw_torch_fused")
_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}

_BECOME_DEFAULTS = {
    *("learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay"),
    *("max_grad_norm", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    *("max_steps", "num_train_epochs", "seed", "eval_strategy", "eval_steps"),
    *("save_strategy", "save_steps", "report_to", "bf16", "optim"),
    *("activation_checkpointing", "gradient_checkpointing"),
}
_TRAINERS_OWN = {
    *("output_dir", "deepspeed", "logging_strategy", "logging_steps", "logging_first_step"),
    *("log_level", "log_level_replica", "disable_tqdm", "run_name", "project", "use_cpu"),
    *("local_rank", "ddp_timeout", "ddp_backend", "tf32", "do_train", "do_eval", "do_predict"),
    *("metric_for_best_model", "greater_is_better", "accelerator_config", "dataloader_pin_memory"),
    *("include_num_input_tokens_seen", "full_determinism", "skip_memory_metrics"),
    *("bf16_full_eval", "resume_from_checkpoint", "eval_on_start", "fsdp", "fsdp_config"),
    *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
}
"""Arguments that Trainer or the user's script acts on itself."""

_ONE_MODEL = "every job's loss is plain cross entropy"
_REFUSED = {
    "fp16": "one loss scale for all jobs would let one job's inf stop the others",
    "fp16_full_eval": "a base is float32 or bfloat16",
    "optim_args": "each job has its own AdamW",
    "optim_target_modules": "each job has its own AdamW",
    "label_smoothing_factor": _ONE_MODEL,
    "neftune_noise_alpha": _ONE_MODEL,
    "load_best_model_at_end": "every job keeps its last weights; stop it with max_steps",
    "push_to_hub": "there is an adapter for each job; push the folders OUT/jobs/NAME/adapter",
    "torch_compile": "compiled graphs do not see the micro-batch's routing",
    "parallelism_config": "DeepSpeed's keys say how the base is cut",
    "auto_find_batch_size": "run.micro_batch_tokens bounds what a micro-batch needs",
}
"""Arguments that must be left at their default, each with the reason."""


def trainer_values(args: TrainingArguments) -> TrainerValues:
    """Returns what the arguments say about the jobs, by the keys of the job file.

    Raises:
        ConfigError: for an argument that would change results and cannot be honoured.
    """
    _refuse(args)
    job, run = dict(_job_values(args)), dict(_run_values(args))
    return TrainerValues(job=job, run=run, bf16=bool(args.bf16))


def without_effect(args: TrainingArguments) -> str:
    """The sentence that names arguments that are set and have no effect; empty without any."""
    silent = _BECOME_DEFAULTS | _TRAINERS_OWN | _REFUSED.keys()
    names = [name for name in _own_defaults() if name not in silent and _is_set(args, name)]
    if not names:
        return ""
    return f"without effect, as jobs have their own: TrainingArguments' {', '.join(names)}"


def logs_every_round(args: TrainingArguments) -> bool:
    """True if nobody has said how often to log."""
    return not _is_set(args, "logging_steps")


@functools.cache
def _own_defaults() -> dict[str, Any]:
    found = {}
    for item in dataclasses.fields(TrainingArguments):
        factory = item.default_factory
        found[item.name] = item.default if factory is dataclasses.MISSING else factory()
    return found


def _plain(value: Any) -> Any:
    """A value as people write it; all that means off is None, as TrainingArguments rewrites it."""
    value = value.value if isinstance(value, Enum) else value
    return None if value in ("", "no", "none", False) or value == [] or value == {} else value


def _is_set(args: TrainingArguments, name: str) -> bool:
    defaults = _own_defaults()
    return name in defaults and _plain(getattr(args, name)) != _plain(defaults[name])


def _refuse(args: TrainingArguments) -> None:
    for name, reason in _REFUSED.items():
        if _is_set(args, name):
            value = _plain(getattr(args, name))
            raise must(f"TrainingArguments.{name}", "be left out", value, reason)
    if args.optim not in _ADAMW:
        raise must(
            "TrainingArguments.optim",
            f"be one of {', '.join(_ADAMW)}",
            _plain(args.optim),
            "each job has its own AdamW",
        )


def _job_values(args: TrainingArguments) -> Iterator[tuple[str, TrainerValue]]:
    def value(argument: str, as_value: Any = None, *also: str, problem: str = "") -> TrainerValue:
        is_set = any(_is_set(args, name) for name in (argument, *also))
        given = getattr(args, argument) if as_value is None else as_value
        return TrainerValue(argument=argument, value=given, is_set=is_set, problem=problem)

    yield "optimizer.lr", value("learning_rate")
    yield "optimizer.betas", value("adam_beta1", [args.adam_beta1, args.adam_beta2], "adam_beta2")
    yield "optimizer.eps", value("adam_epsilon")
    yield "optimizer.weight_decay", value("weight_decay")
    yield "optimizer.max_grad_norm", value("max_grad_norm")
    yield "seed", value("seed")
    kind = str(_plain(args.lr_scheduler_type))
    name = _SCHEDULES.get(kind, kind)
    problem = _schedule_problem(args, kind)
    yield "schedule.name", value("lr_scheduler_type", name, "lr_scheduler_kwargs", problem=problem)
    min_lr = (args.lr_scheduler_kwargs or {}).get("min_lr")
    if min_lr is not None:
        yield "schedule.min_lr", value("lr_scheduler_kwargs", min_lr)
    if kind != "constant":  # which has no warm-up there, either
        # A number below 1 is the share of a job's own steps, as in Trainer.
        steps = args.warmup_steps or 0
        is_share = 0 < steps < 1
        key = f"schedule.warmup_{'ratio' if is_share else 'steps'}"
        yield key, value("warmup_steps", steps if is_share else int(steps))
    yield _end(args)
    if _plain(args.eval_strategy) == "steps":
        steps = _steps("eval_steps", args.eval_steps, is_set=True)
        yield "eval_every_steps", dataclasses.replace(steps, needs="data.eval")


def _schedule_problem(args: TrainingArguments, kind: str) -> str:
    if kind not in _SCHEDULES:
        known = ", ".join(_SCHEDULES)
        return f"TrainingArguments.lr_scheduler_type must be one of {known}, got {kind}"
    known_kwargs = {"min_lr"} if kind == "cosine_with_min_lr" else set()
    for key in args.lr_scheduler_kwargs or {}:
        if key not in known_kwargs:
            rule = "hold min_lr of cosine_with_min_lr alone"
            return f"TrainingArguments.lr_scheduler_kwargs must {rule}, got {key}"
    return ""


def _end(args: TrainingArguments) -> tuple[str, TrainerValue]:
    """`max_steps` comes first, as in Trainer; a job without either has no other default."""
    if args.max_steps > 0:
        value = TrainerValue(argument="max_steps", value=args.max_steps, is_set=True, fills=True)
        return "max_steps", value
    epochs = args.num_train_epochs
    whole = float(epochs).is_integer()
    problem = f"TrainingArguments.num_train_epochs must be a whole number, got {epochs}"
    return "epochs", TrainerValue(
        argument="num_train_epochs",
        value=int(epochs),
        is_set=False,
        fills=True,
        problem="" if whole else problem,
    )


def _steps(argument: str, steps: Any, *, is_set: bool) -> TrainerValue:
    """A number of a job's own steps."""
    problem = "" if steps >= 1 else f"TrainingArguments.{argument} must be steps, got {steps}"
    return TrainerValue(argument=argument, value=steps, is_set=is_set, problem=problem)


def _run_values(args: TrainingArguments) -> Iterator[tuple[str, TrainerValue]]:
    def value(argument: str, given: Any, is_set: bool) -> TrainerValue:
        return TrainerValue(argument=argument, value=given, is_set=is_set)

    if _plain(args.save_strategy) == "steps":
        saves = _is_set(args, "save_steps")
        yield "checkpoint_every_steps", _steps("save_steps", args.save_steps, is_set=saves)
    else:
        yield "checkpoint_every_steps", value("save_strategy", 0, True)
    again = bool(getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing)
    yield "recompute", value("gradient_checkpointing", "full" if again else "none", again)
    reports = list(args.report_to or ())
    yield "tensorboard", value("report_to", "tensorboard" in reports, bool(reports))
    # Trainer's own callback logs all jobs into one W&B run, so this counts where it is asked for.
    project = os.environ.get("WANDB_PROJECT") or getattr(args, "project", "huggingface")
    yield "wandb_project", value("report_to", project if "wandb" in reports else None, False)


def deepspeed_source(args: TrainingArguments) -> Any:
    """The DeepSpeed JSON of the arguments, or of `accelerate launch`.

    Raises:
        ConfigError: if there is none.
    """
    if args.deepspeed:
        return args.deepspeed
    file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true" and file != "none":
        return file
    raise ConfigError("args.deepspeed must name a DeepSpeed JSON with a tlora section, got none")
