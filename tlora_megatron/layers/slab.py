"""One adapter's factors over all its linears on this rank, in one contiguous buffer a kind.

All buffers are fp32 and share one layout (`layers.slab_layout`).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from tlora_megatron.config.job import LoraSpec
from tlora_megatron.layers.slab_layout import SlabLayout
from tlora_megatron.model.backbone import Backbone
from tlora_megatron.parallel.collectives import all_gather_rows

_SLICE_MULTIPLE = 64
"""Slices begin on 256 bytes: vector instructions then meet the same elements as in the whole."""


class StatePlacement(NamedTuple):
    """Where an adapter's master weights and Adam moments lie."""

    group: dist.ProcessGroup | None = None
    """Replicas of the adapter, each of which holds one slice; None = every rank holds all."""
    on_cpu: bool = False
    """In the host's memory, pinned, whatever the device of the gradient."""


class AdapterSlab:
    """Master weights, gradient and Adam moments of one adapter on this rank, fp32.

    Backward adds straight to `grad` `[numel]`, through views of it; whoever steps zeroes it. The
    others are `[numel]` too, or this rank's slice of it. What backward adds for factors of several
    blocks comes with the products off the diagonal: into a buffer beside, until `collect_grad`.
    """

    def __init__(
        self,
        layout: SlabLayout,
        device: torch.device,
        placement: StatePlacement = StatePlacement(),  # noqa: B008 - frozen
    ) -> None:
        self.layout = layout
        self.placement = placement
        self._slice_size, begin = layout.numel, 0
        if placement.group is not None:
            parts = dist.get_world_size(placement.group)
            self._slice_size = -(-layout.numel // (parts * _SLICE_MULTIPLE)) * _SLICE_MULTIPLE
            begin = dist.get_rank(placement.group) * self._slice_size
        self.held = slice(min(begin, layout.numel), min(begin + self._slice_size, layout.numel))
        """Elements of the whole buffers that this rank holds."""
        self.grad = torch.zeros(layout.numel, device=device)
        sizes = [math.prod(factor.spread_shape) for factor in layout.spread]
        self._spread_grad = torch.zeros(sum(sizes), device=device)
        self._spread = {
            factor.name: part.view(factor.spread_shape)
            for factor, part in zip(layout.spread, self._spread_grad.split(sizes), strict=True)
        }
        self.master, self.exp_avg, self.exp_avg_sq = (self._zeros() for _ in range(3))

    def _zeros(self) -> torch.Tensor:
        numel = self.held.stop - self.held.start
        if not self.placement.on_cpu:
            return torch.zeros(numel, device=self.grad.device)
        return torch.zeros(numel, pin_memory=self.grad.is_cuda)

    def grad_views(self) -> dict[str, torch.Tensor]:
        """Where backward adds each factor's gradient, by its name: views as the kernels write."""
        views = zip(self.layout.factors, self.layout.views(self.grad), strict=True)
        return {factor.name: view for factor, view in views} | self._spread

    def collect_grad(self) -> None:
        """Takes gradients of blocks into `grad`; before anyone reads it."""
        if not self._spread:
            return
        views = self.layout.views(self.grad)
        for factor, view in zip(self.layout.factors, views, strict=True):
            if factor.name in self._spread:
                factor.blocks(view).add_(factor.diagonal(self._spread[factor.name]))
        self._spread_grad.zero_()

    def zero_grad(self) -> None:
        """Forgets the gradient of a batch."""
        self.grad.zero_()
        self._spread_grad.zero_()

    def buffers(self) -> dict[str, torch.Tensor]:
        """What this rank holds of the flat buffers of a checkpoint: all but the gradient."""
        return {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def load(self, whole: Callable[[str], torch.Tensor], buffer: str = "master") -> None:
        """Fills a buffer from whole canonical tensors, looked up by canonical name."""
        flat = torch.empty(self.layout.numel)
        for factor, view in zip(self.layout.factors, self.layout.views(flat), strict=True):
            view.copy_(factor.shard_of(whole(factor.name)))
        self.buffers()[buffer].copy_(flat[self.held])

    def whole(self, buffer: str) -> torch.Tensor:
        """A buffer `[numel]` on the gradient's device; collective where ranks hold slices."""
        return self._gather(self.buffers()[buffer].to(self.grad.device))

    def compute_copy(self, dtype: torch.dtype) -> torch.Tensor:
        """A new `[numel]` of the master weights in a dtype, collective as `whole`."""
        return self._gather(self.master.to(dtype, copy=True).to(self.grad.device))

    def _gather(self, held: torch.Tensor) -> torch.Tensor:
        if self.placement.group is None:
            return held
        padded = held.new_zeros(self._slice_size)
        padded[: held.numel()] = held
        return all_gather_rows(padded, self.placement.group)[: self.layout.numel]


def whole_tensors(
    layouts: Sequence[SlabLayout], buffers: Sequence[torch.Tensor], spec: Backbone
) -> dict[str, torch.Tensor]:
    """Joins the flat buffers of all model-parallel ranks into whole canonical CPU tensors."""
    whole: dict[str, torch.Tensor] = {}
    for layout, buffer in zip(layouts, buffers, strict=True):
        views = layout.views(buffer.cpu())
        for factor, view in zip(layout.factors, views, strict=True):
            if factor.name not in whole:
                whole[factor.name] = torch.empty(factor_shape(spec, factor.name, layout.lora))
            factor.place(whole[factor.name], view)
    return whole


def split_name(name: str) -> tuple[int, str, str]:
    """Layer, target and which factor of a canonical name; a target may hold dots."""
    _, layer, rest = name.split(".", 2)
    target, _, which = rest.rpartition(".")
    return int(layer), target, which


def factor_shape(spec: Backbone, name: str, lora: LoraSpec) -> tuple[int, int]:
    """Whole shape of the canonical factor `layers.I.TARGET.lora_a|lora_b`.

    The blocks of a block-diagonal one lie below one another, as in PEFT's files.
    """
    _, target, which = split_name(name)
    out_size, in_size = spec.target_shape(target)
    blocks = lora.num_blocks if which == lora.block_factor(target) else 1
    if which == "lora_a":
        return lora.rank, in_size // blocks
    return out_size, lora.rank // blocks


def check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuses weights or moments that an adapter could not go on from.

    Raises:
        ValueError: naming the first tensor that holds NaN or inf.
    """
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} must be finite, got NaN or inf")


def factor_names(spec: Backbone, lora: LoraSpec) -> Iterator[str]:
    """Canonical names of an adapter's factors over the whole model."""
    for layer in range(spec.num_layers):
        for target in lora.target_modules:
            yield f"layers.{layer}.{target}.lora_a"
            yield f"layers.{layer}.{target}.lora_b"


def initial_factor(spec: Backbone, name: str, lora: LoraSpec, seed: int) -> torch.Tensor:
    """A fresh factor as PEFT draws it: `lora_b` zero, `lora_a` uniform in +-1/sqrt(in), of
    block-diagonal ones in +-sqrt(6 / (in / num_blocks)).

    A function of the job's seed and the name alone, the same under every parallel layout.
    """
    shape = factor_shape(spec, name, lora)
    if name.endswith("lora_b"):
        return torch.zeros(shape)
    mixed = (seed * 0x9E3779B1 + zlib.crc32(name.encode())) % 2**64
    generator = torch.Generator().manual_seed(mixed)
    is_block = lora.block_factor(split_name(name)[1]) == "lora_a"
    bound = math.sqrt(6.0 / shape[1]) if is_block else 1.0 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def initial_factors(spec: Backbone, lora: LoraSpec, seed: int) -> Mapping[str, torch.Tensor]:
    """All whole factors of a fresh adapter by canonical name."""
    return {name: initial_factor(spec, name, lora, seed) for name in factor_names(spec, lora)}
