"""Parts of the trainer's models that would not be built, or not as their arguments ask.

Megatron-LM's `--rope-scaling-factor` does not reach the model: `pretrain_gpt.py` builds every model
with the factor 8 (core_v0.16.1 to main), and HybridModel knows no scaling. Llama 3.2 has 32.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models import backends
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import torch_norm, transformer_block

from tlora_megatron.integrations.megatron.layer.core_attention import PackedCoreAttention
from tlora_megatron.integrations.megatron.layer.norm_and_rotary import RMSNorm
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.frozen.rotary import inverse_frequencies

logger = logging.getLogger(__name__)

_MARK = "_tlora_local_parts"
_NORMS = ((backends, "LNImpl"), (gpt_layer_specs, "LNImpl"), (transformer_block, "LayerNormImpl"))
"""Where Megatron keeps the norm of its local spec."""


def install(*, context_parallel: bool, sequence_parallel: bool) -> None:
    """Replaces the parts that would refuse to be built; call it before the model is built.

    Without Transformer Engine, Megatron's attention refuses context parallelism and its norm
    sequence parallelism; with apex, its norm refuses RMSNorm. Attention becomes ours in any case,
    once the model stands.
    """
    if getattr(backends, _MARK, False):
        return
    setattr(backends, _MARK, True)
    _leave_apex_norm()
    if context_parallel:
        backends.LocalSpecProvider.core_attention = lambda self: PackedCoreAttention
    if sequence_parallel:
        torch_norm.WrappedTorchNorm.__new__ = staticmethod(_sharded_norm)


def _leave_apex_norm() -> None:
    """Puts torch's norm where Megatron found apex: FusedLayerNorm computes LayerNorm alone."""
    apex_s = [(module, name) for module, name in _NORMS if getattr(module, name) is FusedLayerNorm]
    for module, name in apex_s:
        setattr(module, name, torch_norm.WrappedTorchNorm)
    if apex_s:
        logger.info("the norm of the local layers is torch's: apex's computes no RMSNorm")


def _sharded_norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> RMSNorm:
    if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
        raise ValueError(
            f"normalization must be RMSNorm without --apply-layernorm-1p under sequence parallel "
            f"without Transformer Engine, got {config.normalization}"
        )
    return RMSNorm(config, hidden_size, eps)


_BUILT_FACTOR = 8.0
"""Default of GPTModel's `rope_scaling_factor`, which no script changes."""
_ROUNDING = 1e-5
"""Relative; devices raise to a power in their own way."""


def set_rotary_frequencies(model: Any, spec: ModelSpec) -> None:
    """Gives a built model the rope scaling that its script has left out.

    Args:
        spec: what the arguments describe.

    Raises:
        ValueError: if the model has frequencies that nobody asked for.
    """
    rotary = getattr(model, "rotary_pos_emb", None)
    if rotary is None or model.position_embedding_type != "rope":
        return
    expected = inverse_frequencies(spec)
    if _equal(rotary.inv_freq, expected):
        return
    if not any(_equal(rotary.inv_freq, built) for built in _left_out(spec)):
        raise ValueError(
            f"the model's rotary frequencies must be those of --rotary-base "
            f"{spec.rope_theta:.0f} and rope scaling {spec.rope_scaling}, got {rotary.inv_freq}"
        )
    logger.warning(
        "--rope-scaling-factor %g is set in the model: the script had left it out",
        spec.rope_scaling["factor"] if spec.rope_scaling else 1,
    )
    rotary.inv_freq = expected.to(rotary.inv_freq.device)


def _left_out(spec: ModelSpec) -> list[torch.Tensor]:
    """Frequencies of scripts that ignore the factor, or all scaling."""
    if spec.rope_scaling is None:
        return []
    scaling = spec.rope_scaling | {"factor": _BUILT_FACTOR}
    return [inverse_frequencies(replace(spec, rope_scaling=s)) for s in (scaling, None)]


def _equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    found = found.detach().float().cpu()
    return found.shape == expected.shape and torch.allclose(
        found, expected, rtol=_ROUNDING, atol=0.0
    )
