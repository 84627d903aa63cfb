"""Codes of a sequence-parallel linear's input travel in its place, and not a bit of it changes."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.helpers.fp8_ranks import LAYOUT, Ranks
from tests.helpers.linear_case import WORKLOADS, Case
from tlora_megatron.layers.linear import multi_lora_linear_vjp
from tlora_megatron.layers.shardings import FoldStrategy, SLoraStrategy
from tlora_megatron.ops.quantised.rows import GROUP, encode_rows, hand_rows
from tlora_megatron.ops.quantised.weight import QuantWeight, encode_weight

ROWS = 40


class Setting(NamedTuple):
    case: Case
    view: Any
    base: QuantWeight
    x_TK: Tensor
    ranks: Ranks


@pytest.fixture(params=["channel", "block"])
def setting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Setting:
    case = Case("linear_qkv", torch.float32)
    view = case.view(WORKLOADS["distinct"], num_tokens=ROWS, training=True)
    base = encode_weight(case.weight)
    if request.param == "block":
        base = QuantWeight(base.codes_NK, torch.rand(1, 1) + 0.5)
    x_TK = case.draw(ROWS, case.site.in_size)
    ranks = Ranks(case, view, x_TK, base.group)
    ranks.stand_in(monkeypatch)
    return Setting(case, view, base, x_TK, ranks)


def code_bytes(setting: Setting) -> int:
    columns = setting.case.site.in_size
    groups = 1 if setting.base.group is None else -(-columns // GROUP)
    return ROWS * (columns + 4 * groups)


def test_standard_adapters_let_codes_travel(setting: Setting) -> None:
    strategy = FoldStrategy(setting.case.bank, setting.case.site, LAYOUT)
    expected, _ = setting.ranks.bound().forward(setting.x_TK, setting.base, setting.case.bias)
    for y in setting.ranks.products(setting.base, strategy):
        torch.testing.assert_close(y, expected)
    assert setting.ranks.bytes == code_bytes(setting) < setting.x_TK.nbytes


def test_codes_travel_alone_without_jobs(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FoldStrategy, "factors", None)
    expected = setting.base.forward(setting.x_TK) + setting.case.bias
    for strategy in (
        FoldStrategy(setting.case.bank, setting.case.site, LAYOUT),
        FoldStrategy(setting.case.bank, setting.case.site, LAYOUT, block_diagonal_only=True),
    ):
        setting.ranks.bytes = 0
        for y in setting.ranks.products(setting.base, strategy):
            assert torch.equal(y, expected)
        assert setting.ranks.bytes == code_bytes(setting)


def test_codes_that_lie_on_x_are_those_that_travel(setting: Setting) -> None:
    """The norm's: nobody reads x again to quantise it."""
    strategy = FoldStrategy(setting.case.bank, setting.case.site, LAYOUT)
    x_WK = setting.ranks.own(setting.x_TK).contiguous()
    rows = encode_rows(x_WK, group=setting.base.group)
    rows.codes_TK[0, 0] ^= 1
    hand_rows(x_WK, rows)
    with pytest.raises(AssertionError, match="depend on the row alone"):
        multi_lora_linear_vjp(x_WK, setting.base, None, strategy, setting.view, None)


def test_adapters_that_need_all_of_x_get_it(setting: Setting) -> None:
    case = setting.case
    strategies = {
        "block-diagonal jobs": FoldStrategy(case.bank, case.site, LAYOUT),
        "s_lora": SLoraStrategy(case.bank, case.site, LAYOUT),
    }
    strategies["block-diagonal jobs"].sums_ds = False
    assert not any(strategy.sums_ds for strategy in strategies.values())
    y, _ = setting.ranks.products(setting.base, strategies["block-diagonal jobs"])
    expected, _ = setting.ranks.bound().forward(setting.x_TK, setting.base, case.bias)
    assert torch.equal(y, expected)
    assert setting.ranks.bytes == setting.x_TK.nbytes
