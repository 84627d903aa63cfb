"""Losses of pairs against autograd of the papers' formulas, and rows against whole pairs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import logsigmoid

from tlora_megatron.ops.frozen.pair_losses import PAIR_KINDS, PairRows, PairTerms, pair_losses

PAIRS = 5


def written_out(kind: str, logps_P2: Tensor, t: PairTerms[Tensor]) -> Tensor:
    """The formulas of the papers, with odds as odds."""
    chosen, rejected = logps_P2.unbind(1)
    means = chosen / t.chosen_tokens, rejected / t.rejected_tokens
    factor: Tensor | float = 1.0
    if kind == "dpo":
        h = t.beta * (chosen - t.reference_chosen) - t.beta * (rejected - t.reference_rejected)
    elif kind == "simpo":
        h = t.beta * (means[0] - means[1]) - t.margin
    else:
        odds = [mean.exp() / (1 - mean.exp()) for mean in means]
        h, factor = (odds[0] / odds[1]).log(), t.beta
    loss = -(1 - t.smoothing) * logsigmoid(h) - t.smoothing * logsigmoid(-h)
    return t.weight * factor * loss - t.sft * chosen


@pytest.mark.parametrize("kind", PAIR_KINDS)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
def test_slopes_are_those_of_the_formulas(kind: str, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    uniform = torch.rand(len(PairTerms._fields), PAIRS, generator=draw, dtype=torch.float64)
    terms = PairTerms[Tensor](*uniform)._replace(
        kind=torch.full((PAIRS,), PAIR_KINDS[kind], dtype=torch.float64),
        reference_chosen=-20 * uniform[4] * (kind == "dpo"),
        reference_rejected=-20 * uniform[5] * (kind == "dpo"),
        smoothing=uniform[2] / 2,
        margin=uniform[3] * (kind == "simpo"),
        chosen_tokens=(1 + 9 * uniform[6]).round(),
        rejected_tokens=(1 + 9 * uniform[7]).round(),
    )
    logps_P2 = -0.1 - 20 * torch.rand(PAIRS, 2, generator=draw, dtype=torch.float64)
    logps_P2.requires_grad_()
    expected_P = written_out(kind, logps_P2, terms)
    (slope_P2,) = torch.autograd.grad(expected_P.sum(), logps_P2)
    found = pair_losses(logps_P2.detach(), torch.stack(terms))
    torch.testing.assert_close(found.loss_P, expected_P.detach())
    torch.testing.assert_close(found.slope_P2, slope_P2)


def test_rows_get_their_side_s_slope_and_others_keep_their_weight() -> None:
    terms = PairTerms(0.0, 0.5, 0.0, 0.0, -3.0, -1.0, 2.0, 1.0, 1.0, 0.0)
    terms_KP = torch.tensor([terms, terms], dtype=torch.float64).t()
    # The second pair's rejected side is on another rank.
    rows = PairRows(torch.tensor([1, 2, 4, 5]), torch.tensor([2, 1, 1, 0]), terms_KP)
    nll_T, weights_T = torch.tensor([9.0, 1.0, 2.5, 9.0, 0.25, 4.0, 9.0]), torch.full((7,), 0.125)

    def add(sums_G: Tensor) -> None:
        sums_G += torch.tensor([0.0, 0.0, 1.0, 2.0])

    found_T = rows.weights(nll_T, weights_T, add, exact=False)
    logps_P2 = torch.tensor([[-3.5, -0.25], [-5.0, -2.0]], dtype=torch.float64)
    slope_P2 = pair_losses(logps_P2, terms_KP).slope_P2.float()
    expected = [0.125, -slope_P2[0, 0], -slope_P2[0, 0], 0.125, -slope_P2[0, 1], -slope_P2[1, 0]]
    assert found_T.tolist() == pytest.approx([*map(float, expected), 0.125])
    nll_T[1] = torch.nan
    found_T = rows.weights(nll_T, weights_T, None, exact=False)
    assert found_T.isfinite().all(), "a pair that is not finite must not reach a GEMM"
