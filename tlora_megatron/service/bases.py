"""Base models that a service offers by name, so that nobody names a path over the network."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tlora_megatron.config.reader import must, read_spec
from tlora_megatron.config.schema import BaseModelSpec
from tlora_megatron.config.sections import plain, read_base_model
from tlora_megatron.config.source import read_document
from tlora_megatron.files import read_json, write_json
from tlora_megatron.model.gpt_oss import MODEL_TYPE
from tlora_megatron.model.spec import read_model_spec
from tlora_megatron.service.home import JOB_NAME, Home

BASES_NAME = "bases.json"
"""In the service's folder: name -> section `base_model` with absolute paths."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,95}")


def read_bases(home: Home) -> dict[str, BaseModelSpec]:
    """The bases that a service offers; nothing looks whether their files are there."""
    found = read_json(home.root / BASES_NAME) or {}
    return {name: read_spec(BaseModelSpec, section, name) for name, section in found.items()}


def check_bases(words: Sequence[str]) -> None:
    """Reads bases as `declare_bases` does, and adds none.

    Raises:
        ConfigError: for the first mistake.
    """
    for word in words:
        _read_word(word)


def declare_bases(home: Home, words: Sequence[str]) -> None:
    """Adds bases to those that a service offers; a name that it has gets another base.

    Args:
        home: The service's folder.
        words: `NAME=DIR`, or `NAME=FILE` with the section `base_model` in YAML or JSON.

    Raises:
        ConfigError: for the first mistake; nothing was added.
    """
    added = dict(_read_word(word) for word in words)
    if added:
        known = read_json(home.root / BASES_NAME) or {}
        write_json(home.root / BASES_NAME, {**known, **added})


def _read_word(word: str) -> tuple[str, Mapping[str, Any]]:
    name, _, place = word.partition("=")
    if not place or not _NAME.fullmatch(name):
        rule = "be NAME=DIR or NAME=FILE.yaml, NAME of letters, digits and . _ / -"
        raise must("--base", rule, word)
    path = Path(place).expanduser()
    if path.is_file():
        document = read_document(path)
        base = read_base_model(document.get("base_model", document), path.resolve().parent)
    else:
        base = read_base_model({"path": place}, Path.cwd())
    _refuse_gpt_oss(word, base)
    section: dict[str, Any] = plain(asdict(base))
    return name, section


def _refuse_gpt_oss(word: str, base: BaseModelSpec) -> None:
    """Refuses a base over which a service trains and samples nothing."""
    try:
        kind = read_model_spec(base.config_file).model_type
    except ValueError:
        return  # its first job says what else is wrong with it
    if kind == MODEL_TYPE:
        rule = f"name a base of another model_type than {MODEL_TYPE}"
        raise must("--base", rule, word, "train its jobs with tlora train")


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
