"""FP8 codes (e4m3fn) as bytes: 4 bits of exponent, 3 of mantissa, no infinity, largest value 448.

Bytes are uint8 everywhere, because many of torch's functions know no FP8 types, and
`module.bfloat16()` would convert these.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
