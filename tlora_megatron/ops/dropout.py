"""Counter-based dropout: the mask is a pure function of (job seed, step, layer, token, feature).

Nothing is stored for backward, and the mask of a token does not depend on which jobs share the
micro-batch, on its place in the packing, or on the parallel layout. The hash is MurmurHash3's
32-bit finaliser over wrapping int32 arithmetic, one definition for CPU and GPU.

Shapes: T rows, K features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

_COLUMN_STEP = -1640531527  # 2^32 / golden ratio as int32: spreads neighbouring column pairs


def mix32(h: torch.Tensor) -> torch.Tensor:
    """Mixes the bits of int32 values (MurmurHash3 fmix32); equal input, equal output anywhere."""
    h = h ^ ((h >> 16) & 0xFFFF)
    h = h * -2048144789
    h = h ^ ((h >> 13) & 0x7FFFF)
    h = h * -1028477387
    return h ^ ((h >> 16) & 0xFFFF)


def mix_ints(*values: int) -> int:
    """Hashes integers on the host into a 31-bit key."""
    h = 0
    for value in values:
        for word in (value & 0xFFFFFFFF, (value >> 32) & 0xFFFFFFFF):
            h = _mix32_int((h ^ word) & 0xFFFFFFFF) + 0x9E3779B9
    return h & 0x7FFFFFFF


def _mix32_int(h: int) -> int:
    """`mix32` of one unsigned value: every job's key is made anew each round, a tensor is slow."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ (h >> 16)


def dropout_reference(
    x_TK: torch.Tensor, row_keys_T: torch.Tensor, p_T: torch.Tensor, layer_key: int, column: int
) -> torch.Tensor:
    """Returns `x * keep / (1 - p)` with a probability of its own for every row.

    One hash serves two columns, 16 bits each: probabilities are rounded to 1/65536.

    Args:
        x_TK: values; a dropped one becomes 0 whatever it held.
        row_keys_T: int32 key a row (`RowGroups.row_keys`).
        p_T: fp32 probability of zeroing; rows with 0 pass unchanged.
        layer_key: distinguishes linears.
        column: global index of the first feature, for inputs sharded over features. Even for the
            fused kernels, which must find both columns of a hash in one place; any number here.

    The mask does not depend on x, so the same call is its own backward.
    """
    keys_T = mix32(row_keys_T ^ layer_key)
    columns_K = torch.arange(column, column + x_TK.shape[1], device=x_TK.device, dtype=torch.int32)
    hash_TK = mix32(keys_T[:, None] ^ ((columns_K >> 1) * _COLUMN_STEP)[None, :])
    bits_TK = (hash_TK >> ((columns_K & 1) << 4)[None, :]) & 0xFFFF
    # Truncated after adding a half, not rounded to even: one instruction, the same in all kernels.
    dropped_T = (p_T * 65536.0 + 0.5).to(torch.int32)
    scaled_TK = x_TK.to(torch.float32) * (1.0 / (1.0 - p_T))[:, None]
    return torch.where(bits_TK >= dropped_T[:, None], scaled_TK, 0.0).to(x_TK.dtype)


@functools.cache
def _fused() -> Callable[..., torch.Tensor]:
    """The reference as one generated GPU kernel: eager it would be 15 passes over `[T, K]`."""
    return torch.compile(dropout_reference, dynamic=True)


def dropout(
    x_TK: torch.Tensor, row_keys_T: torch.Tensor, p_T: torch.Tensor, layer_key: int, column: int
) -> torch.Tensor:
    """`dropout_reference`, in one kernel on a GPU."""
    run = _fused() if x_TK.is_cuda else dropout_reference
    return run(x_TK, row_keys_T, p_T, layer_key, column)
