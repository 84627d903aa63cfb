"""A frozen weight in FP8 as values: codes and scales, and the codes of rows that it multiplies.

Shapes: T rows, K features in, N features out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tlora_megatron.ops.quantised.rows import GROUP, QuantRows, encode_rows, handed_rows

Kind = Literal["channel", "block"]


@dataclass(frozen=True, slots=True, eq=False)
class WeightCodes:
    """A weight `decode(codes) * scales`, and how the rows that it multiplies are quantised."""

    codes_NK: Tensor
    """uint8, contiguous."""
    scales: Tensor
    """fp32 `[N]` of output channels, or `[ceil(N / GROUP), ceil(K / GROUP)]` of blocks."""

    def __post_init__(self) -> None:
        num_rows, num_columns = self.codes_NK.shape
        blocks = (-(-num_rows // GROUP), -(-num_columns // GROUP))
        assert self.codes_NK.dtype == torch.uint8, "codes must be uint8"
        assert self.scales.dtype == torch.float32, "scales must be fp32"
        assert self.scales.shape in ((num_rows,), blocks), (
            f"scales must be [{num_rows}] or {list(blocks)}, got {list(self.scales.shape)}"
        )

    @property
    def kind(self) -> Kind:
        """The parts that have a scale each: output channels, or blocks of 128 x 128."""
        return "channel" if self.scales.dim() == 1 else "block"

    @property
    def num_columns(self) -> int:
        """N."""
        return len(self.codes_NK)

    @property
    def shape(self) -> torch.Size:
        """`[N, K]`."""
        return self.codes_NK.shape

    @property
    def device(self) -> torch.device:
        """The device that holds codes and scales."""
        return self.codes_NK.device

    @property
    def group(self) -> int | None:
        """Columns of x that share a scale; None = all of a row."""
        return None if self.kind == "channel" else GROUP

    @property
    def fold_N(self) -> Tensor | None:
        """Factors that dy is multiplied with before it is quantised; None = none.

        Scales of channels cannot be taken out of dgrad's sum over N.
        """
        return self.scales if self.kind == "channel" else None

    def rows_of(self, x_TK: Tensor) -> QuantRows:
        """Returns x as the forward product takes it, taken from who made x or quantised now."""
        rows = handed_rows(x_TK, self.group)
        return encode_rows(x_TK, group=self.group) if rows is None else rows

    def gradient_rows_of(self, dy_TN: Tensor) -> QuantRows:
        """Returns dy as the input gradient takes it, taken from who made dy or quantised now."""
        rows = handed_rows(dy_TN, None, self.fold_N)
        return encode_rows(dy_TN, fold_K=self.fold_N) if rows is None else rows
