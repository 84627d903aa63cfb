"""Adapters at one linear of routed experts, with rows and gradients drawn: cases for their ops."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tlora_megatron.ops.experts.branch import (
    ExpertArenas,
    ExpertFactors,
    ExpertRuns,
    ExpertTarget,
    PlacedRows,
)


class BranchShape(NamedTuple):
    counts: tuple[tuple[int, ...], ...]
    """Rows of each adapter at each expert, the null slot last."""
    ranks: tuple[tuple[tuple[int, int, int], ...], ...]
    """Of each slot, for each of its targets: rank, first output column, number of columns."""
    in_size: int
    out_size: int


class BranchCase(NamedTuple):
    x: Tensor
    y: Tensor
    """What the base has computed."""
    dy: Tensor
    dx: Tensor
    runs: ExpertRuns
    factors: ExpertFactors


_GATE_UP = ((3, 0, 40), (3, 40, 40))
CASES = {
    "uneven": BranchShape(
        counts=((70, 5, 0, 3), (0, 0, 0, 0), (1, 131, 17, 0), (64, 0, 1, 9)),
        ranks=(((5, 0, 40), (5, 40, 40)), _GATE_UP, ((20, 0, 80),)),
        in_size=72,
        out_size=80,
    ),
    "wide": BranchShape(
        counts=((40, 30, 0), (3, 66, 2)),
        ranks=(((70, 0, 48), (70, 48, 48)), ((2, 0, 96),)),
        in_size=136,
        out_size=96,
    ),
    "some slots have none": BranchShape(
        counts=((12, 7, 9, 1), (0, 65, 3, 0)),
        ranks=((), ((4, 0, 24),), ()),
        in_size=24,
        out_size=24,
    ),
    "odd addresses": BranchShape(
        counts=((19, 4), (33, 0)), ranks=(((3, 1, 17), (2, 20, 9)),), in_size=23, out_size=31
    ),
}


def branch_case(
    shape: BranchShape, dtype: torch.dtype, device: str = "cpu", *, only: int | None = None
) -> BranchCase:
    """Draws a case; the same values, rounded, in every dtype.

    Args:
        only: the slot whose rows and factors are kept, with their values; the others have no rows.
    """
    generator = torch.Generator().manual_seed(7)

    def drawn(*sizes: int) -> Tensor:
        return (torch.randn(*sizes, generator=generator) / 4).bfloat16().to(device, dtype)

    counts = torch.tensor(shape.counts)
    rows, experts = int(counts.sum()), len(shape.counts)
    x, dy = drawn(rows, shape.in_size), drawn(rows, shape.out_size)
    y, dx = drawn(rows, shape.out_size), drawn(rows, shape.in_size)
    master = torch.float64 if dtype == torch.float64 else torch.float32
    arenas, spans = _arenas(shape, dtype, device)
    targets = []
    for of_slot, begin in zip(shape.ranks, spans, strict=True):
        made = []
        for rank, first, columns in of_slot:
            ranks, out = slice(begin, begin + rank), slice(first, first + columns)
            a, b = arenas.lora_a[:, ranks], arenas.lora_b[:, ranks, out]
            a.copy_(drawn(*a.shape)), b.copy_(drawn(*b.shape))
            grads = (drawn(*factor.shape).to(master) for factor in (a, b))
            made.append(ExpertTarget(out, a, b, *grads))
            begin += rank
        targets.append(tuple(made))
    scaling = torch.tensor([0.5, 2.0, 1.25, 0.75, 1.5][: len(targets)], dtype=master, device=device)
    if only is not None:
        slots = torch.arange(counts.shape[1]).repeat(experts)
        kept = (slots.repeat_interleave(counts.flatten()) == only).to(device)
        x, y, dy, dx = (values[kept] for values in (x, y, dy, dx))
        counts = counts * (torch.arange(counts.shape[1]) == only)
    runs = ExpertRuns(counts.to(device))
    return BranchCase(x, y, dy, dx, runs, ExpertFactors(tuple(targets), scaling, arenas))


def _arenas(shape: BranchShape, dtype: torch.dtype, device: str) -> tuple[ExpertArenas, list[int]]:
    """Returns empty arenas, and where the rank columns of each slot begin."""
    positions = [0]
    for of_slot in shape.ranks:
        ranks = sum(rank for rank, _, _ in of_slot)
        positions.append(positions[-1] + -(-ranks // 8) * 8)
    sizes = len(shape.counts), positions[-1]
    arenas = ExpertArenas(
        lora_a=torch.zeros(*sizes, shape.in_size, dtype=dtype, device=device),
        lora_b=torch.zeros(*sizes, shape.out_size, dtype=dtype, device=device),
        positions=torch.tensor([*positions, positions[-1]], dtype=torch.int32, device=device),
    )
    return arenas, positions[:-1]


def run_branch(ops: Any, case: BranchCase) -> None:
    """Runs forward and backward; x is read where it was before it was spread, dy as it lies."""
    x = placed(case.x)
    saved = ops.forward(x, case.y, case.runs, case.factors)
    dy = PlacedRows(case.dy)
    ds = ops.input_backward(dy, case.dx, saved, case.runs, case.factors)
    ops.input_sums(ds, x, case.runs, case.factors)


def placed(x_QK: Tensor) -> PlacedRows:
    """Rows as they lie in another order, among others that nobody may read."""
    values_TK = x_QK.new_full((len(x_QK) + 3, x_QK.shape[1]), torch.nan)
    rows_Q = torch.arange(len(x_QK), device=x_QK.device).flip(0) + 1
    values_TK[rows_Q] = x_QK
    return PlacedRows(values_TK, rows_Q)


def results(ops: Any, case: BranchCase) -> dict[str, Tensor]:
    """Runs forward and backward; returns y, dx and the factors' gradients by name, on the CPU."""
    run_branch(ops, case)
    found = {"y": case.y.cpu(), "dx": case.dx.cpu()}
    return found | gradients(case)


