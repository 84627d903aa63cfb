"""Residual streams in fp32 (`--fp32-residual-connection`) around layers in bf16."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_unfused

from tlora_megatron.layers.transformer_engine.linear import is_te_linear


def why_not_stream(config: Any, column: Any) -> str | None:
    """Returns why a half must add to the residual stream by itself; None if our kernels may.

    Args:
        column: its column-parallel linear.
    """
    if not config.fp32_residual_connection:
        return None
    if not is_te_linear(column):
        return "fp32_residual_connection is True: linears of the local spec take no fp32 rows"
    if not _sums_in_fp32():
        return "fp32_residual_connection is True: this megatron-core rounds the residual stream"
    return None


@functools.cache
def _sums_in_fp32() -> bool:
    """True if Megatron's own sum leaves an fp32 stream as wide as it is (from 0.17 on)."""
    x, residual = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
    return bias_dropout_add_unfused(True)((x, None), residual, 0.0).dtype == residual.dtype
