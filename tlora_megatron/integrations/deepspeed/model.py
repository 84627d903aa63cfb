"""Reads a Hugging Face model, freezes it and puts it under DeepSpeed, where it attends by document.

Attention stays inside packed documents. No mask is made and none is looked at: transformers' own
packing by position_ids is silently lost to an `attention_mask` of ones or a cache.
"""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from tlora_megatron.config.schema import BaseModelSpec
from tlora_megatron.model.quantisation import refuse_published
from tlora_megatron.ops.frozen.packed_attention import attend_documents
from tlora_megatron.ops.routing import current_micro_batch
from tlora_megatron.training.formats.hf_checkpoint import all_finite
from tlora_megatron.training.run.training_run import DTYPES

logger = logging.getLogger(__name__)

NAME = "tlora_packed"

_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")
"""Arguments of other attention implementations that this one does not support."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attends within documents.

    Args:
        query: `[1, N, T, D]`, rotated.
        key: `[1, G, T, D]`, as `value`.
        attention_mask: None, since this implementation asks for none.

    Returns:
        `[1, T, N, D]`.
    """
    micro_batch = current_micro_batch()
    if micro_batch is None:
        raise RuntimeError(
            "a micro-batch must be bound by use_micro_batch, got none; for anything but training "
            'set the model back with set_attn_implementation("sdpa")'
        )
    if dropout:
        raise ValueError(f"attention dropout must be 0 in a frozen backbone, got {dropout}")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name} must be None in packed attention, got {type(module).__name__}"
            )
    q_TND, k_TGD, v_TGD = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend_documents(q_TND, k_TGD, v_TGD, micro_batch, scale)[None], None


def load_model(base: BaseModelSpec, engine: dict[str, Any], *, tp_size: int) -> Any:
    """Reads or draws a causal model; under ZeRO-3 without TP every rank only ever holds its part.

    Raises:
        ValueError: if the folder is quantised, or transformers cannot build the model.
        ImportError: if ZeRO-3 needs accelerate and there is none.
    """
    if base.path is not None:
        refuse_published(Path(base.path) / "config.json", "DeepSpeed")
    dtype, keep = DTYPES[base.dtype], None
    if engine["zero_optimization"].get("stage") == 3 and tp_size == 1:
        keep = _zero_init(engine)
    try:
        if base.path is not None:
            # Weights are read as safetensors only: nothing is ever unpickled.
            return AutoModelForCausalLM.from_pretrained(
                base.path, dtype=dtype, use_safetensors=True, local_files_only=True
            )
        config = AutoConfig.from_pretrained(str(base.config), local_files_only=True)
        torch.manual_seed(base.seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        where = base.path or base.config
        raise ValueError(f"base_model must be a causal model, got {where}: {error}") from error
    finally:
        del keep


def _zero_init(engine: dict[str, Any]) -> Any:
    """Lets transformers build models under `zero.Init` as long as the returned object lives."""
    try:
        import accelerate  # noqa: F401 - transformers' object is empty without it
    except ImportError as error:
        raise ImportError("ZeRO-3 needs accelerate: pip install accelerate") from error
    from transformers.integrations import HfDeepSpeedConfig

    return HfDeepSpeedConfig(engine)


def refuse_adapters(model: nn.Module) -> None:
    """Refuses a model that is not a bare base."""
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):
            raise ValueError(f"the model must carry no adapters yet, got some at {name}")


def turn_dropout_off(model: nn.Module) -> None:
    """Turns off the dropout of the frozen backbone; one warning says so.

    That of modules, and rates that models hand to functions, which stand on the modules or in their
    configurations (`residual_dropout`, `layerdrop`).
    """
    found = False
    holders: list[Any] = list(model.modules())
    configs = (getattr(module, "config", None) for module in holders)
    holders += {id(config): config for config in configs if config is not None}.values()
    for holder in holders:
        if isinstance(holder, nn.Dropout) and holder.p > 0:
            holder.p, found = 0.0, True
        for name, rate in vars(holder).items():
            if "drop" in name and isinstance(rate, float) and rate > 0:
                setattr(holder, name, 0.0)
                found = True
    if found:
        logger.warning("the backbone's own dropout is off: it is frozen")


def start_engine(model: Any, engine: dict[str, Any]) -> Any:
    """Hands a model to DeepSpeed, where AutoTP and ZeRO-3 cut its weights, and freezes it."""
    engine = dict(engine)
    # AutoTP hooks what it leaves whole, and fails on what is frozen; what it cuts it unfreezes.
    model.requires_grad_(engine.get("tensor_parallel", {}).get("autotp_size", 1) > 1)
    if "vocab_parallel_lm_head" in TPTrainingConfig.model_fields and "tensor_parallel" in engine:
        # A tied head would bring DeepSpeed's own loss with it.
        engine["tensor_parallel"] = {"vocab_parallel_lm_head": False, **engine["tensor_parallel"]}
    try:
        started, *_ = deepspeed.initialize(model=model, config=engine)
    except AssertionError as error:
        raise ValueError(f"DeepSpeed refuses the model or its JSON: {error}") from error
    model.requires_grad_(False)
    return started


def check_finite(model: nn.Module) -> None:
    """Refuses a base with NaN or infinity; every rank looks at the part that it holds."""
    for name, parameter in model.named_parameters():
        held = _held(parameter).detach()
        if held.numel() and not all_finite(held):
            raise ValueError(
                f"{name} of the base model must be finite, got NaN or infinity: the model is "
                "damaged; fetch or convert it anew"
            )


def _held(parameter: Any) -> Tensor:
    """The values that this rank holds; ZeRO-3 leaves what is behind the last rank's unset."""
    part = getattr(parameter, "ds_tensor", None)
    if part is None:
        return parameter
    begin = part.numel() * dist.get_rank(parameter.ds_process_group)
    return part.flatten()[: max(0, parameter.ds_numel - begin)]


def use_packed_attention(model: Any) -> None:
    """Makes the model's attention stay inside packed documents.

    Raises:
        ValueError: if the model's attention is not transformers' to replace.
    """
    # Without a mask function no mask is made.
    AttentionInterface.register(NAME, packed_attention)
    if not getattr(type(model), "_supports_attention_backend", False):
        raise ValueError(
            f"the model's attention must go through transformers' attention interface, "
            f"got {type(model).__name__}"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"the model must take position_ids, got {type(model).__name__}")
    model.set_attn_implementation(NAME)
    model.config.use_cache = False


def require_grad_from_embedding(model: Any) -> None:
    """Makes autograd reach the first linear; call it once DeepSpeed has set its hooks.

    Set before them, it would make ZeRO-3 gather the embedding for its backward, which has none.
    """
    model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: output.requires_grad_(torch.is_grad_enabled())
    )
