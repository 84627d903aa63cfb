"""Checks that the linears of a base model can be split into an adapter's blocks."""

from __future__ import annotations

from collections.abc import Collection

from tlora_megatron.config.job import HF_TARGETS, SHARED_EXPERT_TARGETS, LoraSpec
from tlora_megatron.config.rules import either_of, nearest_options
from tlora_megatron.model.backbone import Backbone, LinearsSpec

_KNOWN = (*HF_TARGETS, *SHARED_EXPERT_TARGETS, "linear_proj", "linear_fc2")


def check_block_sizes(job: str, lora: LoraSpec, spec: Backbone, tp_size: int = 1) -> None:
    """Refuses numbers of blocks that do not fit the base model or tensor parallelism.

    Args:
        job: name of the job.
        lora: the adapter's settings.
        spec: the base model.
        tp_size: number of tensor-parallel ranks.

    Raises:
        ValueError: naming the job and the nearest numbers of blocks that fit.
    """
    if not lora.is_block_diagonal:
        return
    _check_kinds(job, lora, spec, tp_size)
    blocks = lora.num_blocks
    widths = {target: _block_width(lora, target, spec) for target in lora.target_modules}
    if blocks in _fitting(lora.rank, widths.values(), tp_size):
        return
    remedy = _remedy(lora, widths.values(), tp_size)
    what = f"lora.num_blocks of job {job!r} must"
    if blocks % tp_size:
        raise ValueError(f"{what} be a multiple of tp_size = {tp_size}, got {blocks}; {remedy}")
    for target, width in widths.items():
        if width % blocks:
            side = "inputs" if lora.block_factor(target) == "lora_a" else "outputs"
            raise ValueError(
                f"{what} divide the {width} {side} of {target}, got {blocks}; {remedy}"
            )
    raise ValueError(f"{what} be at least 2 and divide lora.rank, got {blocks}; {remedy}")


def _fitting(rank: int, widths: Collection[int], tp_size: int) -> list[int]:
    """Numbers of blocks that divide the rank and all widths, and fit tensor parallelism."""
    numbers = range(max(2, tp_size), rank + 1)
    sizes = (rank, *widths)
    return [n for n in numbers if n % tp_size == 0 and not any(size % n for size in sizes)]


def _remedy(lora: LoraSpec, widths: Collection[int], tp_size: int) -> str:
    """Names the nearest numbers of blocks that fit, or the nearest ranks that have one."""
    numbers = _fitting(lora.rank, widths, tp_size)
    if numbers:
        nearest = either_of(nearest_options(lora.num_blocks, numbers))
        return f"the nearest for rank {lora.rank} are {nearest}"
    ranks = [r for r in range(2, 2 * (lora.rank + tp_size)) if _fitting(r, widths, tp_size)]
    nearest = either_of(nearest_options(lora.rank, ranks)) or "standard ones"
    return f"no number does for rank {lora.rank}, the nearest ranks are {nearest}"


def _check_kinds(job: str, lora: LoraSpec, spec: Backbone, tp_size: int) -> None:
    """Refuses targets that tensor parallelism splits differently than the blocks assume."""
    for target in lora.target_modules:
        if target not in _KNOWN:
            raise ValueError(
                f"lora.target_modules of job {job!r} must be among {', '.join(_KNOWN)} with "
                f"parametrization block_diagonal, got {target}: how tensor parallelism would cut "
                f"it is not known; train it as standard"
            )
        kind = "row" if lora.block_factor(target) == "lora_a" else "column"
        if isinstance(spec, LinearsSpec) and tp_size > 1 and spec.linear(target).kind != kind:
            raise ValueError(
                f"lora.parametrization of job {job!r} must be standard on {target}, which is cut "
                f"as {spec.linear(target).kind}-parallel here and not as {kind}-parallel"
            )


def _block_width(lora: LoraSpec, target: str, spec: Backbone) -> int:
    out_size, in_size = spec.target_shape(target)
    return in_size if lora.block_factor(target) == "lora_a" else out_size
