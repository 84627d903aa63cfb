"""Writes the document of the job that trains a model."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Any

from tlora_megatron.config.reader import ConfigError
from tlora_megatron.config.source import apply_override
from tlora_megatron.service.api.submitting.documents import check_setting
from tlora_megatron.service.api.tinker.refusals import Refused
from tlora_megatron.service.api.tinker.state.sessions import Model

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ALPHA = 32.0
"""Tinker's protocol has no alpha; this is what its documentation names."""
SETTINGS = (
    "lora.alpha",
    "lora.dropout",
    "lora.expert_rank",
    "lora.expert_sharing",
    "lora.target_modules",
    "lora.use_rslora",
    "service.gpus",
    "service.max_slowdown",
    "service.priority",
)
"""Settings that `user_metadata` may hold, each as `tlora.KEY`, beyond Tinker's protocol."""
_PREFIX = "tlora."


def model_document(
    model: Model, seed: int | None, max_positions: int | None = None
) -> dict[str, Any]:
    """The document of a model's job.

    Raises:
        ConfigError: if `user_metadata` holds settings that are none.
        Refused: if nothing would be trained.
    """
    targets = [*(ATTENTION if model.train_attn else ()), *(MLP if model.train_mlp else ())]
    if not targets:
        raise Refused(
            "train_attn or train_mlp must be true, got neither: the unembedding has no adapter here"
        )
    lora = {"rank": model.rank, "alpha": ALPHA, "dropout": 0.0, "target_modules": targets}
    document = _document(model, lora, _own_seed(model) if seed is None else seed)
    if max_positions is not None:
        document["max_seq_len"] = min(1024, max_positions)
    _apply_settings(document, model.user_metadata or {})
    return document


def loaded_document(model: Model, state: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a model's job that starts from the state of another, `state.json`."""
    document = _document(model, state["job"]["lora"], int(state["job"]["seed"]))
    document["max_seq_len"] = state["job"].get("max_seq_len", 1024)
    settings = (model.user_metadata or {}).items()
    _apply_settings(document, {k: v for k, v in settings if k.startswith("tlora.service")})
    return document


def _document(model: Model, lora: Mapping[str, Any], seed: int) -> dict[str, Any]:
    return {
        "base_model": model.base,
        "name": model.model_id.job_name,
        "driven": True,
        "lora": dict(lora),
        "seed": seed,
        "service": {},
    }


def _apply_settings(document: dict[str, Any], metadata: Mapping[str, Any]) -> None:
    for key, value in metadata.items():
        if not key.startswith(_PREFIX):
            continue
        setting = key.removeprefix(_PREFIX)
        if setting not in SETTINGS:
            among = ", ".join(_PREFIX + name for name in SETTINGS)
            raise Refused(f"user_metadata must set {among} alone, got {key!r:.80}")
        check_setting(str(value), f"user_metadata[{key!r}]")
        try:
            apply_override(document, f"{setting}={value}")
        except ConfigError:
            raise
        except ValueError as error:  # a date or a number that is none
            raise Refused(f"user_metadata[{key!r}] must be a value, got {value!r:.80}") from error


def _own_seed(model: Model) -> int:
    """A seed that a retry of the same request gets again."""
    return int.from_bytes(hashlib.sha256(model.id.encode()).digest()[:4], "big") >> 1


def new_model(**fields: Any) -> Model:
    """A model without a job yet, made now."""
    return Model(job="", created_at=time.time(), **fields)
