"""An adapter's factors over the model: their names, shapes, first values and whole tensors."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from tlora_megatron.config.job import LoraSpec
from tlora_megatron.layers.slab.layout import Factor, SlabLayout
from tlora_megatron.model.backbone import Backbone
from tlora_megatron.model.spec import ModelSpec


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


def initial_factor(spec: Backbone, name: str, lora: LoraSpec, seed: int) -> torch.Tensor:
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


def _drawn(shape: tuple[int, ...], name: str, seed: int, *, is_block: bool = False) -> torch.Tensor:
    mixed = (seed * 0x9E3779B1 + zlib.crc32(name.encode())) % 2**64
    generator = torch.Generator().manual_seed(mixed)
    bound = math.sqrt(6.0 / shape[1]) if is_block else 1.0 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def initial_factors(spec: Backbone, lora: LoraSpec, seed: int) -> Mapping[str, torch.Tensor]:
    """Returns all whole factors of a fresh adapter by canonical name."""
    return {name: initial_factor(spec, name, lora, seed) for name in factor_names(spec, lora)}


class WholeTensor(NamedTuple):
    """A whole canonical tensor, whose parts lie in flat CPU buffers of the model-parallel ranks."""

    name: str
    shape: tuple[int, ...]
    parts: list[tuple[Factor, torch.Tensor]]

    def join(self, room: torch.Tensor) -> torch.Tensor:
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

    def as_stored(self) -> torch.Tensor | None:
        """Returns the tensor where it lies if one part is all of it; None if it must be joined."""
        factor, part = self.parts[0]
        whole = factor.is_whole_as_stored and tuple(part.shape) == self.shape
        return part if whole else None


def find_whole_tensors(
    layouts: Sequence[SlabLayout], buffers: Sequence[torch.Tensor], spec: Backbone
) -> list[WholeTensor]:
    """Finds every whole canonical tensor in the flat CPU buffers of all model-parallel ranks."""
    parts: dict[str, list[tuple[Factor, torch.Tensor]]] = {}
    for layout, buffer in zip(layouts, buffers, strict=True):
        for factor, view in zip(layout.factors, layout.views(buffer), strict=True):
            parts.setdefault(factor.name, []).append((factor, view))
    lora = layouts[0].lora
    return [
        WholeTensor(name, factor_shape(spec, name, lora), found) for name, found in parts.items()
    ]


def whole_tensors(
    layouts: Sequence[SlabLayout], buffers: Sequence[torch.Tensor], spec: Backbone
) -> dict[str, torch.Tensor]:
    """Joins the flat buffers of all model-parallel ranks into whole canonical CPU tensors."""
    found = find_whole_tensors(layouts, [buffer.cpu() for buffer in buffers], spec)
    return {tensor.name: tensor.join(torch.empty(tensor.shape)) for tensor in found}


def check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuses weights or moments that training could not continue from.

    Raises:
        ValueError: naming the first tensor that holds NaN or inf.
    """
    for name, tensor in tensors.items():
        if not _is_finite(tensor):
            raise ValueError(f"{name} must be finite, got NaN or inf")


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.device.type == "cpu" and tensor.dtype == torch.float32:
        return bool(np.isfinite(tensor.detach().numpy()).all())  # 20 GB/s, where torch has 0.6
    return bool(tensor.isfinite().all())
