"""The dropout mask: rate, independence, mean, and that it follows from global indices alone."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tlora_megatron.ops.dropout import dropout_reference, dropped_places, mix32, mix_ints

ROWS, COLUMNS = 512, 2048
LAYER = mix_ints(3)
RATES = (1e-3, 0.05, 0.1, 0.5, 0.9)


def row_keys(seed: int = 1, rows: int = ROWS) -> torch.Tensor:
    return mix32(mix_ints(seed) ^ mix32(torch.arange(rows, dtype=torch.int32)))


def dropped(
    p: float, *, seed: int = 1, layer: int = LAYER, rows: int = ROWS, column: int = 0
) -> torch.Tensor:
    """bool `[rows, COLUMNS]`: which elements are zeroed."""
    ones = torch.ones(rows, COLUMNS)
    return dropout_reference(ones, row_keys(seed, rows), torch.full((rows,), p), layer, column) == 0


def assert_rate(hits: torch.Tensor, rate: float) -> None:
    """The share of True lies within five standard deviations of `rate`."""
    deviation = math.sqrt(rate * (1 - rate) / hits.numel())
    assert abs(hits.float().mean().item() - rate) <= 5 * deviation


def stated(p: float) -> float:
    """The probability that 16 bits can express."""
    return round(p * 65536) / 65536


@pytest.mark.parametrize("p", RATES)
def test_rate_and_what_is_kept(p: float) -> None:
    ones = torch.ones(ROWS, COLUMNS)
    y = dropout_reference(ones, row_keys(), torch.full((ROWS,), p), LAYER, 0)
    mask = y == 0
    for part in (mask, mask[:, ::2], mask[:, 1::2], mask[:1], mask[:, :1]):
        assert_rate(part, stated(p))
    assert y[~mask].unique().tolist() == [pytest.approx(1 / (1 - p), rel=1e-6)]


def test_tiny_probabilities_round_to_65536ths() -> None:
    assert not dropped(0.49 / 65536, rows=2048).any()
    assert_rate(dropped(1 / 65536, rows=4096), 1 / 65536)
    assert_rate(dropped(1.6 / 65536, rows=4096), 2 / 65536)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_layers_and_seeds_are_independent(p: float) -> None:
    for other in (dropped(p, layer=mix_ints(4)), dropped(p, seed=2)):
        assert_rate(dropped(p) & other, stated(p) ** 2)


def test_each_row_has_its_own_probability_and_zero_passes() -> None:
    x = torch.randn(3, 4096, generator=torch.Generator().manual_seed(0))
    y = dropout_reference(x, row_keys(rows=3), torch.tensor([0.0, 0.5, 0.9]), LAYER, 0)
    assert torch.equal(y[0], x[0])
    for row, p in ((1, 0.5), (2, 0.9)):
        assert_rate(y[row] == 0, stated(p))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mask_does_not_depend_on_values_or_dtype(dtype: torch.dtype) -> None:
    x = torch.full((8, COLUMNS), math.nan, dtype=dtype)
    keys, p = row_keys(rows=8), torch.full((8,), 0.5)
    y = dropout_reference(x, keys, p, LAYER, 0)
    assert y.dtype == dtype
    assert torch.equal(y.isnan(), ~dropped(0.5, rows=8))
    assert (y[~y.isnan()] == 0).all()


def standardized(p: float, rows: int) -> torch.Tensor:
    rate = stated(p)
    return (dropped(p, rows=rows).float() - rate) / math.sqrt(rate * (1 - rate))


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_all_pairs_of_columns_and_of_rows_are_independent(p: float) -> None:
    """Two million pairs: as standard normal variables, they stay below 6.5 and have variance 1."""
    mask = standardized(p, COLUMNS)
    for values in (mask, mask.t()):
        scores = (values.t() @ values / math.sqrt(len(values))).triu(1)
        scores = scores[scores != 0]
        assert scores.abs().max() < (6.5 if p == 0.5 else 7.5)
        assert 0.98 < scores.var() < 1.02


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_columns_that_share_a_seed_are_independent_together(p: float) -> None:
    """Every pattern of a seed's eight columns comes as often as it should."""
    hits = dropped(p, rows=2048).unflatten(1, (-1, 4, 4, 2)).transpose(2, 3).reshape(-1, 8)
    found = torch.bincount((hits * 2 ** torch.arange(8)).sum(1), minlength=256).double()
    ones = torch.tensor([i.bit_count() for i in range(256)], dtype=torch.float64)
    expected = len(hits) * stated(p) ** ones * (1 - stated(p)) ** (8 - ones)
    common = expected > 5
    chi = ((found - expected) ** 2 / expected)[common].sum().item()
    freedom = int(common.sum()) - 1
    assert abs(chi - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(("row", "column"), [(1, 1), (1, 8), (1, 32), (7, 2), (64, 512)])
def test_corners_of_rectangles_are_independent(row: int, column: int) -> None:
    """Where the mask is a function of a row's key xor a column's, four corners may depend."""
    mask = standardized(0.5, 2048)
    corners = mask[:-row, :-column] * mask[row:, :-column] * mask[:-row, column:]
    score = (corners * mask[row:, column:]).mean().item() * math.sqrt(corners.numel())
    assert abs(score) < 5


def test_a_comparison_of_half_floats_is_the_definition() -> None:
    """The CUDA kernels' decision, for all bits and up to 30720 dropped places of 65536."""
    bits = torch.arange(65536, dtype=torch.int32)
    halves = bits.to(torch.int16).view(torch.float16)
    for dropped_of in (0, 1, 2, 655, 6554, 13107, 30719, 30720):
        first_kept = torch.tensor(0xFC00 - dropped_of - 65536, dtype=torch.int16)
        kept = ~(halves < first_kept.view(torch.float16))
        assert torch.equal(kept, (0xFC00 - bits) & 0xFFFF >= dropped_of), dropped_of
        assert not (halves[~kept].abs() < 2**-14).any(), "no subnormal number decides"


def test_places_are_at_most_all_but_one() -> None:
    places = dropped_places(torch.tensor([0.0, 0.1, 0.99999, 1.0]))
    assert places.tolist() == [0, 6554, 65535, 65535]


def test_bits_by_hand() -> None:
    """The formula that all kernels share, in Python integers."""
    factors = (0xEF40188B, 0xAB87D1A5, 0xBF9DD3E7, 0xDFFAE703)

    def mix(h: int) -> int:
        h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        return h ^ h >> 16

    p = 0.3
    keys = row_keys(rows=4)
    y = dropout_reference(torch.ones(4, 90), keys, torch.full((4,), p), LAYER, 6)
    for row, column in itertools.product(range(4), range(90)):
        key = mix((keys[row].item() ^ LAYER) & 0xFFFFFFFF)
        block, inside = divmod(column + 6, 32)
        seed = block * 4 + inside % 8 // 2
        h = (key ^ seed * 0x9E3779B9 & 0xFFFFFFFF) * 0x85EBCA6B & 0xFFFFFFFF
        h = (h ^ h >> 16) * factors[inside // 8] & 0xFFFFFFFF
        bits = h >> 16 if column % 2 else h & 0xFFFF
        place = (0xFC00 - bits) % 65536
        assert (y[row, column] != 0) == (place >= int(p * 65536 + 0.5))
