"""Replaces parts of Megatron's local layer spec that refuse context or sequence parallelism."""

from __future__ import annotations

from typing import Any

from megatron.core.models import backends
from megatron.core.transformer import torch_norm

from tlora_megatron.integrations.megatron.layer.core_attention import PackedCoreAttention
from tlora_megatron.integrations.megatron.layer.norm import RMSNorm

_MARK = "_tlora_local_parts"


def install(*, context_parallel: bool, sequence_parallel: bool) -> None:
    """Replaces the parts that would refuse to be built; call it before the model is built.

    Without Transformer Engine, Megatron's attention refuses context parallelism and its norm
    sequence parallelism. Attention becomes ours in any case, once the model stands.
    """
    if getattr(backends, _MARK, False):
        return
    setattr(backends, _MARK, True)
    if context_parallel:
        backends.LocalSpecProvider.core_attention = lambda self: PackedCoreAttention
    if sequence_parallel:
        torch_norm.WrappedTorchNorm.__new__ = staticmethod(_sharded_norm)


def _sharded_norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> RMSNorm:
    if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
        raise ValueError(
            f"normalization must be RMSNorm without --apply-layernorm-1p under sequence parallel "
            f"without Transformer Engine, got {config.normalization}"
        )
    return RMSNorm(config, hidden_size, eps)
