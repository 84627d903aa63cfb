"""The tensors of a Megatron checkpoint, and how layers are stacked in it.

Layers are stacked: `decoder.layers.mlp.linear_fc2.weight` is `[num_layers, hidden, ffn]`, every
layer a chunk. The norms that Transformer Engine fuses into the next linear carry its names, and the
local spec maps to them itself.
"""

from __future__ import annotations

from collections.abc import Iterator

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


def checkpoint_key(name: str) -> str:
    """The checkpoint's name of a tensor of `part_tensors`."""
    layer = "decoder.layers.0."
    if not name.startswith(layer):
        return name
    inside = name.removeprefix(layer)
    return "decoder.layers." + _RENAMED.get(inside, inside)


def write_items(spec: ModelSpec, part: Part, dtype: torch.dtype) -> list[WriteItem]:
    """Lists what is written for a part: name, place and type of tensors, and extra states."""
    layer = (part, spec.num_layers) if isinstance(part, int) else None
    items = [
        _tensor_item(checkpoint_key(name), tensor.shape, dtype, layer)
        for name, tensor in part_tensors(spec, ShapesOnly(spec), part)
    ]
    return items + [
        WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO)
        for key in _extra_states(spec, part)
    ]


def _extra_states(spec: ModelSpec, part: Part) -> list[str]:
    """Keys of empty objects, as `ShardedObject.unique_key` writes them: offset and global shape.

    The norms' are asked for by Transformer Engine's spec only, from 2.0 on.
    """
    if part == "output":
        return ["decoder.final_layernorm._extra_state/shard_0_1"]
    if part == "embedding":
        return []
    norms = [f"self_attention.{name}_layernorm" for name in ("q", "k") if spec.qk_norm]
    return [
        f"decoder.layers.{name}._extra_state/shard_{part}_{spec.num_layers}"
        for name in (*_WITH_EXTRA_STATE, *norms)
    ]


def _tensor_item(
    key: str, shape: torch.Size, dtype: torch.dtype, layer: tuple[int, int] | None
) -> WriteItem:
    """One chunk: the whole tensor, or with `(index, count)` one layer of a stack."""
    offset, size, whole = torch.Size([0] * len(shape)), shape, shape
    if layer is not None:
        index, count = layer
        offset, size, whole = (
            torch.Size([n, *s])
            for n, s in zip((index, 1, count), (offset, shape, shape), strict=True)
        )
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
