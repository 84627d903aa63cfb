"""Reads the files of a submit for a service that cannot see this host's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tlora_megatron.cli.service.reach.in_folder import refuse_duplicates
from tlora_megatron.config.jobs import as_job_list, read_job
from tlora_megatron.config.load import SECTIONS
from tlora_megatron.config.reader import ConfigError, must, unknown
from tlora_megatron.config.source import apply_override, merge, read_document

_FILE_ID = re.compile(r"file-[0-9a-f]{24}")
_DATA = ("train", "eval")
Upload = Callable[[Path], str]
"""Sends a file and returns its id."""


def read_files(files: Sequence[str], overrides: Sequence[str], upload: Upload) -> dict[str, Any]:
    """One document with the jobs of all files, naming uploaded data.

    Args:
        files: Run configurations or single jobs.
        overrides: Texts `path=value` for each of them.
        upload: Called once for each data file of this host, when all jobs are checked.

    Raises:
        ConfigError: for the first mistake, or if the files are of several bases.
    """
    documents = [_read(path, overrides) for path in files]
    bases = [document.get("base_model") for document in documents]
    if any(base != bases[0] for base in bases):
        rule = "be of one base: all their jobs are submitted, or none"
        raise must("FILE...", rule, bases, "submit them one by one")
    entries = [entry for document in documents for entry in document["jobs"]]
    refuse_duplicates([str(entry.get("name")) for entry in entries])
    ids: dict[Path, str] = {}
    jobs = [_with_ids(entry, ids, upload) for entry in entries]
    found = {key: documents[0][key] for key in documents[0] if key not in ("jobs", "defaults")}
    return {**found, "jobs": jobs}


def _read(path: str, overrides: Sequence[str]) -> dict[str, Any]:
    """A file with defaults merged into its jobs, and absolute paths of what is on this host."""
    try:
        document = read_document(Path(path))
        for override in overrides:
            apply_override(document, override)
        document = as_job_list(document)
        for key in document:
            if key not in SECTIONS:
                raise unknown("", key, SECTIONS)
        entries = document.get("jobs")
        if not isinstance(entries, list) or not entries:
            raise must("jobs", "be a list of at least one job", entries)
        defaults = document.get("defaults") or {}
        folder = Path(path).resolve().parent
        jobs = [
            _entry(entry, defaults, folder, f"jobs[{index}]") for index, entry in enumerate(entries)
        ]
    except ConfigError as error:
        raise ConfigError(str(error) if path in str(error) else f"{path}: {error}") from error
    return {**document, "jobs": jobs}


def _entry(entry: Any, defaults: Any, folder: Path, place: str) -> dict[str, Any]:
    # Checked here, too: a mistake is told before gigabytes of data are sent.
    read_job(entry, None, path=place, defaults=defaults)
    merged = merge(defaults, entry)
    data = merged.get("data") or {}
    for key in _DATA:
        named = data.get(key)
        if isinstance(named, str) and not _FILE_ID.fullmatch(named):
            path = folder / Path(named).expanduser()
            if path.is_file():
                data[key] = path.resolve()
    return merged


def _with_ids(entry: Mapping[str, Any], ids: dict[Path, str], upload: Upload) -> dict[str, Any]:
    """The entry with ids in the place of paths of this host."""
    found = dict(entry)
    if isinstance(found.get("data"), dict):
        found["data"] = dict(found["data"])
        for key, value in found["data"].items():
            if isinstance(value, Path):
                ids[value] = ids.get(value) or upload(value)
                found["data"][key] = ids[value]
    return found
