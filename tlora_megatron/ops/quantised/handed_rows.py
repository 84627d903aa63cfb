"""Codes of a tensor, handed by the kernel that made the tensor to the linear that multiplies it.

They hang on the tensor object itself, so no signature between the two knows of them. They are a
memo: a linear that finds none quantises by itself, and gets the same codes. Taking them drops them,
so that they do not outlive the product where the tensor is kept for the backward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from tlora_megatron.ops.quantised.rows import QuantRows

_NAME = "tlora_quant_rows"


class _Handed(NamedTuple):
    rows: QuantRows
    fold: Tensor | None
    version: int
    address: int


def hand_rows(x: Tensor, rows: QuantRows, fold: Tensor | None = None) -> None:
    """Leaves the codes of x on it.

    Whoever then writes into x by a kernel that torch does not know of must take them off.

    Args:
        fold: that values were multiplied with, as `encode_rows` takes it.
    """
    if not x.is_inference():  # which has no count of writes
        setattr(x, _NAME, _Handed(rows, fold, x._version, x.data_ptr()))


def pass_rows(x: Tensor, view: Tensor) -> Tensor:
    """Returns a view of all of x, with the codes that lay on x."""
    handed = x.__dict__.pop(_NAME, None)
    if handed is not None:
        setattr(view, _NAME, handed)
    return view


def handed_rows(x: Tensor, group: int | None, fold: Tensor | None = None) -> QuantRows | None:
    """Takes the codes of x off it; None if there are none of this kind, or x has changed since."""
    handed: Any = x.__dict__.pop(_NAME, None)
    if handed is None or handed.fold is not fold or handed.rows.group != group:
        return None
    unchanged = handed.version == x._version and handed.address == x.data_ptr()
    return handed.rows if unchanged else None
