"""Frequencies of the rotary embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tlora_megatron.model.spec import ModelSpec


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """Returns the rotation per position of each pair of head dimensions.

    fp32 `[head_dim / 2]` on the CPU.

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
