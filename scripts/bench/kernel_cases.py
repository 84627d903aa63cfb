"""The Triton kernels of one linear on their own: operands, calls, floors in bytes, errors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from fused import build_factors, row_groups, with_dropout
from linear_shapes import SHAPES, adapter_mix
from linear_workload import make_workload

from tlora_megatron.ops.dropout.masks import dropout_reference
from tlora_megatron.ops.lora.triton.backward import backward_up
from tlora_megatron.ops.lora.triton.config import KernelConfig
from tlora_megatron.ops.lora.triton.down import down
from tlora_megatron.ops.lora.triton.ops import TritonOps
from tlora_megatron.ops.lora.triton.sums import backward_down
from tlora_megatron.ops.lora.triton.up import up, up_dropped

Call = Callable[[], object]


class Point(NamedTuple):
    """What is measured."""

    shape: str
    tokens: int
    adapters: int
    dropout: float


class Case:
    """The operands of one point, several sets of them."""

    def __init__(
        self, point: Point, device: torch.device, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.workload = make_workload(SHAPES[point.shape], point.tokens, device=device, dtype=dtype)
        mix = adapter_mix(point.tokens, point.adapters)
        self.rows = row_groups(mix, dropout=point.dropout)
        self.factors = with_dropout(build_factors(self.workload, mix), point.dropout)
        self.ops = TritonOps(config=KernelConfig())
        self.plan = self.ops.plan(self.factors[0], self.rows)
        self.s = [self._down(i, KernelConfig()) for i in range(len(self.factors))]
        self.ds = [self._backward_up(i, KernelConfig()) for i in range(len(self.factors))]

    def _down(self, i: int, config: KernelConfig) -> torch.Tensor:
        x = self.workload.sets[i].x_TK
        return down(x, self.factors[i], self.rows, self.plan, config.down)

    def _backward_up(self, i: int, config: KernelConfig) -> torch.Tensor:
        factors, dy = self.factors[i], self.workload.sets[i].dy_TN
        tables = self.ops.tables[factors]
        return backward_up(dy, self.s[i], factors, tables, self.plan, config.backward_up)

    def _run(self, kernel: str, i: int, config: KernelConfig) -> object:
        operands, factors = self.workload.sets[i], self.factors[i]
        tables, rows, plan = self.ops.tables[factors], self.rows, self.plan
        window = (0, rows.ends[-1])
        if kernel == "down":
            return self._down(i, config)
        if kernel == "backward_up":
            return self._backward_up(i, config)
        if kernel == "up":
            n = operands.dy_TN.shape[1]
            return up(self.s[i], None, n, factors, tables, plan, config.up)
        if kernel == "dgrad":
            return up_dropped(self.ds[i], factors, rows, plan, config.up, window)
        x, ds, blocks = operands.x_TK, self.ds[i], config.backward_down
        return backward_down(x, ds, factors, tables, rows, window, plan, blocks)

    def calls(self, kernel: str, config: KernelConfig) -> list[Call]:
        """The kernel on each set."""

        def call(i: int) -> Call:
            return lambda: self._run(kernel, i, config)

        return [call(i) for i in range(len(self.factors))]

    def floor_bytes(self, kernel: str) -> int:
        """Bytes that must cross the memory bus."""
        factors, x = self.factors[0], self.workload.sets[0].x_TK
        tokens, depth = x.shape
        dy = tokens * sum(c.size for c in factors.columns) * 2
        ranked = self.s[0].numel() * 2
        lora_a = factors.lora_a.numel() * 2
        lora_b = sum(b.numel() for b in factors.lora_b) * 2
        x_bytes = tokens * depth * 2
        return {
            "down": x_bytes + lora_a + ranked,
            "up": dy + lora_b + ranked // 2,
            "dgrad": x_bytes + lora_a + ranked // 2,
            "backward_up": dy + lora_b + _grad_bytes(factors.grad_b) + 3 * ranked // 2,
            "backward_down": x_bytes + _grad_bytes(factors.grad_a) + ranked // 2,
        }[kernel]

    def errors(self, config: KernelConfig) -> dict[str, float]:
        """Largest relative error of a kernel's results against fp32, over all slots."""
        factors, operands, rows = self.factors[0], self.workload.sets[0], self.rows
        tables = self.ops.tables[factors]
        for grad in (g for s in (*factors.grad_a, *factors.grad_b) for g in s if g is not None):
            grad.zero_()
        s = self._down(0, config)
        y = up(s, None, operands.dy_TN.shape[1], factors, tables, self.plan, config.up)
        ds = backward_up(operands.dy_TN, s, factors, tables, self.plan, config.backward_up)
        window = (0, rows.ends[-1])
        dx = up_dropped(ds, factors, rows, self.plan, config.up, window)
        blocks = config.backward_down
        backward_down(operands.x_TK, ds, factors, tables, rows, window, self.plan, blocks)
        found: dict[str, float] = defaultdict(float)
        begin = 0
        for slot, end in enumerate(rows.ends[:-1]):
            for kernel, error in self._slot_errors(slot, begin, end, y, dx).items():
                found[kernel] = max(found[kernel], error)
            begin = end
        found["down"] = found["up"]
        return found

    def _slot_errors(
        self, slot: int, begin: int, end: int, y: torch.Tensor, dx: torch.Tensor
    ) -> dict[str, float]:
        factors, operands = self.factors[0], self.workload.sets[0]
        x, dy = operands.x_TK[begin:end].float(), operands.dy_TN[begin:end]
        scaling, p = factors.scaling[slot], factors.dropout[slot]
        keep = torch.ones_like(x)
        if factors.has_dropout:
            keys = self.rows.row_keys(x.device)[begin:end]
            key, column = factors.dropout_key, factors.first_column
            keep = dropout_reference(keep, keys, p.expand(end - begin), key, column)
        found = {"up": 0.0, "backward_up": 0.0, "backward_down": 0.0}
        branch = torch.zeros_like(x)
        for p, rank in enumerate(factors.layout.ranks[slot]):
            a, b = factors.layout.a_begin[slot][p], factors.layout.b_begin[slot][p]
            lora_a = factors.lora_a[a : a + rank].float()
            lora_b = factors.lora_b[p][b : b + rank].float()
            columns = factors.columns[p]
            dy_p, grad_a, grad_b = columns.read(dy).float(), factors.grad_a, factors.grad_b
            s, ds = scaling * (x * keep) @ lora_a.t(), scaling * dy_p @ lora_b.t()
            branch += ds @ lora_a
            pairs = {
                "up": (columns.read(y[begin:end]), s @ lora_b),
                "backward_up": (grad_b[slot][p], s.t() @ dy_p),
                "backward_down": (grad_a[slot][p], ds.t() @ (x * keep)),
            }
            found = {k: max(found[k], _error(*pairs[k])) for k in found}
        return {**found, "dgrad": _error(dx[begin:end], branch * keep)}


def _grad_bytes(grads: Sequence[Sequence[torch.Tensor | None]]) -> int:
    return sum(2 * g.numel() * 4 for slot in grads for g in slot if g is not None)


def _error(actual: torch.Tensor | None, expected: torch.Tensor) -> float:
    assert actual is not None
    return float((actual.float() - expected).norm() / expected.norm().clamp(min=1e-30))
