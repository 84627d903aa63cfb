"""Counter-based dropout: the mask is a pure function of (job seed, step, layer, token, feature).

Nothing is stored for backward, and the mask of a token does not depend on which jobs share the
micro-batch, on its place in the packing, or on the parallel layout. Wrapping int32 arithmetic, one
definition for CPU and GPU. Keys are mixed by MurmurHash3's 32-bit finaliser; the elements' own part
is cheap, since every element of x pays it three times a step: a *seed* of 32 bits serves 8 columns,
the four pairs 8 apart in a block of 32 (what one thread holds of a tensor core's result), and each
pair is the seed times a factor of its own, 16 bits a column. Which 16 bits mean "dropped" is chosen
so that one comparison of packed half floats decides on a pair.

Shapes: T rows, K features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

SEED_COLUMNS = 32
"""Columns of a block whose seeds lie together: the CUDA kernels want shards of whole blocks."""
SEED_STEP = 0x9E3779B9
"""2^32 / golden ratio: spreads neighbouring seeds."""
SEED_FACTOR = 0x85EBCA6B
PAIR_FACTORS = (0xEF40188B, 0xAB87D1A5, 0xBF9DD3E7, 0xDFFAE703)
"""Odd, drawn at random until no relation `sum a_i f_i = 0` modulo 2^16 or 2^32 has a small vector a
(modulo 2^16 none of two factors is shorter than 170, of three than 23, of four than 10): columns
that share a seed are as good as independent."""
LOWEST = 0xFC00
"""The half float -inf. Counting down from it in 16 bits goes up through the negative numbers: with
that order "dropped" is "less than", see `csrc/lora.cuh`."""
MOST_DROPPED = 0xFFFF
"""The most places of 65536 that may be dropped."""


def mix32(h: Tensor) -> Tensor:
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
    """`mix32` of one unsigned value, without a tensor: every job's key is made anew each round."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ (h >> 16)


def dropout_reference(
    x_TK: Tensor, row_keys_T: Tensor, p_T: Tensor, layer_key: int, column: int
) -> Tensor:
    """Returns `x * keep / (1 - p)` with a probability of its own for every row.

    Probabilities are rounded to 1/65536.

    Args:
        x_TK: values; a dropped one becomes 0 whatever it held.
        row_keys_T: int32 key a row (`RowGroups.row_keys`).
        p_T: fp32 probability of zeroing; rows with 0 pass unchanged.
        layer_key: distinguishes linears.
        column: global index of the first feature, for inputs sharded over features. A multiple of
            `SEED_COLUMNS` for the CUDA kernels, even for Triton's; any number here.

    The mask does not depend on x, so the same call is its own backward.
    """
    keys_T = mix32(row_keys_T ^ layer_key)
    columns_K = torch.arange(column, column + x_TK.shape[1], device=x_TK.device, dtype=torch.int32)
    seed_K = (columns_K >> 5) * 4 + (columns_K >> 1 & 3)
    seeds_TK = (keys_T[:, None] ^ (seed_K * _signed(SEED_STEP))[None, :]) * _signed(SEED_FACTOR)
    seeds_TK = seeds_TK ^ ((seeds_TK >> 16) & 0xFFFF)
    pair_K = columns_K >> 3 & 3
    # Not a table: on a GPU that would be a copy from the host.
    factors_K = sum((pair_K == i).to(torch.int32) * _signed(f) for i, f in enumerate(PAIR_FACTORS))
    bits_TK = (seeds_TK * factors_K) >> ((columns_K & 1) << 4)
    place_TK = (LOWEST - bits_TK) & 0xFFFF
    scaled_TK = x_TK.to(torch.float32) * (1.0 / (1.0 - p_T))[:, None]
    return torch.where(place_TK >= dropped_places(p_T)[:, None], scaled_TK, 0.0).to(x_TK.dtype)


def dropped_places(p: Tensor) -> Tensor:
    """Returns how many of the 65536 places of an element are dropped, int32.

    Truncated after adding a half, not rounded to even: one instruction, the same in all kernels.
    """
    return (p * 65536.0 + 0.5).to(torch.int32).clamp(max=MOST_DROPPED)


def _signed(word: int) -> int:
    """Converts an unsigned 32-bit number to the int32 of the same bits."""
    return word - (word >> 31 << 32)


@functools.cache
def _fused() -> Callable[..., Tensor]:
    """The reference as one generated GPU kernel: eager it would be 15 passes over `[T, K]`."""
    return torch.compile(dropout_reference, dynamic=True)


def dropout(x_TK: Tensor, row_keys_T: Tensor, p_T: Tensor, layer_key: int, column: int) -> Tensor:
    """`dropout_reference`, in one kernel on a GPU."""
    run = _fused() if x_TK.is_cuda else dropout_reference
    return run(x_TK, row_keys_T, p_T, layer_key, column)
