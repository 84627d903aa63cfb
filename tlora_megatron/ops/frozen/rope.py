"""Frequencies of the rotary embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tlora_megatron.model.gpt_oss import Yarn
from tlora_megatron.model.spec import ModelSpec


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """Returns the rotation per position of each pair of head dimensions.

    fp32 `[head_dim / 2]` on the CPU.

    The arithmetic is Hugging Face's to the bit, llama3 scaling and YaRN included: low frequencies
    are divided by `factor`, high ones kept, those between interpolated.
    """
    if spec.gpt_oss is not None and spec.gpt_oss.yarn is not None:
        return _yarn_frequencies(spec.head_dim, spec.rope_theta, spec.gpt_oss.yarn)
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


def rotary_factor(spec: ModelSpec) -> float:
    """Returns what multiplies cosine and sine."""
    yarn = None if spec.gpt_oss is None else spec.gpt_oss.yarn
    return 1.0 if yarn is None else yarn.attention_factor


def _yarn_frequencies(dim: int, theta: float, yarn: Yarn) -> Tensor:
    kept = _dimension(yarn.beta_fast, dim, theta, yarn)
    divided = _dimension(yarn.beta_slow, dim, theta, yarn)
    if yarn.truncates:
        kept, divided = math.floor(kept), math.ceil(divided)
    low, high = max(kept, 0), min(divided, dim - 1)
    if low == high:
        high += 0.001
    powers = theta ** (torch.arange(0, dim, 2).float() / dim)
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keeps = 1 - ramp
    return 1.0 / (yarn.factor * powers) * (1 - keeps) + 1.0 / powers * keeps


def _dimension(rotations: float, dim: int, theta: float, yarn: Yarn) -> float:
    """Returns the dimension that turns so often over the original positions."""
    wavelength = yarn.original_positions / (rotations * 2 * math.pi)
    return (dim * math.log(wavelength)) / (2 * math.log(theta))
