"""RMSNorm for Megatron's local spec: sequence parallelism, and Hugging Face's rounding."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from tlora_megatron.integrations.megatron.layer.module_hooks import does_more
from tlora_megatron.ops.frozen.parts import Vjp
from tlora_megatron.ops.frozen.rms_norm import (
    Beside,
    NormWeight,
    add_rms_norm,
    add_rms_norm_vjp,
    fork_rms_norm,
    rms_norm,
)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, as Hugging Face's Llama computes it.

    Statistics are fp32; the normalised value is rounded to the input's dtype before the weight is
    multiplied in. Rows are independent, so a sequence-parallel shard needs no communication.
    Where calling the module does more than `forward`, `fork` and `add` call it, and autograd adds
    what the kernels otherwise add.
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

    @property
    def norm_weight(self) -> NormWeight:
        """The weight, read now."""
        return NormWeight(self.weight, self.eps, rounds_once=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises `[..., hidden_size]`."""
        return rms_norm(x, self.weight, self.eps)

    def fork(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the residual stream as it is, to be added to, and normalised."""
        if does_more(self):
            return x, self(x)
        return fork_rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the residual stream with x added, as it is and normalised."""
        if does_more(self):
            total = residual + x
            return total, self(total)
        return add_rms_norm(x, residual, self.weight, self.eps)

    def add_vjp(
        self, x: Tensor, residual: Tensor | None, beside: Beside | None = None
    ) -> tuple[Tensor, Tensor, Vjp]:
        """Does what `add` does, or `fork` without a residual; see `add_rms_norm_vjp`."""
        return add_rms_norm_vjp(x, residual, self.norm_weight, beside)
