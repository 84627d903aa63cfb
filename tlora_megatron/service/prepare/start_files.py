"""Takes in what a job starts from, so that no gang reads a path that a tenant has named."""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

from tlora_megatron.config.job import JobSpec
from tlora_megatron.service.below import UserFiles
from tlora_megatron.service.home import make_folder

_ENDINGS = (".json", ".safetensors")
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DEPTH = 2
"""Folders below `jobs/NAME`: checkpoints, and its steps."""


def take_start_files(job: JobSpec, files: UserFiles, job_folder: Path) -> JobSpec:
    """Copies adapter and checkpoint that a job starts from; returns the job with its own copies.

    Args:
        files: what the job may name.
        job_folder: of the job, below the service's.

    Raises:
        ValueError: naming the field, if it leads where it must not.
        OSError: if the disk refuses.
    """
    for name in ("init_from", "resume_from"):
        path = getattr(job, name)
        if path is None:
            continue
        what, target = f"{name} of job {job.name!r}", job_folder / "start" / name
        shutil.rmtree(target, ignore_errors=True)
        with files.open_folder(path, what) as folder:
            _copy(folder, target, what, _DEPTH)
        copied: dict[str, Any] = {name: str(target)}
        job = replace(job, **copied)
    return job


def _copy(folder: int, target: Path, what: str, depth: int) -> None:
    make_folder(target)
    for name in sorted(os.listdir(folder)):
        kind = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        if stat.S_ISDIR(kind) and depth and not name.startswith("."):
            inner = os.open(name, _FOLDER, dir_fd=folder)
            try:
                _copy(inner, target / name, what, depth - 1)
            finally:
                os.close(inner)
        elif name.endswith(_ENDINGS):
            if not stat.S_ISREG(kind):
                raise ValueError(f"{what} must hold files and no links, got {name!r}")
            with (
                open(os.open(name, _FILE, dir_fd=folder), "rb") as source,
                open(target / name, "xb", opener=_private) as copy,
            ):
                shutil.copyfileobj(source, copy, 1 << 20)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
