"""A job's checkpoints: whole tensors by canonical name, so that any layout can take them up.

`checkpoints/step_00000050/` holds `adapter.safetensors` (fp32 master weights),
`optimizer.safetensors` (Adam's moments) and `state.json` (progress, and the job as it was
configured). A directory appears whole or not at all; the two newest are kept.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tlora_megatron.job import JobSpec
from tlora_megatron.layers.sites import stage_sites
from tlora_megatron.layers.slab import AdapterSlab, factor_shape, slab_layout, whole_tensors
from tlora_megatron.model import ModelSpec
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.training.atomic_directory import replace_directory
from tlora_megatron.training.job_state import JobState

logger = logging.getLogger(__name__)

_KEEP = 2
_NAME = re.compile(r"step_(\d{8,})")
_MOMENTS = ("exp_avg", "exp_avg_sq")


def gather_buffer(
    buffer: str, job: JobState, spec: ModelSpec, groups: ParallelGroups
) -> dict[str, torch.Tensor]:
    """Whole canonical tensors of one slab buffer, fp32 on the CPU, on the writer; empty elsewhere.

    Collective over the model-parallel ranks of replica 0; every rank calls it.
    """
    if not groups.is_first_replica:
        return {}
    local = job.adapter.slab.buffers()[buffer]
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(groups.model_group))]
    dist.all_gather(parts, local, group=groups.model_group)
    if not groups.is_writer:
        return {}
    layout = groups.layout
    layouts = [
        slab_layout(stage_sites(spec, layout, tp_rank=tp_rank, pp_rank=pp_rank), job.spec.lora)
        for pp_rank in range(layout.pp_size)
        for tp_rank in range(layout.tp_size)
    ]
    return whole_tensors(layouts, parts, spec)


def save_checkpoint(
    directory: Path, job: JobState, spec: ModelSpec, groups: ParallelGroups
) -> None:
    """Writes `directory/step_N`; collective, the writer's rank writes.

    Raises:
        OSError: on the writer, if the disk refuses; the earlier checkpoints are untouched.
    """
    weights = gather_buffer("master", job, spec, groups)
    moments = {
        f"{buffer}.{name}": tensor
        for buffer in _MOMENTS
        for name, tensor in gather_buffer(buffer, job, spec, groups).items()
    }
    if not groups.is_writer:
        return
    state = {
        "format": 1,
        "job": asdict(job.spec),
        "num_sequences": len(job.data.train),
        "progress": job.progress(),
    }
    with replace_directory(directory / f"step_{job.step:08d}") as folder:
        _save(weights, folder / "adapter.safetensors")
        _save(moments, folder / "optimizer.safetensors")
        (folder / "state.json").write_text(json.dumps(state, indent=1))
    for old in sorted(_steps(directory), key=lambda p: p.name)[:-_KEEP]:
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

    def check_fits(self, job: JobSpec, num_sequences: int) -> None:
        """Refuses a job whose adapter or data order is not the saved one.

        Raises:
            ValueError: naming the job and the value that differs.
        """
        saved = self.state["job"]
        pairs = [(f"lora.{k}", saved["lora"][k], getattr(job.lora, k)) for k in _LORA_FIXED]
        pairs += [(k, saved[k], getattr(job, k)) for k in ("batch_size", "seed", "max_seq_len")]
        pairs.append(("number of training sequences", self.state["num_sequences"], num_sequences))
        for name, old, new in pairs:
            if (list(new) if isinstance(new, tuple) else new) != old:
                raise ValueError(
                    f"job {job.name!r}: {name} must be {old} as in its checkpoint {self.path}, "
                    f"got {new}; give another run.output_dir to start afresh"
                )

    def restore(self, job: JobState, spec: ModelSpec) -> None:
        """Loads weights, moments and progress into a job on this rank, whatever its layout.

        Raises:
            ValueError: if a tensor is missing or of another shape.
        """
        with (
            safe_open(self.path / "adapter.safetensors", "pt") as weights,
            safe_open(self.path / "optimizer.safetensors", "pt") as moments,
        ):
            slab = job.adapter.slab
            _load(slab, "master", weights, "", spec, self.path)
            for buffer in _MOMENTS:
                _load(slab, buffer, moments, f"{buffer}.", spec, self.path)
        job.restore(self.state["progress"])


_LORA_FIXED = ("rank", "alpha", "dropout", "target_modules", "use_rslora")


def _load(
    slab: AdapterSlab, buffer: str, file: Any, prefix: str, spec: ModelSpec, path: Path
) -> None:
    names = set(file.keys())

    def whole(name: str) -> torch.Tensor:
        key = prefix + name
        if key not in names:
            raise ValueError(f"checkpoint {path} must hold {key}, got {len(names)} other tensors")
        tensor = file.get_tensor(key)
        expected = factor_shape(spec, name, slab.layout.factors[0].shape[0])
        if tuple(tensor.shape) != expected:
            raise ValueError(
                f"{key} in {path} must have shape {expected}, got {tuple(tensor.shape)}"
            )
        return tensor

    slab.load(whole, buffer)


def find_checkpoint(directory: Path) -> Checkpoint | None:
    """The newest readable checkpoint below `directory`, or `directory` itself if it is one.

    One that cannot be read (a disk fault; writing is atomic) is passed over with a warning.
    """
    candidates = sorted(_steps(directory), key=lambda p: p.name, reverse=True)
    if (directory / "state.json").is_file():
        candidates = [directory]
    for path in candidates:
        try:
            state = json.loads((path / "state.json").read_text())
            for file in ("adapter.safetensors", "optimizer.safetensors"):
                with safe_open(path / file, "pt"):
                    pass
            return Checkpoint(path=path, state=state)
        except (OSError, ValueError, SafetensorError) as error:
            logger.warning("checkpoint %s cannot be read and is passed over: %s", path, error)
    return None
