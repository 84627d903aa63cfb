"""The tensors of a Megatron checkpoint, and how layers are stacked in it.

Layers are stacked: `decoder.layers.mlp.linear_fc2.weight` is `[num_layers, hidden, ffn]`, every
layer a chunk, and routed experts in them, every expert of a layer one:
`decoder.layers.mlp.experts.experts.linear_fc2.weight` is `[num_layers, num_experts, hidden, ffn]`.
The norms that Transformer Engine fuses into the next linear carry its names, and the local spec
maps to them itself. Before experts Transformer Engine fuses none but the local spec maps to that
name all the same: the norm is written under both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.training.formats.hf_checkpoint import Rows, WeightSource
from tlora_megatron.training.formats.hf_convert import hf_shapes, megatron_tensors

_RENAMED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
_NORM_BEFORE_EXPERTS = "pre_mlp_layernorm.weight"
_WITH_EXTRA_STATE = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
"""Linears that ask for a state of FP8; None is "there is none" to both specs."""

Part = int | str
"""A part that is written at once: a layer by its index, `embedding`, or `output`."""


def parts(spec: ModelSpec) -> list[Part]:
    """Every part, in the order of the model."""
    return ["embedding", *range(spec.num_layers), "output"]


def part_tensors(spec: ModelSpec, source: WeightSource, part: Part) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors of one part, under `GPTModel`'s names for a stage that holds only that part."""
    tensors = megatron_tensors(
        spec,
        source,
        tp_rank=0,
        tp_size=1,
        layers=range(part, part + 1) if isinstance(part, int) else range(0),
        with_embedding=part == "embedding",
        with_output=part == "output",
    )
    for name, tensor in tensors:
        # Tied, the output layer reads the embedding's tensor.
        if name != "output_layer.weight" or not spec.tied_embeddings:
            yield name, tensor


class Place(NamedTuple):
    """Where a tensor lies in the checkpoint."""

    key: str
    expert: int | None = None
    """Its place among the experts of its layer; None: the tensor is no expert's."""


def checkpoint_places(spec: ModelSpec, name: str) -> list[Place]:
    """The places of a tensor of `part_tensors`: one, or two for a norm with two names."""
    layer = "decoder.layers.0."
    if not name.startswith(layer):
        return [Place(name)]
    inside = name.removeprefix(layer)
    linear = re.fullmatch(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)", inside)
    if linear is not None:
        key = f"decoder.layers.mlp.experts.experts.{linear[1]}.weight"
        return [Place(key, int(linear[2]))]
    names = [_RENAMED.get(inside, inside)]
    if spec.experts is not None and inside == _NORM_BEFORE_EXPERTS:
        names.append(inside)
    return [Place(f"decoder.layers.{name}") for name in names]


def write_items(spec: ModelSpec, part: Part, dtype: torch.dtype) -> list[WriteItem]:
    """Lists what is written for a part: name, place and type of tensors, and extra states."""
    items = [
        _tensor_item(place.key, tensor.shape, dtype, _stacks(spec, part, place))
        for name, tensor in part_tensors(spec, ShapesOnly(spec), part)
        for place in checkpoint_places(spec, name)
    ]
    return items + [
        WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO)
        for key in _extra_states(spec, part)
    ]


def _stacks(spec: ModelSpec, part: Part, place: Place) -> list[tuple[int, int]]:
    """A tensor's index in each stack that it is in, and the stack's size: layers, experts."""
    if not isinstance(part, int):
        return []
    layers = [(part, spec.num_layers)]
    if place.expert is None or spec.experts is None:
        return layers
    return [*layers, (place.expert, spec.experts.num_experts)]


def _extra_states(spec: ModelSpec, part: Part) -> list[str]:
    """Keys of empty objects, as `ShardedObject.unique_key` writes them: offset and global shape.

    The norms' are asked for by Transformer Engine's spec only, from 2.0 on.
    """
    if part == "output":
        return ["decoder.final_layernorm._extra_state/shard_0_1"]
    if part == "embedding":
        return []
    names = list(_WITH_EXTRA_STATE[: 4 if spec.experts is None else 2])
    names += [f"self_attention.{name}_layernorm" for name in ("q", "k") if spec.qk_norm]
    if spec.experts is not None:
        names.append("pre_mlp_layernorm")
    if spec.shared_ffn_size is not None:
        names += ["mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"]
    states = [
        f"decoder.layers.{name}._extra_state/shard_{part}_{spec.num_layers}" for name in names
    ]
    count = 0 if spec.experts is None else spec.experts.num_experts
    return states + [
        f"decoder.layers.mlp.experts.experts.{linear}._extra_state/"
        f"shard_{part}.{expert}_{spec.num_layers}.{count}"
        for linear in ("linear_fc1", "linear_fc2")
        for expert in range(count)
    ]


def _tensor_item(
    key: str, shape: torch.Size, dtype: torch.dtype, stacks: Sequence[tuple[int, int]]
) -> WriteItem:
    """One chunk: the whole tensor, or a place `(index, count)` of one or more stacks."""
    offset = torch.Size([*(index for index, _ in stacks), *(0 for _ in shape)])
    size = torch.Size([*(1 for _ in stacks), *shape])
    whole = torch.Size([*(count for _, count in stacks), *shape])
    return WriteItem(
        index=MetadataIndex(key, offset),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offset, sizes=size),
            properties=TensorProperties(dtype=dtype),
            size=whole,
        ),
    )


class ShapesOnly:
    """A `WeightSource` of shapes alone, on the meta device."""

    def __init__(self, spec: ModelSpec) -> None:
        self._shapes = hf_shapes(spec)

    def keys(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, rows: Rows = None, cols: slice | None = None) -> Tensor:
        whole = torch.empty(self._shapes[name], device="meta")
        runs = rows if isinstance(rows, list) else [rows or slice(None)]
        picked = torch.cat([whole[run] for run in runs])
        return picked if cols is None else picked[:, cols]
