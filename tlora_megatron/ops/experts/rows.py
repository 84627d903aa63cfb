"""The order in which experts compute a micro-batch's rows: expert by expert, rows ascending.

Each row lies there once for every expert that it meets. Rows of a packed micro-batch lie adapter
by adapter, and so they do inside an expert.

Shapes: T rows, K experts of each, E experts, S adapters, R = T K.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tlora_megatron.ops.experts.branch import PlacedRows
from tlora_megatron.ops.lora.kernel_choice import runs_triton


class ExpertRows(NamedTuple):
    """Where a micro-batch's rows lie for the experts; a value of one layer's call."""

    rows_R: Tensor
    """int64: the row of the micro-batch at each place."""
    choice_R: Tensor
    """int64: its index among all T K choices, row by row."""
    places_TK: Tensor
    """int64: the place of each row at each of its experts."""
    counts_ES: Tensor
    """int64: places of each adapter's rows at each expert, the null slot last; with one column,
    places of each expert."""

    def spread(self, x_TH: Tensor) -> Tensor:
        """Returns a row's values at all of its places, `[R, H]`."""
        if runs_triton(x_TH) and len(self.rows_R):
            return _kernels().spread_rows(x_TH, self.rows_R)
        return x_TH[self.rows_R]

    def placed(self, x_TH: Tensor) -> PlacedRows:
        """Returns the same, not copied."""
        return PlacedRows(x_TH.contiguous(), self.rows_R)

    def pick(self, weights_TK: Tensor) -> Tensor:
        """Returns the value of each choice at its place, `[R]`."""
        return weights_TK.flatten()[self.choice_R]

    def sum(self, y_RH: Tensor) -> Tensor:
        """Returns the sum over a row's places `[T, H]`: in fp32, by ascending expert."""
        if runs_triton(y_RH) and len(y_RH):
            return _kernels().sum_rows(y_RH, self.places_TK)
        total_TH = y_RH[self.places_TK[:, 0]].float()
        for choice in range(1, self.places_TK.shape[1]):
            total_TH += y_RH[self.places_TK[:, choice]]
        return total_TH.to(y_RH.dtype)


class RowSlots(NamedTuple):
    """The adapters of a micro-batch's rows."""

    slots_T: Tensor
    """int64: the slot of each row."""
    num_slots: int
    """Slots, the null slot left out."""


def sort_rows(experts_TK: Tensor, num_experts: int, slots: RowSlots | None = None) -> ExpertRows:
    """Orders a micro-batch's rows by expert; nothing waits for the device.

    Args:
        experts_TK: int64, ascending in each row.
        slots: counts are by adapter; None = they are not.
    """
    # A sort of short keys takes fewer passes on a GPU.
    choice_R = experts_TK.flatten().to(torch.int16).argsort(stable=True)
    places_R = torch.empty_like(choice_R)
    places_R[choice_R] = torch.arange(len(choice_R), device=choice_R.device)
    rows_R = choice_R // experts_TK.shape[1]
    counts_ES = _count(experts_TK, num_experts, slots)
    return ExpertRows(rows_R, choice_R, places_R.view_as(experts_TK), counts_ES)


def _kernels() -> Any:
    # Not at the top: triton is only there on machines with a GPU.
    from tlora_megatron.ops.experts.triton import rows

    return rows


def _count(experts_TK: Tensor, num_experts: int, slots: RowSlots | None) -> Tensor:
    columns, pairs_TK = 1, experts_TK
    if slots is not None:
        columns = slots.num_slots + 1
        pairs_TK = experts_TK * columns + slots.slots_T[:, None]
    pairs_R = pairs_TK.flatten()
    counts = pairs_R.new_zeros(num_experts * columns)
    return counts.scatter_add_(0, pairs_R, torch.ones_like(pairs_R)).view(num_experts, columns)
