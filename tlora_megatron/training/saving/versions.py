"""Adapters that are sampled from: each version is a folder that never changes, a name leads to one.

    jobs/ID/sampler/.versions/00000123    what request 123 of the job's client has published
    jobs/ID/sampler/NAME                  a link to the version that was published last by this name

A sampler may read a folder again at any time, so what lies under a path must stay what it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tlora_megatron.training.formats.atomic_directory import Permit, replace_link

FOLDER = "sampler"
"""In a job's folder: names, and the versions that they lead to."""
_VERSIONS = ".versions"
_NUMBER = re.compile(r"\d{8,}")


class AdapterVersion(NamedTuple):
    """Weights of a job that were published once."""

    job: str
    number: int
    """Of the request that published them; whoever carries it out again gets the same bits."""

    def __str__(self) -> str:
        return f"{self.job}@{self.number}"

    def folder(self, jobs: Path) -> Path:
        """Its folder; `jobs` holds all jobs'."""
        return jobs / self.job / FOLDER / _VERSIONS / f"{self.number:08d}"

    @classmethod
    def parse(cls, text: str) -> AdapterVersion:
        """Reads what `str` gives."""
        job, _, number = text.rpartition("@")
        return cls(job, int(number))

    @classmethod
    def of(cls, folder: Path) -> AdapterVersion | None:
        """The version whose folder it is; None if it is another one's."""
        job = folder.parent.parent.parent
        if folder.parent.name != _VERSIONS or not _NUMBER.fullmatch(folder.name):
            return None
        return cls(job.name, int(folder.name))


def publish(name: Path, number: int, write: Callable[[Path], int], permit: Permit) -> int:
    """Writes a version unless it is there, and lets its name lead to it.

    A version that is there stays: it has the same bits, and somebody may be reading it. A name that
    leads to a later version stays, too: the request is then carried out a second time.

    Args:
        name: in the job's folder of samplers.
        write: writes the folder that it is given, as a whole; returns the number of bytes.
        permit: asked before the name changes.

    Returns:
        The number of bytes written.

    Raises:
        OSError: if the disk refuses, or `permit`.
    """
    folder = name.parent / _VERSIONS / f"{number:08d}"
    size_bytes = 0 if folder.is_dir() else write(folder)
    before = AdapterVersion.of(published_folder(name))
    if before is None or before.number < number:
        replace_link(name, f"{_VERSIONS}/{folder.name}", permit)
    return size_bytes


def published_folder(name: Path) -> Path:
    """The folder that a name leads to now; itself where it is a folder."""
    try:
        return name.parent / os.readlink(name)
    except OSError:
        return name


def versions_of(job_folder: Path) -> list[AdapterVersion]:
    """The versions of a job that are on the disk, oldest first."""
    folder = job_folder / FOLDER / _VERSIONS
    found = (AdapterVersion.of(folder / name) for name in _names(folder))
    return sorted(version for version in found if version is not None)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
