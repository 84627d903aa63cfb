"""An adapter's factors over the whole model: their canonical names, shapes and first values."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping

import torch

from tlora_megatron.config.job import LoraSpec
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
