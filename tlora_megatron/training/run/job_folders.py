"""Checks before training that a job's results can be written where they belong."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tlora_megatron.training.formats.peft import check_adapter_directory
from tlora_megatron.training.metrics import METRICS_FILE


def check_job_folders(output_dir: Path, name: str) -> None:
    """Refuses a job whose checkpoints, adapter or metrics could not be written.

    Raises:
        ValueError: naming the job and the folder.
    """
    job = output_dir / "jobs" / name
    folders = (output_dir / "jobs", job, job / "checkpoints", job / "adapter")
    for folder in folders:
        _require_own_folder(name, folder)
    _require_folder(name, job / "tensorboard")
    if (job / METRICS_FILE).is_dir():
        raise ValueError(f"job {name!r}: {job / METRICS_FILE} must be a file, got a folder")
    try:
        check_adapter_directory(job / "adapter")
    except ValueError as error:
        raise ValueError(f"job {name!r}: {error}; move it away") from error
    for folder in folders:
        if folder.is_dir():
            _require_writable(name, folder)


def _require_own_folder(name: str, folder: Path) -> None:
    """A link could lead out of the output folder, where nothing may be replaced or removed."""
    if folder.is_symlink():
        raise ValueError(
            f"job {name!r}: {folder} must be a folder of its own, got a symbolic link to "
            f"{folder.readlink()}; remove the link, or let run.output_dir lead there"
        )
    _require_folder(name, folder)


def _require_folder(name: str, folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"job {name!r}: {folder} must be a folder, got a file; move it away")


def _require_writable(name: str, folder: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"job {name!r}: {folder} must be writable, got: {error}") from error
