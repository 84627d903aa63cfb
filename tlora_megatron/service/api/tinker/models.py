"""Makes models with the jobs that train them, tells of them, and lets them go."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request

from tlora_megatron.config.documents import apply_override
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.service.api.gate import Caller, Submitter
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.submitting import check_setting, submit
from tlora_megatron.service.api.tinker import bodies
from tlora_megatron.service.api.tinker.context import (
    Reading,
    Submitting,
    TenantContext,
    architecture_of,
    positions_of,
)
from tlora_megatron.service.api.tinker.names import ModelId, Refused, RequestId, TinkerRoute
from tlora_megatron.service.api.tinker.sessions import is_local, leave
from tlora_megatron.service.settings import Settings
from tlora_megatron.service.store import Job, Model

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
    "service.checkpoint_every_s",
    "service.gpus",
    "service.max_slowdown",
    "service.priority",
)
"""Settings that `user_metadata` may hold, each as `tlora.KEY`, beyond Tinker's protocol."""
_PREFIX = "tlora."


def router(service: Service) -> APIRouter:
    routes = APIRouter(route_class=TinkerRoute)

    @routes.post("/create_model")
    async def create(
        body: bodies.CreateModel, caller: Submitter, context: Submitting
    ) -> dict[str, Any]:
        check_optimizer(body.optimizer_config)
        await service.read(context.open_session, body.session_id)
        model_id = ModelId(body.session_id, body.model_seq_id)
        known = service.store.sessions.model
        if await service.read(known, str(model_id), tenant=context.tenant) is None:
            model, document = await service.read(_draft, context, model_id, body)
            await submit_model(context, caller, model, document)
        return {
            "request_id": str(RequestId(model_id, 0, "create_model")),
            "model_id": str(model_id),
        }

    @routes.post("/get_info")
    async def info(model_id: bodies.Word, context: Reading, request: Request) -> dict[str, Any]:
        model = await service.read(context.model, model_id)
        return await service.read(_info, context, model, is_local(request))

    @routes.post("/unload_model")
    async def unload(model_id: bodies.Word, context: Submitting) -> dict[str, Any]:
        model = await service.read(context.model, model_id)
        gone = await leave(context, model, keep=False)
        seq_id = (gone.last_request or 0) - gone.log_number(0)
        return {"request_id": str(RequestId(ModelId.of(gone), seq_id, "unload_model"))}

    return routes


def check_optimizer(config: bodies.OptimizerConfig | None) -> None:
    """Refuses optimizers that are not AdamW; raises `Refused` naming the family."""
    if config is not None and config.type != "adamw":
        raise Refused(f"optimizer_config.type must be adamw here, got {config.type!r:.80}")


def _draft(
    context: TenantContext, model_id: ModelId, body: bodies.CreateModel
) -> tuple[Model, dict[str, Any]]:
    base, lora = context.base(body.base_model), body.lora_config
    lora.check_rest("lora_config")
    model = context.new_model(
        model_id,
        base=body.base_model,
        rank=lora.rank,
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
        user_metadata={k: str(value) for k, value in (body.user_metadata or {}).items()} or None,
    )
    return model, model_document(model, lora.seed, positions_of(base))


async def submit_model(
    context: TenantContext, caller: Caller, model: Model, document: Mapping[str, Any]
) -> Model:
    """Submits the job of a model and writes the model, in one transaction; once, if asked again.

    Raises:
        ConfigError: if the settings are no job's.
        Gone: if the session has ended meanwhile.
        OverLimit: if the tenant would have more jobs than it may.
    """

    def add(jobs: Sequence[Job]) -> None:
        context.open_session(model.session)  # who ends it from now on finds the model
        if context.sessions.model(model.id, tenant=model.tenant) is None:
            context.sessions.add_model(replace(model, job=jobs[0].id))

    asked = {"door": "tinker", "id": model.id}
    key = f"tinker/{model.id}"
    await submit(context.service, caller, document, key=key, asked=asked, also=add)
    return await context.service.read(context.model, model.id)


def _info(context: TenantContext, model: Model, local: bool) -> dict[str, Any]:
    base = context.service.bases().get(model.base)
    folder = None if base is None or base.path is None else str(base.path)
    # A client on this host loads the tokenizer of the base's own folder; others by its name.
    tokenizer = folder if local and folder is not None and ":" not in folder else model.base
    data = {
        "arch": None if base is None else architecture_of(base),
        "model_name": model.base,
        "tokenizer_id": tokenizer,
    }
    return {
        "type": "get_info",
        "model_data": data,
        "model_id": model.id,
        "is_lora": True,
        "lora_rank": model.rank,
        "model_name": model.base,
    }


def model_document(model: Model, seed: int | None, max_positions: int | None) -> dict[str, Any]:
    """The document of a model's job; raises `ConfigError` or `Refused` if there is none."""
    targets = [*(ATTENTION if model.train_attn else ()), *(MLP if model.train_mlp else ())]
    if not targets:
        raise Refused(
            "train_attn or train_mlp must be true, got neither: the unembedding has no adapter here"
        )
    lora = {"rank": model.rank, "alpha": ALPHA, "dropout": 0.0, "target_modules": targets}
    if seed is None:  # one that a retry of the same request gets again
        seed = int.from_bytes(hashlib.sha256(model.id.encode()).digest()[:4], "big") >> 1
    document = _document(model, lora, seed, max_positions)
    _apply_settings(document, model.user_metadata or {})
    return document


def loaded_document(
    model: Model, state: Mapping[str, Any], max_positions: int | None
) -> dict[str, Any]:
    """The document of a model's job that starts from the state of another, `state.json`."""
    job = state["job"]
    document = _document(model, job["lora"], int(job["seed"]), max_positions)
    settings = (model.user_metadata or {}).items()
    _apply_settings(document, {k: v for k, v in settings if k.startswith("tlora.service")})
    return document


def _document(
    model: Model, lora: Mapping[str, Any], seed: int, max_positions: int | None
) -> dict[str, Any]:
    longest = Settings().micro_batch_tokens  # every gang's micro-batch holds so many
    return {
        "max_seq_len": min(longest, max_positions or longest),
        "base_model": model.base,
        "name": ModelId.of(model).job_name,
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
