"""The dynamic quantiser: every row, or every 128 columns of it, gets a scale from itself alone.

To the bit, all in fp32: `amax` keeps NaN; `scale = max(amax / 448, 2**-100)`;
`code = e4m3(clamp(x * (1 / scale)))`. Where amax is NaN or infinite, scale is NaN, so that products
with the row are NaN and no other row changes. docs/fp8.md has the reasons.

Shapes: T rows, K features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tlora_megatron.ops.lora.kernel_choice import runs_triton
from tlora_megatron.ops.quantised.codes import LARGEST, decode, encode

GROUP = 128
"""Columns that share a scale, with a base that has scales for blocks; the last may be fewer."""
SMALLEST_SCALE = 2.0**-100
"""Keeps the inverse of a row of zeros finite. Servers have 1 / (448 * 512), with which most codes
of gradients were 0: these are divided by a batch's tokens and multiplied with a weight's scales."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantRows:
    """Quantised rows: `decode(codes) * scales`."""

    codes_TK: Tensor
    """uint8, contiguous."""
    scales: Tensor
    """fp32 `[T]`, or `[T, ceil(K / GROUP)]` for groups."""

    @property
    def group(self) -> int | None:
        """Columns that share a scale; None = all columns of a row."""
        return GROUP if self.scales.dim() == 2 else None


def encode_rows(
    x_TK: Tensor, *, group: int | None = None, fold_K: Tensor | None = None
) -> QuantRows:
    """Quantises rows of any floating dtype, read as fp32.

    Args:
        group: `GROUP`, or None for one scale a row.
        fold_K: fp32 factors of the columns; values are multiplied with them in fp32 before all.
    """
    assert group in (None, GROUP), f"group must be None or {GROUP}, got {group}"
    if runs_triton(x_TK):
        # Not at the top: triton is only there on machines with a GPU.
        from tlora_megatron.ops.quantised.triton_rows import launch_encode

        return QuantRows(*launch_encode(x_TK.contiguous(), group, fold_K))
    values_TK = x_TK.float() if fold_K is None else x_TK.float() * fold_K
    if group is None:
        scales_T, inverses_T = _scales(values_TK)
        return QuantRows(encode(values_TK * inverses_T[:, None]), scales_T)
    num_columns = x_TK.shape[1]
    padded_TK = F.pad(values_TK, (0, -num_columns % GROUP))
    grouped = padded_TK.view(len(x_TK), padded_TK.shape[1] // GROUP, GROUP)
    scales_TG, inverses_TG = _scales(grouped)
    codes = encode(grouped * inverses_TG[..., None]).flatten(1)
    return QuantRows(codes[:, :num_columns].contiguous(), scales_TG)


def decode_rows(rows: QuantRows, dtype: torch.dtype) -> Tensor:
    """Returns the values `[T, K]` that codes and scales stand for, multiplied in `dtype`."""
    scales = rows.scales.to(dtype)
    if rows.group is None:
        return decode(rows.codes_TK, dtype) * scales[:, None]
    num_columns = rows.codes_TK.shape[1]
    repeated_TK = scales.repeat_interleave(GROUP, dim=1)[:, :num_columns]
    return decode(rows.codes_TK, dtype) * repeated_TK


def _scales(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scales over the last axis, and their inverses."""
    amax = values.abs().amax(dim=-1)
    # A tensor on the same device: CUDA would multiply by the inverse of a number.
    largest = torch.full((), LARGEST, dtype=torch.float32, device=values.device)
    scales = (amax / largest).clamp(min=SMALLEST_SCALE)
    scales = scales.masked_fill_(amax.isinf(), torch.nan)
    return scales, scales.reciprocal()
