"""Reads what a user submits, and the outcome of its validation, as plain values.

Cheap enough for the command line: no data is opened, and neither torch nor numpy is imported.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from tlora_megatron.channel import Message
from tlora_megatron.config.documents import read_document
from tlora_megatron.config.job import JobSpec
from tlora_megatron.config.load import SECTIONS
from tlora_megatron.config.reader import unknown
from tlora_megatron.config.sections import (
    as_job_list,
    ignored_base_settings,
    ignored_job_settings,
    job_to_dict,
    plain,
    read_base_model,
    read_job,
    read_jobs,
)
from tlora_megatron.planner.workload import JobLoad, LengthHistogram


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareRules(Message):
    """The demands of a service on jobs, and the place where it keeps their tokens."""

    root: str
    """The service's folder."""
    micro_batch_tokens: int = 4096
    """Rows of a micro-batch of its gangs: no sequence may be longer."""
    data_root: str | None = None
    """Jobs may name files below it only, and through no link; None = all that the service's own
    user may read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Validated(Message):
    """A job that can start, as it was accepted: nothing that changes its bits is open any more."""

    job: str
    """Its id."""
    document: Mapping[str, object]
    """An entry of `jobs` with all defaults, absolute paths and `portion_tokens`."""
    tokens: Mapping[str, str] = field(default_factory=dict)
    """Keys of its files in the cache of tokens: `train`, and `eval` if it has one."""
    digest: str
    """Digest of its training sequences, in order: what each rank must find."""
    num_steps: int = 0
    from_step: int
    """Steps that the checkpoint it starts from has done."""
    sequences: int = 0
    """For training."""
    epoch_tokens: int = 0
    """Rows of one pass over its data."""
    train_tokens: int = 0
    """Rows of all its steps, by the mean of its sequences."""
    longest: int
    """Rows of its longest sequence, evaluation included."""
    longest_eval: int = 0
    """Rows of its longest sequence for evaluation; 0 = it has none."""
    target_share: float = 1.0
    """Share of the rows that are learnt."""
    lengths: tuple[tuple[int, float], ...]
    """Pairs of rows and share of sequences, as in `LengthHistogram`."""
    num_truncated: int = 0
    num_dropped: int = 0
    notes: tuple[str, ...] = ()
    """Warnings, for the job's log."""

    def __post_init__(self) -> None:
        pairs = tuple((int(rows), float(share)) for rows, share in self.lengths)
        object.__setattr__(self, "lengths", pairs)
        object.__setattr__(self, "notes", tuple(self.notes))

    def load(self) -> JobLoad:
        """The job as planner and scheduler see it."""
        job = read_job(dict(self.document), None)
        lengths = LengthHistogram(self.lengths)
        return JobLoad.from_spec(job, lengths, self.target_share, self.longest_eval)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused(Message):
    """A job that cannot start."""

    job: str
    """Its id."""
    error: str
    """The sentence that `tlora train` says."""


Outcome = Validated | Refused


ASKED = "asked"
"""Key of a row's document that holds what the API by which a job came wants to remember."""
ORDER = "order"
"""Key that holds what validation made of it."""
_IGNORED = {
    "parallel": "section parallel has no effect: the service chooses how GPUs share a model",
    "run": "section run has no effect: the service runs the jobs; one job's own keys are in `jobs`",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission(Message):
    """One job as a user submits it, checked as far as its document alone goes."""

    name: str
    """The user's name for it."""
    base_model: Mapping[str, Any]
    """The section `base_model`, with all defaults and absolute paths."""
    document: Mapping[str, Any]
    """An entry of `jobs`, with all defaults and absolute paths."""
    tenant: str | None = None
    """Set where somebody sent it over the network: its files then lie in the service's folder, and
    its base is one that the service offers."""

    def row(self) -> dict[str, Any]:
        """Returns the part of it that a store's row keeps."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}  # no copies
        return {name: value for name, value in found.items() if value is not None}

    def job_spec(self) -> JobSpec:
        """The job of a document; its `service` says what it asks of the cluster."""
        return read_job(dict(self.document), None, path=f"jobs.{self.name}")

    @property
    def base_key(self) -> str:
        """Names the base; only jobs of equal keys may train in one gang."""
        return base_key(self.base_model)


def base_key(base_model: Mapping[str, Any]) -> str:
    """Names a base by its section; equal for equal ones."""
    text = json.dumps(base_model, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    path = base_model.get("path") or Path(str(base_model.get("config"))).parent
    return f"{Path(path).name}-{digest}"


class Submitted(NamedTuple):
    """The jobs of one file."""

    submissions: tuple[Submission, ...]
    notes: tuple[str, ...]
    """A sentence for each setting that has no effect."""


def read_submissions(path: str | Path, overrides: Sequence[str] = ()) -> Submitted:
    """Reads the jobs of a YAML or JSON file of a run, or of one with a single job's keys.

    Args:
        overrides: texts `path=value`, applied in order before any check.

    Raises:
        ConfigError: for the first mistake.
    """
    path = Path(path)
    return split_submissions(read_document(path, overrides=overrides), path.resolve().parent)


def split_submissions(document: Mapping[str, Any], folder: Path) -> Submitted:
    """Reads the jobs of a document, with relative paths from a folder, or a `ConfigError`."""
    document = as_job_list(document)
    for key in document:
        if key not in SECTIONS:
            raise unknown("", key, SECTIONS)
    base = read_base_model(document.get("base_model"), folder)
    jobs, _ = read_jobs(document, folder)
    notes = [sentence for key, sentence in _IGNORED.items() if key in document]
    notes += ignored_base_settings(base)
    notes += [sentence for job in jobs for sentence in ignored_job_settings(job)]
    base_model = plain(base)
    submissions = tuple(
        Submission(name=job.name, base_model=base_model, document=job_to_dict(job)) for job in jobs
    )
    return Submitted(submissions, tuple(notes))
