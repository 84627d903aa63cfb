"""Replaces parts of Megatron's local layer spec that cannot be built for the supported models."""

from __future__ import annotations

import logging
from typing import Any

from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models import backends
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import torch_norm, transformer_block

from tlora_megatron.integrations.megatron.layer.core_attention import PackedCoreAttention
from tlora_megatron.integrations.megatron.layer.norm import RMSNorm

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