def gradients(case: BranchCase) -> dict[str, Tensor]:
    found = {}
    for slot, targets in enumerate(case.factors.targets):
        for number, target in enumerate(targets):
            found[f"slot {slot} target {number} dA"] = target.grad_a
            found[f"slot {slot} target {number} dB"] = target.grad_b
    return {name: value.cpu() for name, value in found.items()}


def check_close(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    """Compares every result by name, relative to the size of the expected one."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].isfinite().all(), name
        scale = value.abs().max().clamp(min=1e-6)
        error = (found[name].double() - value).abs().max() / scale
        assert error <= bound, f"{name}: {error:.2e}"


def units_reference(
    begins: Tensor, num_experts: int, columns_out: int, positions: Tensor
) -> list[tuple[int, ...]]:
    """The definition: the units, one after another, on the host."""
    columns = (len(begins) - 1) // num_experts
    tiles = -(-columns_out // 256)
    rows, places = begins.tolist(), positions.tolist()
    found: list[tuple[int, ...]] = []

    def ranks(expert: int, row: int, end: int) -> tuple[int, int]:
        slots = [
            slot
            for slot in range(columns)
            if rows[expert * columns + slot] < end and rows[expert * columns + slot + 1] > row
        ]
        return (places[slots[0]], places[slots[-1] + 1]) if row < end else (0, 0)

    for expert in range(num_experts):
        begin, end = rows[expert * columns], rows[(expert + 1) * columns]
        for row in range(begin, end, 256):
            left = min(row + 256, end)
            pair = left - row > 128
            for tile in range(0, tiles, 1 if pair else 2):
                halves = (
                    *ranks(expert, row, min(row + 128, left)),
                    *ranks(expert, row + 128, left),
                )
                found.append((expert, row, left, 2 * tile + (not pair), *halves))
    return found


def slots_of_rows(case: BranchCase) -> Tensor:
    counts = case.runs.counts_LS.cpu()
    slots = torch.arange(counts.shape[1]).repeat(counts.shape[0])
    return slots.repeat_interleave(counts.flatten())
