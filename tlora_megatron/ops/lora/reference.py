"""The definition of a multi-adapter linear, one expression a formula; faster paths must equal it.

Semantics: `y[t] = W x[t] + b + scaling[s] * B[s] (A[s] drop(x[t]))` with `s` the slot of row t.
Rows of the null slot get the base output only. Runs in any dtype, fp64 in tests, on plain autograd.
A quantised base has other products `W x` and `dy W` (`ops.quantised.definition`), and this branch.

Shapes: T rows, K features in, N features out, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from tlora_megatron.ops.routing.row_groups import RowGroups


class Factors(NamedTuple):
    """One adapter's pair at one linear: `lora_a` `[rank, K]`, `lora_b` `[N, rank]`."""

    lora_a_RK: torch.Tensor
    lora_b_NR: torch.Tensor
    scaling: float


def multi_lora_linear_reference(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    factors: Mapping[int, Factors],
    rows: RowGroups,
    keep_TK: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns `[T, N]`; `keep_TK` multiplies the branch's input (mask over `1 - p`)."""
    base_TN = torch.nn.functional.linear(x_TK, weight_NK, bias_N)
    branch_TK = x_TK if keep_TK is None else x_TK * keep_TK
    runs = []
    begin = 0
    for slot, end in enumerate(rows.ends):
        run_TK, base_run_TN = branch_TK[begin:end], base_TN[begin:end]
        begin = end
        if slot in factors:
            a_RK, b_NR, scaling = factors[slot]
            base_run_TN = base_run_TN + scaling * (run_TK @ a_RK.t() @ b_NR.t())
        runs.append(base_run_TN)
    return torch.cat(runs)
