"""AdamW over many adapters at once, each with hyper-parameters of its own.

Semantics of one update, as `torch.optim.AdamW` after `clip_grad_norm_`, in fp32:

    g = clip * grad
    master     -= lr * weight_decay * master
    exp_avg     = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq  = beta2 * exp_avg_sq + (1 - beta2) * g^2
    master     -= lr / (1 - beta1^step) * exp_avg / (sqrt(exp_avg_sq / (1 - beta2^step)) + eps)
    grad        = 0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tlora_megatron.ops.lora.kernel_choice import forced_kernels, triton_problem


class AdamUpdate(NamedTuple):
    """One adapter's update; the four tensors are flat, contiguous fp32 of one length."""

    master: Tensor
    grad: Tensor
    """Consumed: zero afterwards, also where the update is skipped."""
    exp_avg: Tensor
    exp_avg_sq: Tensor
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """Counts this update: 1 is the first."""
    clip: float | Tensor
    """Multiplier of the gradient, or an fp32 `[]` on its device that is read without waiting.

    Where it is not finite the update is skipped: only the gradient changes.
    """


def fused_adamw(updates: Sequence[AdamUpdate]) -> None:
    """Applies all updates in place and zeroes their gradients, without waiting for the device.

    One launch on GPUs with Triton, whatever the number of updates; a torch call each elsewhere.

    Args:
        updates: all on one device, without shared memory between them.

    Raises:
        ValueError: if a tensor is not a flat contiguous fp32, lengths or devices differ, or a step
            is below 1.
    """
    if not updates:
        return
    device = updates[0].master.device
    for update in updates:
        _check(update, device)
    forced = forced_kernels()
    may_launch = forced != "torch" and (device.type == "cuda" or forced == "triton")
    if may_launch and triton_problem(device) is None:
        # Not at the top: triton is only there on machines with a GPU.
        from tlora_megatron.ops.adamw_triton import launch_adamw

        held = [update for update in updates if update.master.numel()]
        if held:
            launch_adamw([_places(u) for u in held], [_factors(u) for u in held], device)
    else:
        for update in updates:
            _torch_adamw(update)


def _check(update: AdamUpdate, device: torch.device) -> None:
    numel = update.master.numel()
    for name in ("master", "grad", "exp_avg", "exp_avg_sq"):
        tensor = getattr(update, name)
        is_flat = tensor.dim() == 1 and tensor.is_contiguous() and tensor.dtype == torch.float32
        if not is_flat or tensor.numel() != numel or tensor.device != device:
            raise ValueError(
                f"{name} must be contiguous fp32 [{numel}] on {device}, got {tensor.dtype} "
                f"{list(tensor.shape)} on {tensor.device}"
            )
    clip = update.clip
    if isinstance(clip, Tensor) and (
        clip.dim() or clip.dtype != torch.float32 or clip.device != device
    ):
        raise ValueError(
            f"clip must be a number or fp32 [] on {device}, got {clip.dtype} {list(clip.shape)} "
            f"on {clip.device}"
        )
    if update.step < 1:
        raise ValueError(f"step must be at least 1, got {update.step}")


def _places(update: AdamUpdate) -> tuple[int, ...]:
    clip = update.clip.data_ptr() if isinstance(update.clip, Tensor) else 0
    return update.master.numel(), *(tensor.data_ptr() for tensor in update[:4]), clip


def _factors(update: AdamUpdate) -> tuple[float, ...]:
    """Returns the kernel's factors, computed in fp64 and rounded once."""
    return (
        1.0 if isinstance(update.clip, Tensor) else update.clip,
        update.lr * update.weight_decay,
        update.beta1,
        1 - update.beta1,
        update.beta2,
        1 - update.beta2,
        update.lr / (1 - update.beta1**update.step),
        math.sqrt(1 - update.beta2**update.step),
        update.eps,
    )


def _torch_adamw(update: AdamUpdate) -> None:
    clip, found_inf = update.clip, None
    if isinstance(clip, Tensor):
        found_inf = (~clip.isfinite()).float()
    elif not math.isfinite(clip):
        update.grad.zero_()
        return
    torch._fused_adamw_(
        [update.master], [update.grad.mul_(clip)], [update.exp_avg], [update.exp_avg_sq], [],
        [torch.full((), float(update.step), device=update.master.device)], amsgrad=False,
        lr=update.lr, beta1=update.beta1, beta2=update.beta2, weight_decay=update.weight_decay,
        eps=update.eps, maximize=False, found_inf=found_inf,
    )  # fmt: skip
    update.grad.zero_()
