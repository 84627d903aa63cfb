"""Queries, keys and values out of Megatron's fused projection, normed and rotated on the way.

Megatron lays the projection out group by group: the queries of a group, its key, its value. So
queries have no single stride and attention needs them moved; here that is the same pass as the
rotation, and the way back is one pass too, instead of copies, rotations and a concatenation. Where
a model norms single heads (Qwen3), that is done in the same pass; the weights are frozen.

Shapes: T rows, G groups (key-value heads), R query heads a group, N = G R, D head dimension.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tlora_megatron.model.spec import ModelSpec, Yarn
from tlora_megatron.ops.frozen.parts import HeadNorms, Vjp, vjp_by_autograd
from tlora_megatron.ops.frozen.rms_norm import norm_reference
from tlora_megatron.ops.lora.kernel_choice import runs_triton
from tlora_megatron.ops.quantised.weight import QuantWeight


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


def rotate_halves(x_T1ND: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """`x * cos + (-x2, x1) * sin`, with x1 and x2 the halves of the last dimension.

    Where cosine and sine have fewer columns, so many of x turn, and those behind them stay.
    """
    width = cos_TD.shape[-1]
    if width < x_T1ND.shape[-1]:
        turned = rotate_halves(x_T1ND[..., :width], cos_TD, sin_TD)
        return torch.cat([turned, x_T1ND[..., width:]], dim=-1)
    first, second = x_T1ND.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x_T1ND * cos_TD[:, None, None] + turned * sin_TD[:, None, None]


def unpack_qkv_reference(
    mixed_TGMD: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    norms: HeadNorms | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The definition, differentiable."""
    rows, groups, members, dim = mixed_TGMD.shape
    query, key, value = mixed_TGMD.split([members - 2, 1, 1], dim=2)
    query = query.reshape(rows, 1, groups * (members - 2), dim)
    key = key.transpose(1, 2)
    if norms is not None:
        query, key = (norm_reference(x, n) for x, n in zip((query, key), norms, strict=True))
    query, key = (rotate_halves(x, cos_TD, sin_TD) for x in (query, key))
    return query.squeeze(1), key.squeeze(1), value.squeeze(2)


def unpack_qkv(
    mixed_TGMD: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    norms: HeadNorms | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Splits and rotates the fused projection; on GPUs in fp32, rounded once.

    Args:
        mixed_TGMD: `[T, G, R + 2, D]`: of each group its queries, its key, its value.
        cos_TD: in the dtype of the projection or fp32, both halves the same, as `sin_TD`; of fewer
            columns than D where heads turn in part.
        norms: of each query and key before it turns, rounded as by the norm's own kernel.

    Returns:
        Queries `[T, N, D]` and keys `[T, G, D]`, rotated, and values `[T, G, D]`.
    """
    if not runs_triton(mixed_TGMD):
        return unpack_qkv_reference(mixed_TGMD, cos_TD, sin_TD, norms)
    return _UnpackQKV.apply(mixed_TGMD, cos_TD, sin_TD, norms)


def unpack_qkv_vjp(
    mixed_TGMD: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    norms: HeadNorms | None = None,
    column: QuantWeight | None = None,
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], Vjp]:
    """Returns `unpack_qkv` and its vector-Jacobian product.

    The product holds the rotation, and the projection if heads are normed.

    Args:
        column: the projection, if it is quantised: the product's result, which is then `[T, N]`,
            carries its FP8 codes (`handed_rows`).
    """
    if not runs_triton(mixed_TGMD):
        return vjp_by_autograd(lambda x: unpack_qkv_reference(x, cos_TD, sin_TD, norms), mixed_TGMD)
    from tlora_megatron.ops.frozen.rotary_triton import launch_pack, launch_unpack

    mixed = mixed_TGMD.contiguous()
    before = None if norms is None else mixed

    def vjp(*grads: torch.Tensor) -> torch.Tensor:
        dq, dk, dv = (grad.contiguous() for grad in grads)
        return launch_pack(dq, dk, dv, cos_TD, sin_TD, before, norms, column)

    return launch_unpack(mixed, cos_TD, sin_TD, norms), vjp


class _UnpackQKV(torch.autograd.Function):
    """Saves the rotation, and the projection if heads are normed: only then is it read again."""

    @staticmethod
    def forward(
        ctx: Any,
        mixed_TGMD: torch.Tensor,
        cos_TD: torch.Tensor,
        sin_TD: torch.Tensor,
        norms: HeadNorms | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # Not at the top: triton is only there on machines with a GPU.
        from tlora_megatron.ops.frozen.rotary_triton import launch_unpack

        mixed = mixed_TGMD.contiguous()
        ctx.save_for_backward(cos_TD, sin_TD, None if norms is None else mixed)
        ctx.norms = norms
        return launch_unpack(mixed, cos_TD, sin_TD, norms)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from tlora_megatron.ops.frozen.rotary_triton import launch_pack

        dq, dk, dv = (grad.contiguous() for grad in grads)
        cos_TD, sin_TD, mixed = ctx.saved_tensors
        return launch_pack(dq, dk, dv, cos_TD, sin_TD, mixed, ctx.norms), None, None, None
