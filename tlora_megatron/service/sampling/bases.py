"""The bases that a sampler knows by name: those that are declared, and those of jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tlora_megatron.config.jobs import plain
from tlora_megatron.files import read_json
from tlora_megatron.service.bases import read_bases
from tlora_megatron.service.home import JOB_NAME, Home

_OF_JOB = "job:"
"""No declared name has a colon."""


def base_of_job(home: Home, job_id: str) -> str:
    """The name of a job's base: the one that was declared, or that of the job itself."""
    own = _weights(_section_of_job(home, job_id))
    declared = ((name, plain(asdict(base))) for name, base in read_bases(home).items())
    found = (name for name, section in declared if _weights(section) == own)
    return next(found, _OF_JOB + job_id)


def base_section(home: Home, name: str) -> Mapping[str, Any]:
    """The section `base_model` of a base.

    Raises:
        KeyError: if nobody has declared it.
    """
    if name.startswith(_OF_JOB):
        return _section_of_job(home, name.removeprefix(_OF_JOB))
    section: dict[str, Any] = plain(asdict(read_bases(home)[name]))
    return section


def _weights(section: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that say which weights these are, in whatever dtype they are held."""
    return {key: value for key, value in section.items() if key not in ("dtype", "allow_change")}


def _section_of_job(home: Home, job_id: str) -> Mapping[str, Any]:
    found = read_json(home.job(job_id) / JOB_NAME)
    if found is None:
        raise KeyError(job_id)
    section: dict[str, Any] = found["base_model"]
    return section
