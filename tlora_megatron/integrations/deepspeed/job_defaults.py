"""Turns DeepSpeed's top-level optimizer, scheduler and clipping into defaults of the jobs."""

from __future__ import annotations

from typing import Any, NamedTuple

from tlora_megatron.config.reader import ConfigError, must
from tlora_megatron.integrations.deepspeed.trainer_values import AUTO

_ADAM = ("Adam", "AdamW")
_ADAM_KEYS = {"lr": "lr", "betas": "betas", "eps": "eps", "weight_decay": "weight_decay"}
_WITHOUT_EFFECT = ("torch_adam", "adam_w_mode", "fused")
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear"}
_SCHEDULE_KEYS = ("warmup_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_type")
_LR = "optimizer.lr"


class JobDefaults(NamedTuple):
    """The values for jobs that DeepSpeed's own keys give."""

    fields: dict[str, Any]
    """Fields of a job, nested like one."""
    asked: frozenset[str]
    """Dotted fields that are "auto": a trainer's arguments decide them, else this package."""
    changes: list[str]
    """A sentence for each key taken."""


def take_job_defaults(document: dict[str, Any]) -> JobDefaults:
    """Returns the job fields that a DeepSpeed config sets, or leaves to a trainer, for all jobs.

    Raises:
        ConfigError: for an optimizer or scheduler that a job cannot have.
    """
    fields: dict[str, Any] = {}
    changes = []
    if "optimizer" in document:
        fields |= _adam(document["optimizer"])
        changes.append("optimizer is the jobs' default: each job has its own AdamW")
    if "gradient_clipping" in document:
        fields["optimizer.max_grad_norm"] = document["gradient_clipping"]
        changes.append(
            "gradient_clipping is the jobs' default optimizer.max_grad_norm: each is clipped by "
            "its own norm"
        )
    if "scheduler" in document:
        fields |= _schedule(document["scheduler"], fields)
        changes.append("scheduler is the jobs' default schedule: each counts its own steps")
    asked = frozenset(key for key, value in fields.items() if value == AUTO)
    nested: dict[str, Any] = {}
    for key, value in fields.items():
        if value != AUTO:
            group, _, name = key.partition(".")
            nested.setdefault(group, {})[name] = value
    return JobDefaults(nested, asked, changes)


def _type_and_params(name: str, section: Any) -> tuple[Any, dict[str, Any]]:
    if not isinstance(section, dict):
        raise must(name, "be a mapping of type and params", section)
    params = section.get("params", {})
    if not isinstance(params, dict):
        raise must(f"{name}.params", "be a mapping", params)
    return section.get("type"), dict(params)


def _adam(section: Any) -> dict[str, Any]:
    kind, params = _type_and_params("optimizer", section)
    if kind not in _ADAM:
        raise must("optimizer.type", f"be one of {', '.join(_ADAM)}", kind)
    if kind == "Adam" and not params.get("adam_w_mode", True) and params.get("weight_decay"):
        raise must("optimizer.params.adam_w_mode", "be true: weight decay is decoupled", False)
    for key in _WITHOUT_EFFECT:
        params.pop(key, None)
    for key in params:
        if key not in _ADAM_KEYS:
            raise ConfigError(
                f"optimizer.params must be among {', '.join(_ADAM_KEYS)}, got {key!r}"
            )
    return {f"optimizer.{_ADAM_KEYS[key]}": value for key, value in params.items()}


def _schedule(section: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields that a scheduler sets; a WarmupLR that is "auto" throughout says nothing of its own.

    Without warm-up, which is what "auto" means unless a trainer says otherwise, that is a constant
    rate.
    """
    kind, params = _type_and_params("scheduler", section)
    if not isinstance(kind, str) or kind not in _SCHEDULES:
        raise must(
            "scheduler.type",
            f"be one of {', '.join(_SCHEDULES)}",
            kind,
            "or give tlora.defaults.schedule",
        )
    params.pop("total_num_steps", None)  # a job's own number of steps
    for key in params:
        if key not in _SCHEDULE_KEYS:
            raise ConfigError(
                f"scheduler.params must be among {', '.join(_SCHEDULE_KEYS)}, got {key!r}"
            )
    if _is_left_open(params):
        params["warmup_type"] = "linear"
    if params.get("warmup_type", "log") != "linear":
        raise must(
            "scheduler.params.warmup_type", "be linear", params.get("warmup_type", "log (default)")
        )
    if params.get("warmup_min_lr", 0) not in (0, AUTO):
        raise must("scheduler.params.warmup_min_lr", "be 0", params["warmup_min_lr"])
    if "warmup_num_steps" not in params:
        remedy = "DeepSpeed's own default is 1000"
        raise must("scheduler.params.warmup_num_steps", "be given", None, remedy)
    found = {"schedule.warmup_steps": params["warmup_num_steps"]}
    if "warmup_max_lr" in params and (params["warmup_max_lr"] != AUTO or _LR not in fields):
        found[_LR] = params["warmup_max_lr"]
    if _SCHEDULES[kind] != "constant" or not _is_left_open(params):
        found["schedule.name"] = _SCHEDULES[kind]
    return found


def _is_left_open(params: dict[str, Any]) -> bool:
    """True if the warm-up's length is "auto", and its shape is not said to be another."""
    return params.get("warmup_num_steps") == AUTO and params.get("warmup_type") in (
        None, AUTO, "linear",
    )  # fmt: skip
