"""The factors of adapters on routed experts: where their rank rows lie, and which experts share.

A slot's rank rows at a linear are those of its targets one after another: on `linear_fc1` the rows
of gate's A, then those of up's. Each row is found by the address that it has at expert 0 and by how
far apart experts lie, so factors stay where their slabs and copies hold them.

Shapes: S slots, W rank rows of the widest one, L experts of a rank, or 1 for what they share, C
features, R rank columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tlora_megatron.ops.experts.branch import ExpertFactors, ExpertTarget

CHUNK = 16
"""Rank rows that tensor cores take at once; W is a multiple of it."""


class RankRun(NamedTuple):
    """Rank rows of a slot that have the same columns: those of one target."""

    begin: int
    end: int
    columns: range


class RankRows(NamedTuple):
    """One factor of all adapters, row by row of the rank."""

    places_4SW: Tensor
    """int64: address at expert 0, 0 where there is no row; bytes from expert to expert; first
    column of the linear that the row has, and the one behind its last."""
    aligned: bool
    """True if all addresses are multiples of 16."""
    span: int
    """What the first columns of all rows and their ends are multiples of."""
    runs_S: tuple[tuple[RankRun, ...], ...]
    """The same on the host, slot by slot."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RankTables:
    """All adapters at one linear of the routed experts."""

    slots: int
    width: int
    """W; 0 where no adapter is."""
    widths_S: Tensor
    """int32: rank rows of each slot."""
    lora_a: RankRows
    lora_b: RankRows
    grad_a: RankRows
    grad_b: RankRows
    scaling_S: Tensor
    """fp32."""
    positions: Tensor
    """int32: the slots' rank columns in the arenas (`ExpertArenas.positions`); anything without."""


class Placed(NamedTuple):
    """A factor's place among a slot's rank rows and a linear's columns."""

    row: int
    column: int
    factor: Tensor
    """`[L, rank, columns]`."""


def rank_tables(factors: ExpertFactors) -> RankTables:
    """Builds the tables of a linear; copies them to the device of its factors."""
    ranks = [[target.lora_a.shape[1] for target in targets] for targets in factors.targets]
    widths = [sum(of_slot) for of_slot in ranks]
    width = -(-max(widths, default=0) // CHUNK) * CHUNK
    device = factors.scaling.device

    def rows(pick: Callable[[ExpertTarget], Tensor], *, out: bool) -> RankRows:
        slots = []
        for targets, of_slot in zip(factors.targets, ranks, strict=True):
            begins = itertools.accumulate(of_slot, initial=0)
            slots.append(
                [
                    Placed(row, target.columns.start if out else 0, pick(target))
                    for row, target in zip(begins, targets, strict=False)
                ]
            )
        return rank_rows(slots, width, device)

    widths_S = torch.tensor(widths, dtype=torch.int32, device=device)
    return RankTables(
        slots=len(widths),
        width=width,
        widths_S=widths_S,
        lora_a=rows(lambda target: target.lora_a, out=False),
        lora_b=rows(lambda target: target.lora_b, out=True),
        grad_a=rows(lambda target: target.grad_a, out=False),
        grad_b=rows(lambda target: target.grad_b, out=True),
        scaling_S=factors.scaling,
        positions=widths_S if factors.arenas is None else factors.arenas.positions,
    )


def rank_rows(slots: Sequence[Sequence[Placed]], width: int, device: torch.device) -> RankRows:
    """Builds the table of one factor of every slot, and copies it to a device."""
    places = torch.zeros(4, len(slots), width, dtype=torch.int64)
    runs: list[tuple[RankRun, ...]] = []
    for slot, of_slot in enumerate(slots):
        found = []
        for row, column, factor_LRN in of_slot:
            assert factor_LRN.stride(2) == 1, "a rank row lies in one piece"
            size, (_, rank, columns) = factor_LRN.element_size(), factor_LRN.shape
            steps = torch.arange(rank) * (factor_LRN.stride(1) * size)
            rows = slice(row, row + rank)
            # Of column 0 of the linear, so that a column is added as it is.
            places[0, slot, rows] = factor_LRN.data_ptr() - column * size + steps
            places[1, slot, rows] = factor_LRN.stride(0) * size
            places[2, slot, rows] = column
            places[3, slot, rows] = column + columns
            found.append(RankRun(row, row + rank, range(column, column + columns)))
        runs.append(tuple(found))
    aligned = not bool((places[:2] % 16).any())
    span = math.gcd(*places[2:].flatten().tolist())
    return RankRows(places.to(device), aligned, span, tuple(runs))


class OuterTarget(NamedTuple):
    """One factor of one adapter at one target: the shared one, or those of a rank's experts."""

    columns: slice
    """Its features, of the linear's input or output."""
    ranks: slice
    """Its columns among those that travel."""
    weight: Tensor
    """`[L, R, C]` in the compute dtype."""
    grad: Tensor
    """`[L, R, C]`, fp32."""


@dataclass(frozen=True, eq=False)
class OuterSide:
    """The factors of all adapters on one side: what their experts share, or what each has."""

    targets: tuple[tuple[OuterTarget, ...], ...]
    """Those of each slot's adapter; some have none."""


class OuterFactors(NamedTuple):
    """The factors of all adapters that share the outer one, at one linear of the routed experts."""

    shared: OuterSide
    own: OuterSide
    scaling: Tensor
    """fp32 `[slots]`."""
    width: int
    """Rank columns of a row that travels: those of the adapter that has most, in whole chunks."""
