"""A job's checkpoints: whole tensors by canonical name, so that any layout can take them up.

`checkpoints/step_00000050/` holds `adapter.safetensors` (fp32 master weights),
`optimizer.safetensors` (Adam's moments) and `state.json` (progress, the job as it was configured,
and a fingerprint of its data). A directory appears whole or not at all; the two newest are kept.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tlora_megatron.config.job import JobSpec, LoraSpec
from tlora_megatron.layers.linear_sites import rank_sites
from tlora_megatron.layers.slab import (
    check_finite,
    factor_names,
    factor_shape,
    whole_tensors,
)
from tlora_megatron.layers.slab_layout import slab_layout
from tlora_megatron.model.backbone import Backbone
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.training.data.job_data import JobData
from tlora_megatron.training.formats.atomic_directory import replace_directory
from tlora_megatron.training.job_state import JobState

logger = logging.getLogger(__name__)

_KEEP = 2
_FORMAT = 1
_STATE_KEYS = {"format", "job", "num_sequences", "data_fingerprint", "progress"}
_NAME = re.compile(r"step_(\d{8,})")
_MOMENTS = ("exp_avg", "exp_avg_sq")


def gather_buffer(
    buffer: str, job: JobState, spec: Backbone, groups: ParallelGroups
) -> dict[str, torch.Tensor]:
    """Whole canonical tensors of one slab buffer, fp32 on the CPU, on the writer; empty elsewhere.

    Collective over the model-parallel ranks of replica 0, and over replicas that hold slices; every
    rank calls it.
    """
    held = job.adapter.slab.whole(buffer)
    if not groups.is_first_replica:
        return {}
    layout = groups.layout
    layouts = [
        slab_layout(rank_sites(spec, layout, tp_rank=tp_rank, pp_rank=pp_rank), job.spec.lora)
        for pp_rank in range(layout.pp_size)
        for tp_rank in range(layout.tp_size)
    ]
    # A collective takes equal sizes only, and stages may hold different numbers of layers.
    most = max(one.numel for one in layouts)
    local = F.pad(held, (0, most - held.numel()))
    if not groups.is_writer:
        dist.gather(local, group=groups.model_group, group_dst=0)
        return {}
    parts = [torch.empty_like(local) for _ in layouts]
    dist.gather(local, parts, group=groups.model_group, group_dst=0)
    parts = [part[: one.numel] for one, part in zip(layouts, parts, strict=True)]
    return whole_tensors(layouts, parts, spec)


def save_checkpoint(directory: Path, job: JobState, spec: Backbone, groups: ParallelGroups) -> None:
    """Writes `directory/step_N`; collective, the writer's rank writes.

    Raises:
        OSError: on the writer, if the disk refuses.
        ValueError: on the writer, if a tensor is not finite; the job could not go on from it.
            Either way the earlier checkpoints are untouched.
    """
    weights = gather_buffer("master", job, spec, groups)
    moments = {
        f"{buffer}.{name}": tensor
        for buffer in _MOMENTS
        for name, tensor in gather_buffer(buffer, job, spec, groups).items()
    }
    if not groups.is_writer:
        return
    check_finite(weights | moments)
    state = {
        "format": _FORMAT,
        "job": asdict(job.spec),
        "num_sequences": len(job.data.train),
        "data_fingerprint": job.data.fingerprint,
        "progress": job.progress(),
    }
    newest = directory / f"step_{job.step:08d}"
    with replace_directory(newest) as folder:
        _save(weights, folder / "adapter.safetensors")
        _save(moments, folder / "optimizer.safetensors")
        (folder / "state.json").write_text(json.dumps(state, indent=1))
    # Those beyond `newest` could not be read and are not ours to count, or it would be the oldest.
    written = [path for path in _steps(directory) if path.name <= newest.name]
    for old in sorted(written)[:-_KEEP]:
        shutil.rmtree(old)


def _save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    try:
        save_file({name: t.contiguous() for name, t in tensors.items()}, path)
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(f"{path.name} could not be written: {error}") from error


def _steps(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return [path for path in directory.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A readable checkpoint; tensors are read on demand."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.state["progress"]["step"])

    def check_fits(self, job: JobSpec, data: JobData, spec: Backbone) -> None:
        """Refuses a job whose adapter, data or data order is not the saved one.

        Raises:
            ValueError: naming the job and the value or tensor that differs.
        """
        saved = self.state["job"]
        was = asdict(LoraSpec()) | saved["lora"]  # older ones lack fields
        pairs = [(f"lora.{k}", was[k], getattr(job.lora, k)) for k in _LORA_FIXED]
        pairs += [(k, saved[k], getattr(job, k)) for k in ("batch_size", "seed", "max_seq_len")]
        saved_size, saved_data = self.state["num_sequences"], self.state["data_fingerprint"]
        pairs.append(("number of training sequences", saved_size, len(data.train)))
        pairs.append(("fingerprint of the training data", saved_data, data.fingerprint))
        for name, old, new in pairs:
            if (list(new) if isinstance(new, tuple) else new) != old:
                raise ValueError(
                    f"job {job.name!r}: {name} must be {old} as in its checkpoint {self.path}, "
                    f"got {new}; to start afresh give another run.output_dir and no "
                    f"resume_from"
                )
        self._check_tensors(job, spec)

    def _check_tensors(self, job: JobSpec, spec: Backbone) -> None:
        """Before training, when one job may still be left out."""
        for file, prefixes in _PREFIXES.items():
            with safe_open(self.path / file, "pt") as tensors:
                held = set(tensors.keys())
                for name in factor_names(spec, job.lora):
                    for key in (prefix + name for prefix in prefixes):
                        shape = tensors.get_slice(key).get_shape() if key in held else None
                        expected = list(factor_shape(spec, name, job.lora))
                        if shape != expected:
                            raise ValueError(
                                f"job {job.name!r}: {key} must have shape {expected} in its "
                                f"checkpoint {self.path}, got {shape or 'no such tensor'}; "
                                f"it was trained on another base model"
                            )
                        if not bool(tensors.get_tensor(key).isfinite().all()):
                            raise ValueError(
                                f"job {job.name!r}: {key} must be finite in its checkpoint "
                                f"{self.path}, got NaN or inf; take up an earlier one by "
                                f"resume_from"
                            )

    def restore(self, job: JobState) -> None:
        """Loads weights, moments and progress into a job on this rank, whatever its layout.

        `check_fits` comes before.
        """
        slab = job.adapter.slab
        with safe_open(self.path / "adapter.safetensors", "pt") as weights:
            slab.load(weights.get_tensor)
        with safe_open(self.path / "optimizer.safetensors", "pt") as moments:
            for buffer in _MOMENTS:
                slab.load(partial(_moment, moments, buffer), buffer)
        job.restore(self.state["progress"])


_LORA_FIXED = (
    "rank",
    "alpha",
    "dropout",
    "target_modules",
    "use_rslora",
    "parametrization",
    "num_blocks",
)
_PREFIXES = {
    "adapter.safetensors": ("",),
    "optimizer.safetensors": tuple(f"{buffer}." for buffer in _MOMENTS),
}


def _moment(file: Any, buffer: str, name: str) -> torch.Tensor:
    return file.get_tensor(f"{buffer}.{name}")


def _read_state(path: Path) -> dict[str, Any]:
    state = json.loads(path.read_text())
    if not isinstance(state, dict) or not state.keys() >= _STATE_KEYS:
        raise ValueError(f"{path.name} must hold the keys {sorted(_STATE_KEYS)}, got {state!r:.80}")
    if state["format"] != _FORMAT:
        raise ValueError(f"format must be {_FORMAT}, got {state['format']!r}")
    return state


def find_checkpoint(directory: Path) -> Checkpoint | None:
    """The newest readable checkpoint below `directory`, or `directory` itself if it is one.

    One that cannot be read (a disk fault; writing is atomic) is passed over with a warning.

    Returns:
        None if there is none at all.

    Raises:
        ValueError: if there are some and none can be read: starting afresh would lose the job.
    """
    candidates = sorted(_steps(directory), key=lambda p: p.name, reverse=True)
    if (directory / "state.json").is_file():
        candidates = [directory]
    for path in candidates:
        try:
            state = _read_state(path / "state.json")
            for file in _PREFIXES:
                with safe_open(path / file, "pt"):
                    pass
            return Checkpoint(path=path, state=state)
        except (OSError, ValueError, SafetensorError) as error:
            logger.warning("checkpoint %s cannot be read and is passed over: %s", path, error)
    if candidates:
        raise ValueError(
            f"{directory} must hold a checkpoint that can be read, got {len(candidates)} that "
            f"cannot; move them away to start afresh"
        )
    return None
