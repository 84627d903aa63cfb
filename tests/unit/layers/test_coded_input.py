"""Codes of a sequence-parallel linear's input travel in its place, and not a bit of it changes."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.helpers.linear_case import WORKLOADS, Case
from tlora_megatron.layers.fold import FoldStrategy
from tlora_megatron.layers.linear import GemmStrategy, multi_lora_linear_vjp
from tlora_megatron.layers.linear_layout import LinearLayout
from tlora_megatron.layers.s_lora import SLoraStrategy
from tlora_megatron.ops.lora.torch_ops import TorchLinear
from tlora_megatron.ops.quantised.handed_rows import hand_rows
from tlora_megatron.ops.quantised.rows import GROUP, encode_rows
from tlora_megatron.ops.quantised.weight import QuantWeight, encode_weight
from tlora_megatron.parallel.collectives import Pending

RANKS, ROWS = 2, 40
LAYOUT = LinearLayout(kind="column", tp_size=RANKS, sequence_parallel=True)


class Ranks:
    """Stands in for the collectives of `linear_layout`: gives what the other ranks would send."""

    def __init__(self, case: Case, view: Any, x_TK: Tensor, group: int | None) -> None:
        self.rank, self.bytes, self.gathers = 0, 0, 0
        self._rows = encode_rows(x_TK, group=group)
        self._x_TK, self._view, self._case = x_TK, view, case

    def window(self, rank: int) -> tuple[int, int]:
        return rank * ROWS // RANKS, (rank + 1) * ROWS // RANKS

    def own(self, rows: Tensor) -> Tensor:
        return rows[slice(*self.window(self.rank))]

    def gather_rows(self, x: Tensor, group: object) -> Pending:
        self.bytes, self.gathers = self.bytes + x.nbytes, self.gathers + 1
        whole = self._rows.codes_TK if x.dtype == torch.uint8 else self._rows.scales
        assert torch.equal(x, self.own(whole)), "a row's codes depend on the row alone"
        return Pending(whole.clone(), None)

    def all_gather_rows(self, x: Tensor, group: object) -> Tensor:
        self.bytes, self.gathers = self.bytes + x.nbytes, self.gathers + 1
        assert torch.equal(x, self.own(self._x_TK))
        return self._x_TK.clone()

    def all_reduce(self, s: Tensor, group: object) -> Pending:
        for rank in set(range(RANKS)) - {self.rank}:
            window = self.window(rank)
            s += self.bound().down(self._x_TK[slice(*window)], window)
        return Pending(s, None)

    def bound(self) -> TorchLinear:
        factors = self._case.strategy.factors
        assert factors is not None
        return TorchLinear(factors, self._view.rows)


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
    module = "tlora_megatron.layers.linear_layout."
    for name in ("gather_rows", "all_gather_rows", "all_reduce"):
        monkeypatch.setattr(module + name, getattr(ranks, name))
    monkeypatch.setattr(module + "dist.get_rank", lambda group: ranks.rank)
    return Setting(case, view, base, x_TK, ranks)


def products(setting: Setting, strategy: GemmStrategy) -> list[Tensor]:
    """y on every rank."""
    found = []
    for rank in range(RANKS):
        setting.ranks.rank = rank
        x_WK = setting.ranks.own(setting.x_TK).contiguous()
        y, _ = multi_lora_linear_vjp(
            x_WK, setting.base, setting.case.bias, strategy, setting.view, None
        )
        found.append(y)
    return found


def code_bytes(setting: Setting) -> int:
    columns = setting.case.site.in_size
    groups = 1 if setting.base.group is None else -(-columns // GROUP)
    return ROWS * (columns + 4 * groups)


def test_standard_adapters_let_codes_travel(setting: Setting) -> None:
    strategy = FoldStrategy(setting.case.bank, setting.case.site, LAYOUT)
    expected, _ = setting.ranks.bound().forward(setting.x_TK, setting.base, setting.case.bias)
    for y in products(setting, strategy):
        assert torch.equal(y, expected)
    assert setting.ranks.bytes == code_bytes(setting) < setting.x_TK.nbytes


def test_without_adapters_codes_travel_alone(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FoldStrategy, "factors", None)
    expected = setting.base.forward(setting.x_TK) + setting.case.bias
    for strategy in (
        FoldStrategy(setting.case.bank, setting.case.site, LAYOUT),
        FoldStrategy(setting.case.bank, setting.case.site, LAYOUT, block_diagonal_only=True),
    ):
        setting.ranks.bytes = 0
        for y in products(setting, strategy):
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
    strategies["block-diagonal jobs"]._sums_ds = False
    assert all(strategy.own_s is None for strategy in strategies.values())
    (y, _) = products(setting, strategies["block-diagonal jobs"])
    expected, _ = setting.ranks.bound().forward(setting.x_TK, setting.base, case.bias)
    assert torch.equal(y, expected)
    assert setting.ranks.bytes == setting.x_TK.nbytes


def test_a_weight_that_is_no_code_is_gathered_as_ever(setting: Setting) -> None:
    strategy = FoldStrategy(setting.case.bank, setting.case.site, LAYOUT)
    products(setting._replace(base=setting.case.weight), strategy)  # type: ignore[arg-type]
    assert setting.ranks.gathers == RANKS
    assert setting.ranks.bytes == setting.x_TK.nbytes
