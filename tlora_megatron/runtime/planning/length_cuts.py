"""Tells which sequences training would cut to a job's max_seq_len, before it does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tlora_megatron.config.job import JobSpec
from tlora_megatron.config.reader import must
from tlora_megatron.planner.workload import LengthHistogram

_NAMED = 4
"""Jobs that a sentence names; further ones are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthCut:
    """The cut of given lengths by the max_seq_len of some jobs."""

    jobs: tuple[str, ...]
    max_seq_len: int
    sequences: float
    """Share of sequences that are cut."""
    tokens: float
    """Share of tokens that are cut off."""
    longest: int
    """Tokens of the longest sequence."""

    def __str__(self) -> str:
        names = ", ".join(self.jobs[:_NAMED])
        names += f" and {len(self.jobs) - _NAMED} more" if len(self.jobs) > _NAMED else ""
        many = "s" if len(self.jobs) > 1 else ""
        return (
            f"--lengths: max_seq_len {self.max_seq_len} of job{many} {names} cuts "
            f"{self.sequences:.2%} of the sequences and loses {self.tokens:.2%} of all tokens, as "
            "training will; the plan is for what is left. Raise max_seq_len to "
            f"{self.longest}, or give the lengths after the cut"
        )


def find_cuts(jobs: Iterable[JobSpec], lengths: LengthHistogram) -> list[LengthCut]:
    """The cuts that given lengths need, one for each max_seq_len.

    Args:
        lengths: rows, one less than tokens.

    Raises:
        ConfigError: for a job whose `data.overlong` is error, as training does.
    """
    names: dict[int, list[str]] = {}
    for job in jobs:
        if lengths.longest < job.max_seq_len:
            continue
        if job.data.overlong == "error":
            raise must(
                "--lengths",
                f"be at most max_seq_len {job.max_seq_len} of job {job.name!r}, whose "
                "data.overlong is error",
                lengths.longest + 1,
                "raise max_seq_len, or set data.overlong: truncate to have the ends cut",
            )
        names.setdefault(job.max_seq_len, []).append(job.name)
    return [_cut(tuple(own), limit, lengths) for limit, own in sorted(names.items())]


def _cut(jobs: tuple[str, ...], limit: int, lengths: LengthHistogram) -> LengthCut:
    tokens: Sequence[tuple[int, float]] = [(rows + 1, share) for rows, share in lengths.pairs]
    lost = sum((length - limit) * share for length, share in tokens if length > limit)
    return LengthCut(
        jobs=jobs,
        max_seq_len=limit,
        sequences=sum(share for length, share in tokens if length > limit),
        tokens=lost / sum(length * share for length, share in tokens),
        longest=lengths.longest + 1,
    )
