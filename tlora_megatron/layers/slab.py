"""One adapter's factors over all its linears on this rank, in one contiguous buffer a kind.

Layout of every buffer: TP-replicated factors first, so that their partial gradients are one slice
to sum over TP; then the sharded ones. `lora_b` is stored transposed, `[rank, out]`, as the
kernels read it. fp32 throughout.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from tlora_megatron.backbone import Backbone
from tlora_megatron.job import LoraSpec
from tlora_megatron.layers.sites import Site, TargetShard
from tlora_megatron.parallel.collectives import all_gather_rows

_SLICE_MULTIPLE = 64
"""Slices begin on 256 bytes: vector instructions then meet the same elements as in the whole."""


class Factor(NamedTuple):
    """Where one factor lies in the slab."""

    shard: TargetShard
    which: Literal["lora_a", "lora_b"]
    offset: int
    shape: tuple[int, int]
    """`[rank, in]` or, transposed, `[rank, out]`; local sizes."""

    @property
    def name(self) -> str:
        """Canonical name, for example `layers.3.q_proj.lora_a`."""
        return f"{self.shard.name}.{self.which}"

    @property
    def numel(self) -> int:
        """Elements."""
        return self.shape[0] * self.shape[1]

    def shard_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the whole canonical tensor, in slab orientation."""
        if self.which == "lora_a":
            columns = self.shard.lora_a_columns
            return whole if columns is None else whole[:, columns]
        rows = self.shard.lora_b_rows
        return (whole if rows is None else whole[rows]).t()

    def place(self, whole: torch.Tensor, local: torch.Tensor) -> None:
        """Writes this rank's part into the whole canonical tensor: the inverse of `shard_of`."""
        if self.which == "lora_a":
            whole[:, self.shard.lora_a_columns or slice(None)] = local
        elif self.shard.lora_b_rows is None:
            whole.copy_(local.t())
        else:
            whole[self.shard.lora_b_rows] = local.t()


class SlabLayout(NamedTuple):
    """Where each factor of one adapter lies on one rank."""

    factors: tuple[Factor, ...]
    replicated_numel: int
    """The first so many elements are replicated over TP; 0 without TP."""
    numel: int

    def split(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The factors as flat views of a flat buffer, in layout order; one call for any number."""
        return buffer.split_with_sizes([f.numel for f in self.factors])

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The factors as views of a flat buffer, in layout order."""
        parts = zip(self.split(buffer), self.factors, strict=True)
        return [part.view(factor.shape) for part, factor in parts]


def slab_layout(sites: Sequence[Site], lora: LoraSpec) -> SlabLayout:
    """Lays an adapter out over the sites of one rank."""
    shards = [
        (site, shard)
        for site in sites
        for shard in site.targets
        if shard.target in lora.target_modules
    ]
    wanted: list[tuple[TargetShard, Literal["lora_a", "lora_b"]]] = []
    for replicated in (True, False):
        for site, shard in shards:
            is_a = replicated == (site.kind == "column")
            wanted.append((shard, "lora_a" if is_a else "lora_b"))
    factors, offset = [], 0
    for shard, which in wanted:
        size = shard.in_size if which == "lora_a" else shard.columns.size
        factors.append(Factor(shard, which, offset, (lora.rank, size)))
        offset += factors[-1].numel
    replicated_numel = sum(f.numel for f in factors[: len(shards)]) if _sharded(sites) else 0
    return SlabLayout(tuple(factors), replicated_numel, offset)


def _sharded(sites: Sequence[Site]) -> bool:
    return any(site.tp_size > 1 for site in sites)


class StatePlacement(NamedTuple):
    """Where an adapter's master weights and Adam moments lie."""

    group: dist.ProcessGroup | None = None
    """Replicas of the adapter, each of which holds one slice; None = every rank holds all."""
    on_cpu: bool = False
    """In the host's memory, pinned, whatever the device of the gradient."""


class AdapterSlab:
    """Master weights, gradient and Adam moments of one adapter on this rank, fp32.

    Backward adds straight to `grad` `[numel]`, through views of it; whoever steps zeroes it. The
    others are `[numel]` too, or this rank's slice of it.
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
        self.master, self.exp_avg, self.exp_avg_sq = (self._zeros() for _ in range(3))

    def _zeros(self) -> torch.Tensor:
        numel = self.held.stop - self.held.start
        if not self.placement.on_cpu:
            return torch.zeros(numel, device=self.grad.device)
        return torch.zeros(numel, pin_memory=self.grad.is_cuda)

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
                whole[factor.name] = torch.empty(factor_shape(spec, factor.name, factor.shape[0]))
            factor.place(whole[factor.name], view)
    return whole


def split_name(name: str) -> tuple[int, str, str]:
    """Layer, target and which factor of a canonical name; a target may hold dots."""
    _, layer, rest = name.split(".", 2)
    target, _, which = rest.rpartition(".")
    return int(layer), target, which


def factor_shape(spec: Backbone, name: str, rank: int) -> tuple[int, int]:
    """Whole shape of the canonical factor `layers.I.TARGET.lora_a|lora_b`."""
    _, target, which = split_name(name)
    out_size, in_size = spec.target_shape(target)
    return (rank, in_size) if which == "lora_a" else (out_size, rank)


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


def initial_factor(spec: Backbone, name: str, rank: int, seed: int) -> torch.Tensor:
    """A fresh factor as PEFT draws it: `lora_a` uniform in +-1/sqrt(in), `lora_b` zero.

    A function of the job's seed and the name alone, the same under every parallel layout.
    """
    shape = factor_shape(spec, name, rank)
    if name.endswith("lora_b"):
        return torch.zeros(shape)
    mixed = (seed * 0x9E3779B1 + zlib.crc32(name.encode())) % 2**64
    generator = torch.Generator().manual_seed(mixed)
    bound = 1.0 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def initial_factors(spec: Backbone, lora: LoraSpec, seed: int) -> Mapping[str, torch.Tensor]:
    """All whole factors of a fresh adapter by canonical name."""
    return {name: initial_factor(spec, name, lora.rank, seed) for name in factor_names(spec, lora)}
