"""Writes Hugging Face weights as a checkpoint that Megatron-LM's `--load` reads in any layout.

The format is Megatron-core's `torch_dist`: a torch distributed checkpoint (DCP) of whole tensors
beside `metadata.json` and `common.pt`, which core 0.16 needs. DCP's own writer gets one layer after
another, as if each were a rank: `megatron.core.dist_checkpointing.save` would hold the whole model.

Layers are stacked: `decoder.layers.mlp.linear_fc2.weight` is `[num_layers, hidden, ffn]`, every
layer a chunk, and `decoder.layers.mlp.experts.experts.linear_fc2.weight` `[num_layers, num_experts,
hidden, ffn]`. Norms that Transformer Engine fuses into the next linear carry its names, which the
local spec maps to; before experts, where none is fused, the norm is written under both.
"""

from __future__ import annotations

import io
import json
import math
import re
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.training.formats.atomic_directory import replace_directory
from tlora_megatron.training.formats.fingerprint import Fingerprint, write_fingerprint
from tlora_megatron.training.formats.hf_checkpoint import WeightSource
from tlora_megatron.training.formats.hf_convert import assemble, check_weights, hf_shapes
from tlora_megatron.training.formats.megatron_flags import megatron_arguments, megatron_flags
from tlora_megatron.training.formats.rank_tensors import RankTensor, rank_tensors

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


def part_tensors(spec: ModelSpec, part: Part) -> Iterator[RankTensor]:
    """Whole tensors of one part, under `GPTModel`'s names for a stage that holds only that part."""
    tensors = rank_tensors(
        spec,
        tp_rank=0,
        tp_size=1,
        layers=range(part, part + 1) if isinstance(part, int) else range(0),
        with_embedding=part == "embedding",
        with_output=part == "output",
    )
    for tensor in tensors:
        # Tied, the output layer reads the embedding's tensor.
        if tensor.name != "output_layer.weight" or not spec.tied_embeddings:
            yield tensor


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
    layers = [(part, spec.num_layers)] if isinstance(part, int) else []
    items = []
    for tensor in part_tensors(spec, part):
        for place in checkpoint_places(spec, tensor.name):
            stacks = list(layers)
            if place.expert is not None and spec.experts is not None:
                stacks.append((place.expert, spec.experts.num_experts))
            items.append(_tensor_item(place.key, tensor.shape, dtype, stacks))
    return items + [
        WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO)
        for key in _extra_states(spec, part)
    ]


def _extra_states(spec: ModelSpec, part: Part) -> list[str]:
    """Keys of empty objects, as `ShardedObject.unique_key` writes them: offset and global shape."""
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
    key: str, shape: Sequence[int], dtype: torch.dtype, stacks: Sequence[tuple[int, int]]
) -> WriteItem:
    """One chunk: the whole tensor, or a place `(index, count)` in stacks of layers and experts."""
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


FLAGS_NAME = "model_flags.txt"
"""The architecture's words of Megatron-LM's command line, one a line, beside the checkpoint."""

_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_COMMON = {
    "checkpoint_version": 3.0,
    "iteration": 0,
    "content_metadata": {"singleton_local_shards": False},
}
"""State besides tensors and arguments: a `release` checkpoint has no optimizer."""
_SPACE_LEFT = 1.02
"""Space needed over the tensors' size, for what DCP adds and blocks that are not full."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronCheckpoint:
    """Summary of a written or planned checkpoint."""

    dtype: torch.dtype
    num_parameters: int
    size_bytes: int
    flags: tuple[str, ...]
    """Words of Megatron-LM's command line: the architecture, without layout and precision."""


def plan_megatron_checkpoint(
    spec: ModelSpec, source: WeightSource, dtype: torch.dtype | None = None
) -> MegatronCheckpoint:
    """Checks every tensor's name, shape and type and returns what writing them would give.

    Args:
        dtype: of the written tensors; None keeps the stored one.

    Raises:
        ValueError: if a tensor is missing, misshapen or quantised, or dtype is None and the
            tensors do not share one.
        NotImplementedError: if Megatron-LM has no argument for the architecture.
    """
    flags = tuple(megatron_flags(spec))
    check_weights(spec, source)
    dtype = _shared_dtype(spec, source, dtype)
    tensors = chain.from_iterable(part_tensors(spec, part) for part in parts(spec))
    num_parameters = sum(math.prod(tensor.shape) for tensor in tensors)
    return MegatronCheckpoint(
        dtype=dtype,
        num_parameters=num_parameters,
        size_bytes=num_parameters * dtype.itemsize,
        flags=flags,
    )


