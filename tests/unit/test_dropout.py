"""The dropout mask: rate, independence, mean, and that it follows from global indices alone."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tlora_megatron.ops.dropout import dropout_reference, mix32, mix_ints

ROWS, COLUMNS = 512, 2048
LAYER = mix_ints(3)
RATES = (1e-3, 0.05, 0.1, 0.5, 0.9)


def row_keys(seed: int = 1, rows: int = ROWS) -> torch.Tensor:
    """Keys as `RowGroups.row_keys` makes them."""
    return mix32(mix_ints(seed) ^ mix32(torch.arange(rows, dtype=torch.int32)))


def dropped(
    p: float, *, seed: int = 1, layer: int = LAYER, rows: int = ROWS, column: int = 0
) -> torch.Tensor:
    """bool `[rows, COLUMNS]`: which elements are zeroed."""
    ones = torch.ones(rows, COLUMNS)
    return dropout_reference(ones, row_keys(seed, rows), torch.full((rows,), p), layer, column) == 0


def assert_rate(hits: torch.Tensor, rate: float, sigmas: float = 5.0) -> None:
    """The share of True lies within `sigmas` standard deviations of `rate`."""
    deviation = math.sqrt(rate * (1 - rate) / hits.numel())
    assert abs(hits.float().mean().item() - rate) <= sigmas * deviation


def stated(p: float) -> float:
    """The probability that 16 bits can express."""
    return round(p * 65536) / 65536


@pytest.mark.parametrize("p", RATES)
def test_rate(p: float) -> None:
    mask = dropped(p)
    for part in (mask, mask[:, ::2], mask[:, 1::2], mask[:1], mask[:, :1]):
        assert_rate(part, stated(p))


def test_tiny_probabilities_round_to_65536ths() -> None:
    assert not dropped(0.49 / 65536, rows=2048).any()
    assert_rate(dropped(1 / 65536, rows=4096), 1 / 65536)
    assert_rate(dropped(1.6 / 65536, rows=4096), 2 / 65536)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_columns_rows_layers_and_seeds_are_independent(p: float) -> None:
    mask, rate = dropped(p), stated(p)
    pairs = {
        "halves of a hash": (mask[:, ::2], mask[:, 1::2]),
        "neighbouring hashes": (mask[:, :-2], mask[:, 2:]),
        "neighbouring rows": (mask[:-1], mask[1:]),
        "far rows": (mask[: ROWS // 2], mask[ROWS // 2 :]),
        "layers": (mask, dropped(p, layer=mix_ints(4))),
        "seeds": (mask, dropped(p, seed=2)),
    }
    for name, (left, right) in pairs.items():
        both = (left & right).float().mean().item()
        deviation = math.sqrt(rate**2 * (1 - rate**2) / left.numel())
        assert abs(both - rate**2) <= 5 * deviation, name


def test_rows_and_columns_vary_no_more_than_chance() -> None:
    p = 0.5
    mask = dropped(p).float()
    for dim, n in ((0, ROWS), (1, COLUMNS)):
        spread = mask.mean(dim).std().item() / math.sqrt(p * (1 - p) / n)
        assert 0.85 < spread < 1.15


@pytest.mark.parametrize("p", RATES)
def test_the_mean_stays(p: float) -> None:
    ones = torch.ones(ROWS, COLUMNS)
    y = dropout_reference(ones, row_keys(), torch.full((ROWS,), p), LAYER, 0)
    deviation = math.sqrt(p / (1 - p) / ones.numel())
    assert abs(y.mean().item() - 1) <= 5 * deviation + 2**-17 / (1 - p)
    kept = y[y != 0].unique()
    assert kept.tolist() == [pytest.approx(1 / (1 - p), rel=1e-6)]


@pytest.mark.parametrize("cuts", [(0, 1024, 2048), (0, 512, 1024, 1536, 2048), (0, 7, 1000, 2048)])
def test_shards_of_columns_equal_the_whole(cuts: tuple[int, ...]) -> None:
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    keys, p = row_keys(), torch.linspace(0, 0.9, ROWS)
    whole = dropout_reference(x, keys, p, LAYER, 0)
    parts = [
        dropout_reference(x[:, begin:end], keys, p, LAYER, begin)
        for begin, end in itertools.pairwise(cuts)
    ]
    assert torch.equal(torch.cat(parts, dim=1), whole)


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


def test_bits_by_hand() -> None:
    """The formula that all kernels share, in Python integers."""

    def mix(h: int) -> int:
        h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        return h ^ h >> 16

    p = 0.3
    keys = row_keys(rows=4)
    y = dropout_reference(torch.ones(4, 9), keys, torch.full((4,), p), LAYER, 6)
    for row, column in itertools.product(range(4), range(9)):
        key = mix((keys[row].item() ^ LAYER) & 0xFFFFFFFF)
        h = mix(key ^ ((column + 6) >> 1) * 0x9E3779B9 & 0xFFFFFFFF)
        bits = h >> 16 if column % 2 else h & 0xFFFF
        assert (y[row, column] != 0) == (bits >= int(p * 65536 + 0.5))
