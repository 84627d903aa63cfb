"""Sums over consecutive runs of rows."""

from __future__ import annotations

import torch


def segment_sums(
    values_T: torch.Tensor, lengths_G: torch.Tensor, *, exact: bool = False
) -> torch.Tensor:
    """Sums of consecutive runs, fp32 `[G]`, in a fixed order; a NaN stays in its own run.

    Args:
        exact: on GPUs too the order must not depend on the row at which a run begins. torch's loads
            four aligned values at once where a run is long.
    """
    values_T = values_T.float()
    if exact and values_T.is_cuda:
        from tlora_megatron.ops.routing.triton_segment_sums import launch_segment_sums

        return launch_segment_sums(values_T.contiguous(), lengths_G.cumsum(0))
    return torch.segment_reduce(values_T, "sum", lengths=lengths_G, initial=0, unsafe=True)
