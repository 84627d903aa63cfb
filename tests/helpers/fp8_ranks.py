"""Ranks of sequence parallelism in one process: each is given what others would send it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.linear_case import Case
from tlora_megatron.layers.linear import GemmStrategy, LinearLayout, multi_lora_linear_vjp
from tlora_megatron.ops.lora.linear_ops import Base, BoundLinear
from tlora_megatron.ops.quantised.rows import encode_rows
from tlora_megatron.parallel.collectives import Pending

RANKS = 2
LAYOUT = LinearLayout(kind="column", tp_size=RANKS, sequence_parallel=True)


class Ranks:
    """The collectives of `linear_layout`, and the bytes that a rank has sent."""

    def __init__(self, case: Case, view: Any, x_TK: Tensor, group: int | None) -> None:
        self.rank = self.bytes = 0
        self._rows = encode_rows(x_TK, group=group)
        self.x_TK, self._view, self._case = x_TK, view, case

    def window(self, rank: int) -> tuple[int, int]:
        num_rows = len(self.x_TK)
        return rank * num_rows // RANKS, (rank + 1) * num_rows // RANKS

    def own(self, rows: Tensor) -> Tensor:
        return rows[slice(*self.window(self.rank))]

    def gather_together(self, tensors: Sequence[Tensor], group: object) -> list[Pending]:
        return [self._gathered(x) for x in tensors]

    def _gathered(self, x: Tensor) -> Pending:
        self.bytes += x.nbytes
        whole = self._rows.codes_TK if x.dtype == torch.uint8 else self._rows.scales
        assert torch.equal(x, self.own(whole)), "a row's codes depend on the row alone"
        return Pending(whole.clone(), None)

    def all_gather_rows(self, x: Tensor, group: object) -> Tensor:
        self.bytes += x.nbytes
        assert torch.equal(x, self.own(self.x_TK))
        return self.x_TK.clone()

    def all_reduce(self, s: Tensor, group: object) -> Pending:
        for rank in set(range(RANKS)) - {self.rank}:
            window = self.window(rank)
            s += self.bound().down(self.x_TK[slice(*window)], window)
        return Pending(s, None)

    def bound(self) -> BoundLinear:
        factors = self._case.strategy.factors
        assert factors is not None
        return self._case.bank.ops.bind(factors, self._view.rows)

    def products(self, base: Base, strategy: GemmStrategy) -> list[Tensor]:
        found = []
        for self.rank in range(RANKS):
            x_WK, bias_N = self.own(self.x_TK).clone(), self._case.bias
            found.append(multi_lora_linear_vjp(x_WK, base, bias_N, strategy, self._view, None)[0])
        return found

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = "tlora_megatron.layers.linear."
        for name in ("gather_together", "all_gather_rows", "all_reduce"):
            monkeypatch.setattr(module + name, getattr(self, name))
        monkeypatch.setattr(module + "dist.get_rank", lambda group: self.rank)
