"""Rotary embedding whose positions restart at every document of the packed micro-batch.

Shapes: T local rows, N heads, D head dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.frozen.rotary import inverse_frequencies, rotary_factor, rotate_halves
from tlora_megatron.ops.host_copy import to_device
from tlora_megatron.ops.routing import MicroBatchView


class PackedRotaryEmbedding:
    """Rotates queries and keys by each token's position in its own document.

    Core attention uses it in the place of Megatron's own embedding, which would compute cosine and
    sine anew in every layer and rotate in a dozen kernels. The arithmetic is Hugging Face's:
    cosine and sine in fp32, rounded to the activations' dtype, halves rotated.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._inv_freq = inverse_frequencies(spec)
        self._factor = rotary_factor(spec)

    def __call__(self, x_T1ND: Tensor, micro_batch: MicroBatchView) -> Tensor:
        """Rotates `[T, 1, N, D]`, the rows of this context-parallel rank."""
        run = _fused() if x_T1ND.is_cuda else rotate_halves
        return run(x_T1ND, *self.cos_sin(x_T1ND, micro_batch))

    def cos_sin(self, like: Tensor, micro_batch: MicroBatchView) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine of the local rows, `[T, D]`, in the dtype of `like`."""
        return micro_batch.cached(
            f"rotary:{like.dtype}@{like.device}", lambda: self._cos_sin(like, micro_batch)
        )

    def _cos_sin(self, like: Tensor, micro_batch: MicroBatchView) -> tuple[Tensor, Tensor]:
        positions_T = micro_batch.positions(like.device)
        half = positions_T[:, None].float() * to_device(self._inv_freq, like.device)
        angles_TD = torch.cat([half, half], dim=-1)
        cos_TD, sin_TD = angles_TD.cos(), angles_TD.sin()
        if self._factor != 1.0:
            cos_TD, sin_TD = cos_TD * self._factor, sin_TD * self._factor
        return cos_TD.to(like.dtype), sin_TD.to(like.dtype)


@functools.cache
def _fused() -> Callable[..., Tensor]:
    """Compiles `rotate_halves` and its backward to one generated GPU kernel each."""
    return torch.compile(rotate_halves, dynamic=True)
