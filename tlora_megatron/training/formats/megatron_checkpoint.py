"""Writes Hugging Face weights as a checkpoint that Megatron-LM's `--load` reads in any layout.

The format is Megatron-core's `torch_dist`: a torch distributed checkpoint (DCP) of whole tensors
beside `metadata.json` and `common.pt`. `megatron.core.dist_checkpointing.save` would hold the whole
model in memory; here DCP's own writer gets one layer after another, as if each were a rank, which
gives one file a layer. `common.pt` is what core 0.16 needs and newer ones still read.
"""

from __future__ import annotations

import io
import json
import shutil
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.training.formats.atomic_directory import replace_directory
from tlora_megatron.training.formats.fingerprint_file import Fingerprint, write_fingerprint
from tlora_megatron.training.formats.hf_checkpoint import WeightSource
from tlora_megatron.training.formats.hf_convert import check_weights, hf_shapes
from tlora_megatron.training.formats.megatron_flags import megatron_arguments, megatron_flags
from tlora_megatron.training.formats.megatron_layout import (
    Part,
    Place,
    ShapesOnly,
    checkpoint_places,
    part_tensors,
    parts,
    write_items,
)

FLAGS_NAME = "model_flags.txt"
"""The architecture's words of Megatron-LM's command line, one a line, beside the checkpoint."""

_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
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
    tensors = chain.from_iterable(
        part_tensors(spec, ShapesOnly(spec), part) for part in parts(spec)
    )
    num_parameters = sum(tensor.numel() for _, tensor in tensors)
    return MegatronCheckpoint(
        dtype=dtype,
        num_parameters=num_parameters,
        size_bytes=num_parameters * dtype.itemsize,
        flags=flags,
    )


def check_destination(directory: Path, size_bytes: int) -> None:
    """Refuses a directory that holds something, or a disk without room.

    Raises:
        ValueError: saying which.
    """
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
        directory: new or empty; filled under another name, which it takes at the end.
        planned: from `plan_megatron_checkpoint`.
        extra_flags: words that go to the file of flags behind the architecture's.
        fingerprint: of the base, to be written beside the weights.
        on_bytes: called with the size of every part once it is on the disk.

    Raises:
        ValueError: if the destination cannot take it.
        OSError: if the file system refuses.
    """
    check_destination(directory, planned.size_bytes)
    # A link to an empty folder was given on purpose: it is filled where it leads.
    with replace_directory(directory.resolve()) as incoming:
        release = incoming / "release"
        release.mkdir()
        _write_tensors(spec, source, release, planned.dtype, on_bytes)
        torch.save(_common_state(spec), release / "common.pt")
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
        named = part_tensors(spec, source, part)
        tensors = [(checkpoint_places(spec, name), tensor.to(dtype)) for name, tensor in named]
        planner = _PartPlanner({place: t for places, t in tensors for place in places}, part)
        results.append(writer.write_data(plan, planner).wait())
        on_bytes(sum(tensor.nbytes for _, tensor in tensors))
    writer.finish(metadata, results)


def _common_state(spec: ModelSpec) -> dict[str, Any]:
    """The state besides tensors: a `release` checkpoint has no optimizer and is at iteration 0."""
    layout = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    others = {
        "add_position_embedding": True,
        "data_parallel_random_init": False,
        "ckpt_format": "torch_dist",
    }
    return {
        "args": Namespace(**megatron_arguments(spec), **others, **layout),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": {"singleton_local_shards": False},
    }


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
