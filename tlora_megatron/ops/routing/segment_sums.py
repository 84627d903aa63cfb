"""Sums over consecutive runs of rows."""

from __future__ import annotations

import torch


def segment_sums(values_T: torch.Tensor, lengths_G: torch.Tensor) -> torch.Tensor:
    """Sums of consecutive runs, fp32 `[G]`, in a fixed order; a NaN stays in its own run."""
    return torch.segment_reduce(values_T.float(), "sum", lengths=lengths_G, initial=0, unsafe=True)
