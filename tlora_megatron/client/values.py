"""The answers of a service as values, and its errors; times are Unix seconds."""

from __future__ import annotations

import os
import shutil
import stat
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from tlora_megatron.config.job_rows import JobState, ShownJob


class ServiceError(RuntimeError):
    """The service refused a request; the message is its sentence."""

    def __init__(
        self, status: int, message: str, param: str | None = None, wait_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.wait_s = wait_s
        """How long the service asks to wait before the next attempt."""
        self.status = status
        """Status code of HTTP."""
        self.param = param
        """The field or parameter that is wrong, if it is one."""


class Unreachable(RuntimeError):
    """The service did not answer, however often it was asked."""


class Job(ShownJob):
    """One job, as it was when it was asked for."""

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> Self:
        """The job of an answer; keys that a newer service sends are passed over."""
        known = {item.name: row[item.name] for item in fields(cls) if item.name in row}
        return cls(**known | {"state": JobState(row["state"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    jobs: tuple[Job, ...]
    is_new: bool
    """False: the same key came before, and these are its jobs."""
    warnings: tuple[str, ...]
    """A sentence for each setting that has no effect."""
    served: bool
    """A controller runs; else the jobs wait for one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    jobs: tuple[Job, ...]
    next: str | None
    """`after` of the next page; None behind the last one."""
    counts: Mapping[str, int]
    """Number of jobs in each state that has any."""
    served: bool


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to a job: an event, a step or an evaluation."""

    id: str
    """From here on a reader goes on."""
    row: Mapping[str, Any]
    """The event in the form of a line of `tlora logs --json`."""


_MOST_FILES = 64
_MOST_BYTES = 64 * 2**30
_BLOCK = 2**20


def check_target(out: Path) -> None:
    """Refuses a folder that exists, or whose parent does not; raises `ValueError` naming it."""
    if out.exists() or out.is_symlink():
        raise ValueError(f"the folder for an adapter must not exist yet, got {out}")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"the folder for an adapter must lie in one that exists, got {out}")


def unpack(archive: Path, out: Path) -> None:
    """Unpacks an archive; the folder appears when all its files are there.

    Raises:
        ValueError: if it holds anything but a few plain files without folders.
    """
    check_target(out)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        with zipfile.ZipFile(archive) as opened:
            entries = opened.infolist()
            _check(entries)
            for entry in entries:
                _unpack_one(opened, entry, partial / entry.filename)
        os.rename(partial, out)
    except zipfile.BadZipFile as error:
        raise ValueError(f"an adapter must come as a zip archive, got {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check(entries: list[zipfile.ZipInfo]) -> None:
    names = [entry.filename for entry in entries]
    if not entries or len(entries) > _MOST_FILES or len(set(names)) < len(names):
        raise ValueError(
            f"an adapter must be 1 to {_MOST_FILES} files of unlike names, got {len(names)}"
        )
    if sum(entry.file_size for entry in entries) > _MOST_BYTES:
        raise ValueError(f"an adapter must have at most {_MOST_BYTES:,} bytes, got more")
    for entry in entries:
        name, kind = entry.filename, stat.S_IFMT(entry.external_attr >> 16)
        is_plain = name == Path(name).name and "\\" not in name and not name.startswith(".")
        if not is_plain or kind not in (0, stat.S_IFREG):
            raise ValueError(f"an adapter must consist of plain files, got {name!r:.80}")


def _unpack_one(opened: zipfile.ZipFile, entry: zipfile.ZipInfo, target: Path) -> None:
    left = entry.file_size
    with opened.open(entry) as reader, target.open("xb") as writer:
        while block := reader.read(_BLOCK):
            left -= len(block)
            if left < 0:
                raise ValueError(f"{entry.filename} must have the size it is said to, got more")
            writer.write(block)
