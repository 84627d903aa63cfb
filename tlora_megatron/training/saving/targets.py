"""The files that a job's snapshot is written to: a checkpoint, or an adapter for PEFT."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tlora_megatron.training.formats.atomic_directory import Permit, always
from tlora_megatron.training.formats.checkpoint import (
    checkpoint_state,
    remove_old_checkpoints,
    write_checkpoint,
    write_state,
)
from tlora_megatron.training.formats.peft.format import write_adapter
from tlora_megatron.training.formats.quantised.card import QuantisationCard
from tlora_megatron.training.formats.safetensors_file import PendingTensor
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.saving.snapshot import BUFFERS, Snapshot


class Target(NamedTuple):
    """Something to be written of a snapshot."""

    buffers: tuple[str, ...]
    """The buffers that it needs."""
    write: Callable[[Snapshot], int]
    """Writes it and returns the number of bytes; runs on the writer's thread."""
    on_error: Callable[[Exception], None]
    """Called on the thread that trains if the disk refused or a value was not finite."""
    on_done: Callable[[], None] = always
    """Called there once it is on the disk."""
    clean_up: Callable[[], None] = always
    """Removes what it replaces, on the writer's thread behind all that; must not raise."""


def checkpoint_target(
    directory: Path,
    job: JobState,
    on_error: Callable[[Exception], None],
    quantisation: QuantisationCard | None = None,
    permit: Permit = always,
) -> Target:
    """Returns the checkpoint of a job as it is now, in `directory/step_N`."""
    state = checkpoint_state(job, quantisation)
    write = partial(_write_checkpoint, directory, job.step, state, permit)
    clean_up = partial(remove_old_checkpoints, directory, job.step, permit)
    return Target(BUFFERS, write, on_error, clean_up=clean_up)


def state_target(
    directory: Path,
    job: JobState,
    on_error: Callable[[Exception], None],
    quantisation: QuantisationCard | None = None,
    permit: Permit = always,
) -> Target:
    """Returns the checkpoint of a job as it is now, as `directory` itself."""
    write = partial(_write_state, directory, checkpoint_state(job, quantisation), permit)
    return Target(BUFFERS, write, on_error)


def adapter_target(
    directory: Path,
    base_model: str,
    on_error: Callable[[Exception], None],
    quantisation: QuantisationCard | None = None,
    permit: Permit = always,
) -> Target:
    """Returns the adapter of a job as a PEFT directory."""
    write = partial(_write_adapter, directory, base_model, quantisation, permit)
    return Target(BUFFERS[:1], write, on_error)


def _write_checkpoint(
    directory: Path, step: int, state: str, permit: Permit, snapshot: Snapshot
) -> int:
    return write_checkpoint(directory, step, state, *_tensors(snapshot), permit)


def _write_state(directory: Path, state: str, permit: Permit, snapshot: Snapshot) -> int:
    return write_state(directory, state, *_tensors(snapshot), permit)


def _tensors(snapshot: Snapshot) -> tuple[list[PendingTensor], list[PendingTensor]]:
    """Weights and moments."""
    master, *moments = BUFFERS
    of_moments = [t for name in moments for t in snapshot.tensors(name, prefix=f"{name}.")]
    return snapshot.tensors(master), of_moments


def _write_adapter(
    directory: Path,
    base_model: str,
    quantisation: QuantisationCard | None,
    permit: Permit,
    snapshot: Snapshot,
) -> int:
    return write_adapter(
        directory,
        lora=snapshot.lora,
        factors=snapshot.tensors(BUFFERS[0]),
        model=snapshot.spec,
        base_model=base_model,
        quantisation=quantisation,
        permit=permit,
    )
