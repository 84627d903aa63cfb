"""What narrows the causal rule of attention: a window, and a sink beside the keys (gpt-oss).

Semantics, for a query i of head n that sees the keys J(i) = {j <= i, j > i - window}:

    p[i, j] = exp(s[i, j]) / (exp(sink[n]) + sum over J(i) of exp(s[i, j]))

The sink's own share is dropped, so a row of p sums to less than 1. From attention without sinks,
whose logarithm of the sum of exponentials is lse, it follows as

    out * sigmoid(lse - sink),    lse' = log(exp(lse) + exp(sink))

and the way back is that of attention without sinks, given this output and lse': it computes
p = exp(s - lse') and ds = p (dp - sum(dout * out)), which is the gradient of p above.

Shapes: T query rows, K key rows, N query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Sight:
    """The keys that a query sees, and what takes a share of its softmax beside them."""

    window: int | None = None
    """Keys, its own included; None = all up to its own."""
    sinks_N: Tensor | None = None
    """A logit of each query head, in any dtype; None = there are none."""


WHOLE = Sight()
"""All keys up to the query's own, and nothing beside them."""


def attend_in_sight(
    q_TND: Tensor, k_KGD: Tensor, v_KGD: Tensor, scale: float, sight: Sight
) -> Tensor:
    """The definition for one document: attention `[T, N, D]`, differentiable; stores its scores.

    The last query sees the last key, as far as the window lets it.
    """
    rows, keys, groups = len(q_TND), len(k_KGD), k_KGD.shape[1]
    q_GRTD = q_TND.unflatten(1, (groups, -1)).permute(1, 2, 0, 3)
    scores_GRTK = q_GRTD @ k_KGD.permute(1, 2, 0)[:, None] * scale
    seen_TK = torch.ones(rows, keys, dtype=torch.bool, device=q_TND.device).tril(keys - rows)
    if sight.window is not None:
        seen_TK = seen_TK.triu(keys - rows - sight.window + 1)
    scores_GRTK = scores_GRTK.masked_fill(~seen_TK, float("-inf"))
    if sight.sinks_N is None:
        shares_GRTK = scores_GRTK.softmax(-1)
    else:
        sinks_GR11 = sight.sinks_N.to(scores_GRTK.dtype).view(groups, -1, 1, 1)
        beside = sinks_GR11.expand(*scores_GRTK.shape[:3], 1)
        shares_GRTK = torch.cat([scores_GRTK, beside], dim=-1).softmax(-1)[..., :-1]
    out_GRTD = shares_GRTK @ v_KGD.transpose(0, 1)[:, None]
    return out_GRTD.permute(2, 0, 1, 3).flatten(1, 2)


def with_sinks(out_TND: Tensor, lse_NT: Tensor, sinks_N: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the output and the logarithm of the sum `[N, T]` with sinks, from those without.

    Given to attention's way back without sinks, they give the gradients with them.
    """
    sinks_N1 = sinks_N.to(lse_NT.dtype)[:, None]
    shares_NT = torch.sigmoid(lse_NT - sinks_N1)
    out = (out_TND * shares_NT.T[..., None]).to(out_TND.dtype)
    return out, torch.logaddexp(lse_NT, sinks_N1)
