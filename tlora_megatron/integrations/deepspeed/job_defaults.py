"""Turns DeepSpeed's top-level optimizer, scheduler and clipping into defaults of the jobs."""

from __future__ import annotations

from typing import Any

from tlora_megatron.config.reader import ConfigError, must

_ADAM = ("Adam", "AdamW")
_ADAM_KEYS = {"lr": "lr", "betas": "betas", "eps": "eps", "weight_decay": "weight_decay"}
_WITHOUT_EFFECT = ("torch_adam", "adam_w_mode", "fused")
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear"}
_SCHEDULE_KEYS = ("warmup_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_type")


def take_job_defaults(document: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns job fields that a DeepSpeed config sets for all, and a sentence for each key taken.

    Raises:
        ConfigError: for an optimizer or scheduler that a job cannot have.
    """
    optimizer: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    changes = []
    if "optimizer" in document:
        optimizer |= _adam(document["optimizer"])
        changes.append("optimizer is the jobs' default: each job has its own AdamW")
    if "gradient_clipping" in document:
        optimizer["max_grad_norm"] = document["gradient_clipping"]
        changes.append(
            "gradient_clipping is the jobs' default optimizer.max_grad_norm: each is clipped by "
            "its own norm"
        )
    if "scheduler" in document:
        defaults["schedule"] = _schedule(document["scheduler"], optimizer)
        changes.append("scheduler is the jobs' default schedule: each counts its own steps")
    if optimizer:
        defaults["optimizer"] = optimizer
    return defaults, changes


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
    return {_ADAM_KEYS[key]: value for key, value in params.items()}


def _schedule(section: Any, optimizer: dict[str, Any]) -> dict[str, Any]:
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
    if params.get("warmup_type", "log") != "linear":
        raise must(
            "scheduler.params.warmup_type", "be linear", params.get("warmup_type", "log (default)")
        )
    if params.get("warmup_min_lr"):
        raise must("scheduler.params.warmup_min_lr", "be 0", params["warmup_min_lr"])
    if "warmup_max_lr" in params:
        optimizer["lr"] = params["warmup_max_lr"]
    return {"name": _SCHEDULES[kind], "warmup_steps": params.get("warmup_num_steps", 0)}
