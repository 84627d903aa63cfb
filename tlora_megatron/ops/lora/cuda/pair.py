"""The launch of rank_pair.cu: dS and dB from one read of dy."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tlora_megatron.ops.lora.cuda.arguments import PairArguments, packer
from tlora_megatron.ops.lora.cuda.calls import (
    Arenas,
    Dropout,
    device_index,
    launch,
    mask_fields,
    multiprocessors,
)
from tlora_megatron.ops.lora.cuda.pair_items import PairFit
from tlora_megatron.ops.lora.cuda.rank_form import RankForm
from tlora_megatron.ops.lora.kernel_linear import SiteTables
from tlora_megatron.ops.lora.plan_tensors import ITEM_FIELDS, WorkItems

_PAIR = packer(PairArguments)


class PairOperands(NamedTuple):
    """The tensors that rank_pair.cu reads and writes."""

    dy_TN: torch.Tensor
    """All rows of the micro-batch."""
    s: torch.Tensor
    """s, flat."""
    ds: torch.Tensor
    """dS, flat: both forms are written."""


def rank_pair(
    operands: PairOperands,
    factors: Arenas,
    form: RankForm,
    work: WorkItems,
    tables: SiteTables,
    *,
    fit: PairFit,
    chunks: torch.Tensor,
    scaling: torch.Tensor,
    dropout: Dropout | None,
) -> None:
    """Writes `scaling / (1 - p) dy B` into both forms of dS, and adds `s^T dy` to the gradients.

    Args:
        factors: the arenas of `lora_b`.
        form: of s and of dS.
        work: items of `pair_items`, made with this fit.
        tables: addresses of the gradients.
        chunks: the plan's table of this name.
        dropout: for its probabilities: dS has their `1 / (1 - p)`.
    """
    dy_TN, s, ds = operands
    arguments = _PAIR.pack(  # in the order of `PairArguments`
        dy_TN.data_ptr(),
        form.rows_address(s),
        ds.data_ptr(),
        form.rows_address(ds),
        work.items.data_ptr(),
        chunks.data_ptr(),
        work.borders.data_ptr(),
        tables.grad_b.data_ptr(),
        work.partial_sums.data_ptr(),
        work.counters.data_ptr(),
        scaling.data_ptr(),
        mask_fields(dropout).probability,
        dy_TN.shape[0],
        dy_TN.shape[1],
        factors.argument,
        len(factors.arenas),
        work.count,
        ITEM_FIELDS,
        min(work.count, multiprocessors(dy_TN.device)),
        form.row_width,
        fit.most_panels,
        device_index(dy_TN),
    )
    launch("pair", arguments, dy_TN)