def check_destination(directory: Path, size_bytes: int) -> None:
    """Refuses a directory that holds something, or a disk without room."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"OUT must be a new or empty directory, got {directory}")
    folder = next(path for path in directory.absolute().parents if path.is_dir())
    needed, free = size_bytes * _SPACE_LEFT, shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(
            f"OUT must have {needed / 1e9:,.1f} GB free, got {free / 1e9:,.1f} GB in {folder}"
        )


def write_megatron_checkpoint(
    spec: ModelSpec,
    source: WeightSource,
    directory: Path,
    planned: MegatronCheckpoint,
    *,
    extra_flags: Sequence[str] = (),
    fingerprint: Fingerprint | None = None,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> None:
    """Writes the checkpoint, with one layer in memory; a failure leaves `directory` as it was.

    Args:
        extra_flags: words that go to the file of flags behind the architecture's.
        on_bytes: called with the size of every part once it is on the disk.
    """
    check_destination(directory, planned.size_bytes)
    # A link to an empty folder was given on purpose: it is filled where it leads.
    with replace_directory(directory.resolve()) as incoming:
        release = incoming / "release"
        release.mkdir()
        _write_tensors(spec, source, release, planned.dtype, on_bytes)
        arguments = Namespace(
            **megatron_arguments(spec),
            add_position_embedding=True,
            data_parallel_random_init=False,
            ckpt_format="torch_dist",
            tensor_model_parallel_size=1,
            pipeline_model_parallel_size=1,
        )
        torch.save({"args": arguments, **_COMMON}, release / "common.pt")
        (release / "metadata.json").write_text(json.dumps(_FORMAT))
        words = [*planned.flags, *extra_flags]
        (incoming / FLAGS_NAME).write_text("".join(f"{word}\n" for word in words))
        if fingerprint is not None:
            write_fingerprint(incoming, fingerprint)
        (incoming / "latest_checkpointed_iteration.txt").write_text("release")


def _write_tensors(
    spec: ModelSpec,
    source: WeightSource,
    directory: Path,
    dtype: torch.dtype,
    on_bytes: Callable[[int], None],
) -> None:
    writer = FileSystemWriter(directory, thread_count=1)
    writer.set_up_storage_writer(True)
    plans = [SavePlan(write_items(spec, part, dtype)) for part in parts(spec)]
    plans, metadata = create_default_global_save_plan(plans)
    results = []
    for part, plan in zip(parts(spec), writer.prepare_global_plan(plans), strict=True):
        tensors = [
            (checkpoint_places(spec, tensor.name), assemble(tensor, source).to(dtype))
            for tensor in part_tensors(spec, part)
        ]
        planner = _PartPlanner({place: t for places, t in tensors for place in places}, part)
        results.append(writer.write_data(plan, planner).wait())
        on_bytes(sum(tensor.nbytes for _, tensor in tensors))
    writer.finish(metadata, results)


class _PartPlanner(DefaultSavePlanner):
    """Hands DCP's writer the tensors of one part."""

    def __init__(self, tensors: Mapping[Place, Tensor], part: Part) -> None:
        super().__init__(flatten_state_dict=False)
        self._tensors = tensors
        self._is_layer = isinstance(part, int)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The chunk that an item names; an extra state is a list of one None."""
        if write_item.type == WriteItemType.BYTE_IO:
            empty = io.BytesIO()
            torch.save([None], empty)
            return empty
        key, offset = write_item.index.fqn, write_item.index.offset
        if Place(key) in self._tensors:
            tensor = self._tensors[Place(key)]
            return tensor.unsqueeze(0) if self._is_layer else tensor
        assert offset is not None, "a tensor's chunk has a place"
        return self._tensors[Place(key, offset[1])][None, None]


def _shared_dtype(spec: ModelSpec, source: WeightSource, wanted: torch.dtype | None) -> torch.dtype:
    """`wanted`, or the one stored dtype. Reads a row of every tensor: nothing then fails late."""
    stored = {name: source.read(name, slice(0, 1)).dtype for name in hf_shapes(spec)}
    if wanted is not None:
        return wanted
    first, dtype = next(iter(stored.items()))
    for name, other in stored.items():
        if other != dtype:
            raise ValueError(
                f"tensors must share one dtype unless --dtype is given, got {dtype} of {first} and "
                f"{other} of {name}"
            )
    return dtype
