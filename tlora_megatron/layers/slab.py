"""One adapter's factors over all its linears on this rank, in one contiguous buffer a kind.

All buffers are fp32 and share one layout (`layers.slab_layout`).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tlora_megatron.config.job import LoraSpec
from tlora_megatron.layers.slab_cells import SlabCells
from tlora_megatron.layers.slab_layout import Factor, SlabLayout
from tlora_megatron.model.backbone import Backbone
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.lora.linear_ops import are_aligned
from tlora_megatron.parallel.collectives import all_gather_rows
from tlora_megatron.parallel.groups import ParallelGroups, host_threads

_LOADING_THREADS = 8
"""Fresh factors are drawn on one thread each: of eight jobs on 8B shapes, seconds of a start."""
_SLICE_MULTIPLE = 64
"""Slices begin on 256 bytes: vector instructions then meet the same elements as in the whole."""


Fill = Callable[[Tensor], object]
"""Writes values into flat memory of the host."""


class Copier(NamedTuple):
    """How the parts of a buffer come from the host into it."""

    put: Callable[[Tensor, Fill], object]
    """Copies what is filled in on the host into a part of a buffer."""
    threads: int
    """That find, make and copy parts; more than the rank has cores to itself are never used."""
    numel: int
    """Elements of a part at most, unless a single factor has more."""


class StatePlacement(NamedTuple):
    """The ranks and the memory that hold an adapter's master weights and Adam moments."""

    group: dist.ProcessGroup | None = None
    """Replicas of the adapter, each of which holds one slice; None = every rank holds all."""
    on_cpu: bool = False
    """In the host's memory (pinned beside a GPU), wherever the gradient is."""

    @classmethod
    def over_replicas(
        cls, groups: ParallelGroups, *, shards: bool, on_cpu: bool = False
    ) -> StatePlacement:
        """Slices over data and context parallel ranks, if they are wanted and there are several."""
        replicas = groups.layout.dp_size * groups.layout.cp_size
        return cls(groups.dp_cp_group if shards and replicas > 1 else None, on_cpu)


