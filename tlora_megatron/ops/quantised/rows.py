"""The quantiser of rows: FP8 codes, a scale for every row or 128 columns of it, and rows handed on.

Bytes are uint8 everywhere, because many of torch's functions know no FP8 types, and
`module.bfloat16()` would convert these.

To the bit, all in fp32: `amax` keeps NaN; `scale = max(amax / 448, 2**-100)`;
`code = e4m3(clamp(x * (1 / scale)))`. Where amax is NaN or infinite, scale is NaN, so that products
with the row are NaN and no other row changes. docs/fp8.md has the reasons.

Shapes: T rows, K features.

Codes that a kernel made together with a tensor hang on the tensor object itself, so no signature
between that kernel and the linear knows of them. They are a memo: a linear that finds none
quantises by itself, and gets the same codes. Taking them drops them, so that they do not outlive
the product where the tensor is kept for the backward pass.

With one scale for a whole tensor, as Transformer Engine's current scaling has it, the scale follows
from the largest magnitude, which is known only behind the last element. A kernel that makes a
tensor finds it on the way and leaves it there, so that the linear reads the tensor once, to cast
it, and not twice. A linear that finds nothing has Transformer Engine quantise, to the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tlora_megatron.ops.lora.kernel_choice import runs_triton

LARGEST = 448.0
"""The largest value that has a code."""
NAN_CODE = 0x7F
"""The code of every NaN, whatever its sign."""


def encode(values: Tensor) -> Tensor:
    """Returns the uint8 codes of fp32 values, rounded to nearest even.

    Values beyond the largest get its code; a NaN gets `NAN_CODE`.
    """
    assert values.dtype == torch.float32, f"values must be fp32, got {values.dtype}"
    clamped = values.clamp(-LARGEST, LARGEST)
    codes = clamped.to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill_(values.isnan(), NAN_CODE)


def decode(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the values of uint8 codes, which all dtypes of 16 bits or more hold exactly."""
    return codes.view(torch.float8_e4m3fn).to(dtype)


GROUP = 128
"""Columns that share a scale, with a base that has scales for blocks; the last may be fewer."""
SMALLEST_SCALE = 2.0**-100
"""Keeps the inverse of a row of zeros finite. Servers have 1 / (448 * 512), with which most codes
of gradients were 0: these are divided by a batch's tokens and multiplied with a weight's scales."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantRows:
    """Quantised rows: `decode(codes) * scales`."""

    codes_TK: Tensor
    """uint8, contiguous."""
    scales: Tensor
    """fp32 `[T]`, or `[T, ceil(K / GROUP)]` for groups."""

    @property
    def group(self) -> int | None:
        """Columns that share a scale; None = all columns of a row."""
        return GROUP if self.scales.dim() == 2 else None


def encode_rows(
    x_TK: Tensor, *, group: int | None = None, fold_K: Tensor | None = None
) -> QuantRows:
    """Quantises rows of any floating dtype, read as fp32.

    Args:
        group: `GROUP`, or None for one scale a row.
        fold_K: fp32 factors of the columns; values are multiplied with them in fp32 before all.
    """
    assert group in (None, GROUP), f"group must be None or {GROUP}, got {group}"
    if runs_triton(x_TK):
        # Not at the top: triton is only there on machines with a GPU.
        from tlora_megatron.ops.quantised.triton_rows import launch_encode

        return QuantRows(*launch_encode(x_TK.contiguous(), group, fold_K))
    values_TK = x_TK.float() if fold_K is None else x_TK.float() * fold_K
    if group is None:
        scales_T, inverses_T = _scales(values_TK)
        return QuantRows(encode(values_TK * inverses_T[:, None]), scales_T)
    num_columns = x_TK.shape[1]
    padded_TK = F.pad(values_TK, (0, -num_columns % GROUP))
    grouped = padded_TK.view(len(x_TK), padded_TK.shape[1] // GROUP, GROUP)
    scales_TG, inverses_TG = _scales(grouped)
    codes = encode(grouped * inverses_TG[..., None]).flatten(1)
    return QuantRows(codes[:, :num_columns].contiguous(), scales_TG)


def decode_rows(rows: QuantRows, dtype: torch.dtype) -> Tensor:
    """Returns the values `[T, K]` that codes and scales stand for, multiplied in `dtype`."""
    scales = rows.scales.to(dtype)
    if rows.group is None:
        return decode(rows.codes_TK, dtype) * scales[:, None]
    num_columns = rows.codes_TK.shape[1]
    repeated_TK = scales.repeat_interleave(GROUP, dim=1)[:, :num_columns]
    return decode(rows.codes_TK, dtype) * repeated_TK


def _scales(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scales over the last axis, and their inverses."""
    amax = values.abs().amax(dim=-1)
    # A tensor on the same device: CUDA would multiply by the inverse of a number.
    largest = torch.full((), LARGEST, dtype=torch.float32, device=values.device)
    scales = (amax / largest).clamp(min=SMALLEST_SCALE)
    scales = scales.masked_fill_(amax.isinf(), torch.nan)
    return scales, scales.reciprocal()


_NAME = "tlora_quant_rows"


class _Handed(NamedTuple):
    rows: Any
    """`QuantRows`, or what else makes codes of x cheaper (`Largest`)."""
    fold: Tensor | None
    version: int
    address: int


def hand_rows(x: Tensor, rows: Any, fold: Tensor | None = None) -> None:
    """Leaves the codes of x on it, or what helps to make them.

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
    handed = take_handed(x)
    if handed is None or handed.fold is not fold or not isinstance(handed.rows, QuantRows):
        return None
    return handed.rows if handed.rows.group == group else None


def take_handed(x: Tensor) -> _Handed | None:
    """Takes off x whatever was left on it; None if x has changed since."""
    handed: Any = x.__dict__.pop(_NAME, None)
    if handed is None or handed.version != x._version or handed.address != x.data_ptr():
        return None
    return handed


PARTS = 256
"""Places of one largest magnitude, so that thread blocks do not all wait for the same one."""
UNIT = 16
"""Divides the elements of a tensor that is cast, as FP8's GEMMs ask of rows: several are read and
written at once."""
_TENSORS = 256
"""Tensors whose places are set to zero together."""


class OneScale:
    """Stands for a linear that quantises what it reads with one scale for all of it."""


ONE_SCALE = OneScale()


@dataclass(frozen=True, slots=True, eq=False)
class Largest:
    """The largest magnitude of a tensor, in parts."""

    parts: Tensor
    """int32 `[PARTS]`: bits of non-negative fp32 values, of which the largest counts."""


_PLACES: dict[tuple[int, int], list[Tensor]] = {}
"""Device and stream -> parts that hold zero and have no tensor yet."""


def find_largest(x: Tensor) -> Tensor:
    """Returns the parts, all zero, into which the kernel that writes x puts its largest magnitude.

    They already hang on x: whoever launches that kernel next need do nothing more.
    """
    device = x.device.index or 0
    stream = torch._C._cuda_getCurrentRawStream(device) if x.is_cuda else 0
    places = _PLACES.setdefault((device, stream), [])
    if not places:
        zeros = torch.zeros(_TENSORS, PARTS, dtype=torch.int32, device=x.device)
        places.extend(zeros.unbind())
    parts = places.pop()
    hand_rows(x, Largest(parts))
    return parts


def take_largest(x: Tensor) -> Largest | None:
    """Takes the largest magnitude of x off it; None if none was found, or x has changed since."""
    handed = take_handed(x)
    return handed.rows if handed is not None and isinstance(handed.rows, Largest) else None
