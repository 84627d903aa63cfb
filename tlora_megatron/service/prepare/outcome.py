"""The outcome of a submitted job's validation: plain values that travel as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tlora_megatron.channel import Message
from tlora_megatron.config.jobs import read_job
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
    tokens: Mapping[str, str]
    """Keys of its files in the cache of tokens: `train`, and `eval` if it has one."""
    digest: str
    """Digest of its training sequences, in order: what each rank must find."""
    num_steps: int
    from_step: int
    """Steps that the checkpoint it starts from has done."""
    sequences: int
    """For training."""
    epoch_tokens: int
    """Rows of one pass over its data."""
    train_tokens: int
    """Rows of all its steps, by the mean of its sequences."""
    longest: int
    """Rows of its longest sequence, evaluation included."""
    longest_eval: int
    """Rows of its longest sequence for evaluation; 0 = it has none."""
    target_share: float
    """Share of the rows that are learnt."""
    lengths: tuple[tuple[int, float], ...]
    """Pairs of rows and share of sequences, as in `LengthHistogram`."""
    num_truncated: int
    num_dropped: int
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
