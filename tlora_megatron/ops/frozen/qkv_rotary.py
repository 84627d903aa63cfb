"""Queries, keys and values out of Megatron's fused projection, rotated on the way.

Megatron lays the projection out group by group: the queries of a group, its key, its value. So
queries have no single stride and attention needs them moved; here that is the same pass as the
rotation, and the way back is one pass too, instead of copies, rotations and a concatenation.

Shapes: T rows, G groups (key-value heads), R query heads a group, N = G R, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch

from tlora_megatron.ops.frozen.frozen_parts import Vjp, runs_triton, vjp_by_autograd


def rotate_halves(x_T1ND: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """`x * cos + (-x2, x1) * sin`, with x1 and x2 the halves of the last dimension."""
    first, second = x_T1ND.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x_T1ND * cos_TD[:, None, None] + turned * sin_TD[:, None, None]


def unpack_qkv_reference(
    mixed_TGMD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The definition, differentiable."""
    rows, groups, members, dim = mixed_TGMD.shape
    query, key, value = mixed_TGMD.split([members - 2, 1, 1], dim=2)
    query = query.reshape(rows, 1, groups * (members - 2), dim)
    query, key = (rotate_halves(x, cos_TD, sin_TD) for x in (query, key.transpose(1, 2)))
    return query.squeeze(1), key.squeeze(1), value.squeeze(2)


def unpack_qkv(
    mixed_TGMD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Splits and rotates the fused projection; on GPUs in fp32, rounded once.

    Args:
        mixed_TGMD: `[T, G, R + 2, D]`: of each group its queries, its key, its value.
        cos_TD: in the dtype of the projection, both halves of D the same, as `sin_TD`.

    Returns:
        Queries `[T, N, D]` and keys `[T, G, D]`, rotated, and values `[T, G, D]`.
    """
    if not runs_triton(mixed_TGMD):
        return unpack_qkv_reference(mixed_TGMD, cos_TD, sin_TD)
    return _UnpackQKV.apply(mixed_TGMD, cos_TD, sin_TD)


def unpack_qkv_vjp(
    mixed_TGMD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], Vjp]:
    """Returns `unpack_qkv` and its vector-Jacobian product, which holds the rotation only."""
    if not runs_triton(mixed_TGMD):
        return vjp_by_autograd(lambda x: unpack_qkv_reference(x, cos_TD, sin_TD), mixed_TGMD)
    from tlora_megatron.ops.frozen.triton_rotary import launch_pack, launch_unpack

    def vjp(*grads: torch.Tensor) -> torch.Tensor:
        dq, dk, dv = (grad.contiguous() for grad in grads)
        return launch_pack(dq, dk, dv, cos_TD, sin_TD)

    return launch_unpack(mixed_TGMD.contiguous(), cos_TD, sin_TD), vjp


class _UnpackQKV(torch.autograd.Function):
    """Saves the rotation only: the way back does not need the projection."""

    @staticmethod
    def forward(
        ctx: Any, mixed_TGMD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # Not at the top: triton is only there on machines with a GPU.
        from tlora_megatron.ops.frozen.triton_rotary import launch_unpack

        ctx.save_for_backward(cos_TD, sin_TD)
        return launch_unpack(mixed_TGMD.contiguous(), cos_TD, sin_TD)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from tlora_megatron.ops.frozen.triton_rotary import launch_pack

        dq, dk, dv = (grad.contiguous() for grad in grads)
        return launch_pack(dq, dk, dv, *ctx.saved_tensors), None, None
