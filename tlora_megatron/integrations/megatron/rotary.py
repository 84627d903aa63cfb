"""Rotary embedding whose positions restart at every document of the packed micro-batch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tlora_megatron.model import ModelSpec
from tlora_megatron.ops.segments import MicroBatchView, current_micro_batch


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


class PackedRotaryEmbedding(nn.Module):
    """Takes the place of `GPTModel.rotary_pos_emb`; reads positions from the bound micro-batch.

    Megatron's unfused rotation takes cosine and sine of the angles, casts them to the activations'
    dtype and rotates halves, as Hugging Face does. Context-parallel ranks get their own rows'
    angles here and Megatron slices no more.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        # A plain attribute, as in Megatron's class: no entry in the state dict, always fp32.
        self._inv_freq = inverse_frequencies(spec)
        self._key = f"rotary:{spec.head_dim}:{spec.rope_theta}:{spec.rope_scaling}"

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Angles of the local tokens, fp32 `[num_tokens, 1, 1, head_dim]`; takes any arguments."""
        return _bound_micro_batch().cached(self._key, self._angles)

    def get_rotary_seq_len(self, *_: Any, **__: Any) -> int:
        """Number of local tokens; Megatron passes it on to `forward`, which has no need of it."""
        return _bound_micro_batch().num_tokens

    def _angles(self) -> Tensor:
        device = torch.device(torch.cuda.current_device())
        positions = _bound_micro_batch().positions(device)
        angles = positions[:, None].float() * self._inv_freq.to(device)
        return torch.cat([angles, angles], dim=-1)[:, None, None, :]


def _bound_micro_batch() -> MicroBatchView:
    micro_batch = current_micro_batch()
    if micro_batch is None:
        raise RuntimeError("a micro-batch must be bound by use_micro_batch, got none")
    return micro_batch
