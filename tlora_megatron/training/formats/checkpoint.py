"""A job's checkpoints: whole tensors by canonical name, so that any layout can take them up.

`checkpoints/step_00000050/` holds `adapter.safetensors` (fp32 master weights),
`optimizer.safetensors` (Adam's moments) and `state.json` (progress, the job as it was configured,
and a fingerprint of its data). A directory appears whole or not at all; the two newest are kept.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tlora_megatron.config.job import JobSpec, LoraSpec
from tlora_megatron.layers.slab import AdapterSlab, Copier, factor_names, factor_shape
from tlora_megatron.model.backbone import Backbone
from tlora_megatron.training.data.job_data import JobData
from tlora_megatron.training.formats.atomic_directory import (
    NotPermitted,
    Permit,
    always,
    remove_directory,
    remove_leftovers,
    replace_directory,
)
from tlora_megatron.training.formats.hf_checkpoint import all_finite
from tlora_megatron.training.formats.quantised import QuantisationCard
from tlora_megatron.training.formats.safetensors_file import PendingTensor, write_tensors
from tlora_megatron.training.job_state import JobState

logger = logging.getLogger(__name__)

_KEEP = 2
_FORMAT = 1
_STATE_KEYS = {"format", "job", "num_sequences", "data_fingerprint", "progress"}
_JOB_KEYS = {"lora", "optimizer", "schedule", "batch_size", "seed", "max_seq_len"}
_NAME = re.compile(r"step_(\d{8,})")
_MOMENTS = ("exp_avg", "exp_avg_sq")
_FILES = ("adapter.safetensors", "optimizer.safetensors", "state.json")
"""Last the one without which nobody reads the folder."""
_PREFIXES = {
    "adapter.safetensors": ("",),
    "optimizer.safetensors": tuple(f"{buffer}." for buffer in _MOMENTS),
}


def checkpoint_state(job: JobState, quantisation: QuantisationCard | None = None) -> str:
    """Returns the text of `state.json` for a job as it is now."""
    state = {
        "format": _FORMAT,
        "job": asdict(job.spec),
        "num_sequences": len(job.data.train),
        "data_fingerprint": job.data.fingerprint,
        "progress": job.progress(),
        "quantisation": None if quantisation is None else asdict(quantisation),
    }
    return json.dumps(state, indent=1)


def step_folder(directory: Path, step: int) -> Path:
    return directory / f"step_{step:08d}"


def write_checkpoint(
    folder: Path,
    state: str,
    weights: Sequence[PendingTensor],
    moments: Sequence[PendingTensor],
    permit: Permit = always,
) -> int:
    """Writes a checkpoint, in the place of one there, and returns the number of bytes.

    Args:
        moments: Adam's, with the moment and a dot before each name.

    Raises:
        ValueError: if a tensor is not finite; the job could not go on from it. Either way what was
            there is untouched.
    """
    with replace_directory(folder, _FILES, permit) as incoming:
        num_bytes = write_tensors(incoming / _FILES[0], weights)
        num_bytes += write_tensors(incoming / _FILES[1], moments)
        (incoming / _FILES[2]).write_text(state)
    if _NAME.fullmatch(folder.name):
        remove_leftovers(folder.parent, "step_*", _FILES)
    return num_bytes + len(state)


def remove_old_checkpoints(directory: Path, step: int, permit: Permit = always) -> None:
    """Removes all but the two newest checkpoints up to a step; a disk that refuses is logged."""
    # Those beyond the step could not be read and are not ours to count, or it would be the oldest.
    newest = step_folder(directory, step).name
    try:
        permit()
        written = [path for path in _steps(directory) if path.name <= newest]
        for old in sorted(written)[:-_KEEP]:
            remove_directory(old, _FILES)
    except NotPermitted:
        pass
    except OSError as error:
        logger.warning("old checkpoints in %s could not be removed: %s", directory, error)


def _steps(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    named = (path for path in directory.iterdir() if _NAME.fullmatch(path.name))
    return [path for path in named if any((path / name).is_file() for name in _FILES)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A readable checkpoint; tensors are read on demand."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["progress"]["step"])

    def check_fits(
        self, job: JobSpec, data: JobData, spec: Backbone, *, values: bool = True
    ) -> None:
        """Refuses a job whose adapter, data or data order is not the saved one.

        Args:
            values: read all tensors, and refuse NaN and infinity.
        """
        saved = self.state["job"]
        was = asdict(LoraSpec()) | saved["lora"]  # older ones lack fields
        pairs = [(f"lora.{k}", was[k], value) for k, value in asdict(job.lora).items()]
        if not job.driven:  # its client sends the batches
            pairs += [(k, saved[k], getattr(job, k)) for k in ("batch_size", "seed", "max_seq_len")]
        saved_size, saved_data = self.state["num_sequences"], self.state["data_fingerprint"]
        pairs.append(("number of training sequences", saved_size, len(data.train)))
        pairs.append(("fingerprint of the training data", saved_data, data.fingerprint))
        for name, old, new in pairs:
            new = list(new) if isinstance(new, tuple) else new
            if new != old:
                raise ValueError(
                    f"job {job.name!r}: {name} must be {old} as in its checkpoint {self.path}, "
                    f"got {new}; to start afresh give another run.output_dir and no "
                    f"resume_from"
                )
        self._check_tensors(job, spec, values)

    def _check_tensors(self, job: JobSpec, spec: Backbone, values: bool) -> None:
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
                        if values and not all_finite(tensors.get_tensor(key)):
                            raise ValueError(
                                f"job {job.name!r}: {key} must be finite in its checkpoint "
                                f"{self.path}, got NaN or inf; take up an earlier one by "
                                f"resume_from"
                            )

    def restore(self, job: JobState, copier: Copier | None = None) -> None:
        """Loads weights, moments and progress into a job on this rank, whatever its layout."""
        slab = job.adapter.slab
        with safe_open(self.path / "adapter.safetensors", "pt") as weights:
            slab.load(weights.get_tensor, copier=copier)
        with safe_open(self.path / "optimizer.safetensors", "pt") as moments:
            for buffer in _MOMENTS:
                slab.load(partial(_moment, moments, buffer), buffer, copier)
        job.restore(self.state["progress"])

    def read(self, slab: AdapterSlab, threads: int, *, moments: bool = True) -> dict[str, Tensor]:
        """Returns what an adapter's buffers on this rank are to hold, on the host.

        Args:
            moments: Adam's, too; else they are zero.
        """
        with safe_open(self.path / "adapter.safetensors", "pt") as weights:
            found = {"master": slab.read(weights.get_tensor, threads)}
        if not moments:
            return found | {buffer: torch.zeros(slab.layout.numel) for buffer in _MOMENTS}
        with safe_open(self.path / "optimizer.safetensors", "pt") as file:
            own = {b: slab.read(partial(_moment, file, b), threads) for b in _MOMENTS}
        return found | own


def _moment(file: Any, buffer: str, name: str) -> Tensor:
    return file.get_tensor(f"{buffer}.{name}")


def _read_state(path: Path) -> dict[str, Any]:
    state = json.loads(path.read_text())
    if not isinstance(state, dict) or not state.keys() >= _STATE_KEYS:
        raise ValueError(f"{path.name} must hold the keys {sorted(_STATE_KEYS)}, got {state!r:.80}")
    if state["format"] != _FORMAT:
        raise ValueError(f"format must be {_FORMAT}, got {state['format']!r}")
    for section, keys in (("job", _JOB_KEYS), ("progress", set(JobState.SAVED))):
        if not isinstance(state[section], dict) or not state[section].keys() >= keys:
            raise ValueError(
                f"{section} in {path.name} must hold the keys {sorted(keys)}, got "
                f"{state[section]!r:.80}"
            )
    for key in JobState.COUNTS:
        count = state["progress"][key]
        if type(count) is not int or count < 0:
            raise ValueError(f"progress.{key} in {path.name} must be a count, got {count!r:.80}")
    return state


def find_checkpoint(directory: Path) -> Checkpoint | None:
    """The newest readable checkpoint below `directory`, or `directory` itself if it is one.

    One that cannot be read (a disk fault; writing is atomic) is passed over with a warning.

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
