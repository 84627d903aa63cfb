"""RMSNorm for Megatron's local spec: sequence parallelism, and Hugging Face's rounding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, as Hugging Face's Llama computes it.

    Statistics are fp32; the normalised value is rounded to the input's dtype before the weight is
    multiplied in. Rows are independent, so a sequence-parallel shard needs no communication.
    The constructor is that of Megatron's `WrappedTorchNorm`, which refuses sequence parallelism.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        )
        # Megatron adds up gradients of parameters marked so over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalises `[..., hidden_size]`."""
        # Without a weight, `rms_norm` is one fused kernel and saves only x and the statistics.
        return F.rms_norm(x, (x.shape[-1],), eps=self.eps) * self.weight