class AdapterSlab:
    """Master weights, gradient and Adam moments of one adapter on this rank, fp32.

    Backward adds straight to `grad` `[numel]`, through views of it; the optimizer zeroes it. The
    others are `[numel]` too, or this rank's slice of it. Gradients of factors of several blocks
    come with the products off the diagonal: they lie in a buffer beside until `collect_grad`.
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
        self.cells: SlabCells | None = None
        """Its parts that unlike replicas sum; made by the first sum."""
        self._read_until: torch.cuda.Event | None = None

    def _zeros(self) -> Tensor:
        numel = self.held.stop - self.held.start
        if not self.placement.on_cpu:
            return torch.zeros(numel, device=self.grad.device)
        return torch.zeros(numel, pin_memory=self.grad.is_cuda)

    @cached_property
    def grad_views(self) -> dict[str, Tensor]:
        """Each factor's gradient by its name: the views that backward adds to."""
        views = zip(self.layout.factors, self.layout.views(self.grad), strict=True)
        return {factor.name: view for factor, view in views} | self._spread

    @cached_property
    def unaligned(self) -> frozenset[str]:
        """Names of the gradients that the fastest kernels cannot add to."""
        return frozenset(n for n, view in self.grad_views.items() if not are_aligned(((view,),)))

    def collect_grad(self) -> None:
        """Moves gradients of blocks into `grad`; must be called before anyone reads it."""
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

    def buffers(self) -> dict[str, Tensor]:
        """Returns this rank's part of a checkpoint's flat buffers: all but the gradient."""
        return {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def read_until(self, event: torch.cuda.Event) -> None:
        """Notes that another stream reads master and moments until an event."""
        self._read_until = event

    def wait_for_readers(self) -> None:
        """Must come before master or moments change: makes the current stream wait, not the host.

        Those in the host's memory are only ever read by copies that the host has waited for.
        """
        if self._read_until is not None:
            torch.cuda.current_stream(self.grad.device).wait_event(self._read_until)
            self._read_until = None

    def load(
        self, whole: Callable[[str], Tensor], buffer: str = "master", copier: Copier | None = None
    ) -> None:
        """Fills a buffer from whole canonical tensors.

        Args:
            whole: finds or makes a tensor by its canonical name; called on several threads.
            copier: its threads do so, and it copies where ranks hold no slices; None = all parts
                go together, through the host's memory.
        """
        if copier is not None and self.placement.group is None:
            self._fill(self.buffers()[buffer], copier, whole)
        else:
            self.put(buffer, self.read(whole, copier.threads if copier else _LOADING_THREADS))

    def read(self, whole: Callable[[str], Tensor], threads: int) -> Tensor:
        """Returns what `load` would fill a buffer with, on the host, for `put`."""
        flat = torch.empty(self.layout.numel)
        self._fill(flat, Copier(lambda part, fill: fill(part), threads, 0), whole)
        return flat

    def put(self, buffer: str, flat: Tensor) -> None:
        """Fills a buffer with what `read` has returned."""
        self.buffers()[buffer].copy_(flat[self.held])

    def _fill(self, flat: Tensor, copier: Copier, whole: Callable[[str], Tensor]) -> None:
        def load_part(factors: Sequence[Factor]) -> None:
            begin, end = factors[0].offset, factors[-1].offset + factors[-1].numel

            def fill(room_N: Tensor) -> None:
                parts = room_N.split_with_sizes([factor.numel for factor in factors])
                for factor, part in zip(factors, parts, strict=True):
                    factor.take(whole(factor.name), part.view(factor.shape))

            copier.put(flat[begin:end], fill)

        with ThreadPoolExecutor(host_threads(copier.threads)) as pool:
            parts = self.layout.parts(copier.numel)
            list(pool.map(load_part, parts))  # raises what was raised there

    def whole(self, buffer: str) -> Tensor:
        """Returns a buffer `[numel]` on the gradient's device; collective if ranks hold slices."""
        return self._gather(self.buffers()[buffer].to(self.grad.device))

    def copy_weights(self, room_N: Tensor) -> None:
        """Writes the master weights, cast, into `[numel]`; collective like `whole`."""
        if self.placement.group is None and self.master.device == room_N.device:
            room_N.copy_(self.master)
        else:
            room_N.copy_(self._gather(self.master.to(room_N.dtype).to(room_N.device)))

    def _gather(self, held: Tensor) -> Tensor:
        if self.placement.group is None:
            return held
        padded = held.new_zeros(self._slice_size)
        padded[: held.numel()] = held
        return all_gather_rows(padded, self.placement.group)[: self.layout.numel]


def split_name(name: str) -> tuple[int, str, str]:
    """Returns layer, target and factor of a canonical name; a target may hold dots."""
    _, layer, rest = name.split(".", 2)
    target, _, which = rest.rpartition(".")
    return int(layer), target, which


def factor_shape(spec: Backbone, name: str, lora: LoraSpec) -> tuple[int, ...]:
    """Returns the whole shape of the canonical factor `layers.I.TARGET.lora_a|lora_b`.

    Blocks of a block-diagonal factor lie below one another, as in PEFT's files. A factor of routed
    experts has the experts in front, `[experts, rank, in]` and `[experts, out, rank]`, unless it is
    shared by all of them.
    """
    _, target, which = split_name(name)
    out_size, in_size = spec.target_shape(target)
    if target in lora.expert_targets and isinstance(spec, ModelSpec):
        assert spec.experts is not None, "target_shape has looked"
        rank = lora.rank_of(target)
        matrix = (rank, in_size) if which == "lora_a" else (out_size, rank)
        return matrix if lora.is_shared(target, which) else (spec.experts.num_experts, *matrix)
    blocks = lora.num_blocks if which == lora.block_factor(target) else 1
    if which == "lora_a":
        return lora.rank, in_size // blocks
    return out_size, lora.rank // blocks


def factor_names(spec: Backbone, lora: LoraSpec) -> Iterator[str]:
    """Yields the canonical names of an adapter's factors over the whole model."""
    for layer in range(spec.num_layers):
        for target in lora.target_modules:
            yield f"layers.{layer}.{target}.lora_a"
            yield f"layers.{layer}.{target}.lora_b"


def initial_factor(spec: Backbone, name: str, lora: LoraSpec, seed: int) -> Tensor:
    """Returns a fresh factor, drawn as PEFT does.

    `lora_b` is zero; `lora_a` is uniform in +-1/sqrt(in), and in +-sqrt(6 / (in / num_blocks))
    where it is block-diagonal. The values depend on the job's seed and the name alone, so they are
    the same under every parallel layout. Each routed expert draws its own, by its own number.
    """
    shape = factor_shape(spec, name, lora)
    if name.endswith("lora_b"):
        return torch.zeros(shape)
    if len(shape) == 3:
        begin, end = name.split(".experts.")
        drawn = [_drawn(shape[1:], f"{begin}.experts.{e}.{end}", seed) for e in range(shape[0])]
        return torch.stack(drawn)
    is_block = lora.block_factor(split_name(name)[1]) == "lora_a"
    return _drawn(shape, name, seed, is_block=is_block)


def _drawn(shape: tuple[int, ...], name: str, seed: int, *, is_block: bool = False) -> Tensor:
    mixed = (seed * 0x9E3779B1 + zlib.crc32(name.encode())) % 2**64
    generator = torch.Generator().manual_seed(mixed)
    bound = math.sqrt(6.0 / shape[1]) if is_block else 1.0 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


class WholeTensor(NamedTuple):
    """A whole canonical tensor, whose parts lie in flat CPU buffers of the model-parallel ranks."""

    name: str
    shape: tuple[int, ...]
    parts: list[tuple[Factor, Tensor]]

    def join(self, room: Tensor) -> Tensor:
        """Puts the parts together in `room` and returns it."""
        for factor, part in self.parts:
            factor.place(room, part)
        return room

    def of_expert(self, expert: int) -> WholeTensor:
        """Returns one expert's matrix of a tensor of routed experts."""
        parts = [
            (factor._replace(shape=factor.shape[1:], experts=None), part[expert - held.start])
            for factor, part in self.parts
            if (held := factor.experts) is not None and expert in held
        ]
        return WholeTensor(f"{self.name} of expert {expert}", self.shape[1:], parts)

    def as_stored(self) -> Tensor | None:
        """Returns the tensor where it lies if one part is all of it; None if it must be joined."""
        factor, part = self.parts[0]
        everything = (slice(None), slice(None))
        is_all = factor.which == "lora_a" and factor.held == everything
        return part if is_all and tuple(part.shape) == self.shape else None


def find_whole_tensors(
    layouts: Sequence[SlabLayout], buffers: Sequence[Tensor], spec: Backbone
) -> list[WholeTensor]:
    """Finds every whole canonical tensor in the flat CPU buffers of all model-parallel ranks."""
    parts: dict[str, list[tuple[Factor, Tensor]]] = {}
    for layout, buffer in zip(layouts, buffers, strict=True):
        for factor, view in zip(layout.factors, layout.views(buffer), strict=True):
            parts.setdefault(factor.name, []).append((factor, view))
    lora = layouts[0].lora
    return [
        WholeTensor(name, factor_shape(spec, name, lora), found) for name, found in parts.items()
    ]


_BF16_EXPONENT = np.int16(0x7F80)
"""All of its bits are set in NaN and inf alone."""


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Refuses weights or moments that training could not continue from.

    Raises:
        ValueError: naming the first tensor that holds NaN or inf.
    """
    finite: np.ndarray | Tensor
    for name, tensor in tensors.items():
        if tensor.device.type == "cpu" and tensor.dtype == torch.float32:
            finite = np.isfinite(tensor.detach().numpy())  # 20 GB/s, where torch has 0.6
        elif tensor.device.type == "cpu" and tensor.dtype == torch.bfloat16:
            exponents = tensor.detach().contiguous().view(torch.int16).numpy() & _BF16_EXPONENT
            finite = exponents != _BF16_EXPONENT  # torch takes ten times as long here, too
        else:
            finite = tensor.isfinite()
        if not finite.all():
            raise ValueError(f"{name} must be finite, got NaN or inf")
