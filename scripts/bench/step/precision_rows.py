"""Rows of steps on bases of two precisions, and the targets that FP8 is held to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

TOKENS_PER_S = {"NVIDIA H200": (23_500.0, 26_000.0)}
"""Must and goal of `batch 1-8` together on one GPU, by GPU."""
HEADLINE = "batch 1-8"
OVER_FLOOR, OVER_PEFT, OVER_BF16, OF_MEMORY = (1.18, 1.10), (1.75, 2.0), (1.25, 1.4), (1.0, 0.75)
"""Must and goal: step over the FP8 floor, rates over PEFT's and over bf16, and
peak of memory over that of bf16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionRow:
    """One measurement; the fields are the CSV's columns."""

    gpu: str
    """Its name; with several also their number and layout: `2 x NVIDIA H200, TP2 SP`."""
    commit: str
    model: str
    jobs: str
    """Number and mix of the jobs: `8 (batch 1-8)`, `1 (8 x 1024)`."""
    mode: str
    """`floor`, `adapters`, `together`, or the stack of a single job (`peft.Stack`)."""
    precision: str
    step_ms: float
    """Mean time of a round, or of a job's optimizer step."""
    floor_ms: float | str
    """Mean time of the same micro-batches without adapters, on the same base."""
    tokens: int
    """Mean tokens of a step, without padding."""
    tokens_per_s: float
    peak_bytes: int
    """Most that the first process's tensors took, without those of the modes beside it."""


def show(row: PrecisionRow) -> str:
    """A row for reading."""
    over = f"  {row.step_ms / row.floor_ms:.3f} of the floor" if row.floor_ms else ""
    return (
        f"{row.precision:5} {row.mode:9} {row.jobs:22} step {row.step_ms:8.1f} ms  "
        f"{row.tokens:6} tokens  {row.tokens_per_s:9.0f} tokens/s  "
        f"peak {row.peak_bytes / 2**30:6.1f} GiB{over}"
    )


def verdicts(rows: Sequence[PrecisionRow]) -> Iterator[str]:
    """Every target that there are rows for, with what was measured."""
    rounds = {(row.jobs, row.precision): row for row in rows if row.mode == "together"}
    peft = max((r.tokens_per_s for r in rows if r.mode == "hf_peft"), default=None)
    for (jobs, precision), row in rounds.items():
        if precision != "fp8":
            continue
        if row.floor_ms:
            yield _at_most(f"{jobs}: step over FP8 floor", row.step_ms / row.floor_ms, OVER_FLOOR)
        if HEADLINE in jobs and row.gpu in TOKENS_PER_S:
            yield _at_least(f"{jobs}: tokens/s", row.tokens_per_s, TOKENS_PER_S[row.gpu])
        if HEADLINE in jobs and peft is not None:
            yield _at_least(f"{jobs}: over HF PEFT", row.tokens_per_s / peft, OVER_PEFT)
        if beside := rounds.get((jobs, "bf16")):
            rate = row.tokens_per_s / beside.tokens_per_s
            yield _at_least(f"{jobs}: rate over bf16", rate, OVER_BF16)
            if beside.peak_bytes:
                share = row.peak_bytes / beside.peak_bytes
                yield _at_most(f"{jobs}: peak memory over bf16", share, OF_MEMORY)


def _at_most(what: str, value: float, targets: tuple[float, float]) -> str:
    return _verdict(what, value, "<=", targets, tuple(value <= target for target in targets))


def _at_least(what: str, value: float, targets: tuple[float, float]) -> str:
    return _verdict(what, value, ">=", targets, tuple(value >= target for target in targets))


def _verdict(
    what: str, value: float, sign: str, targets: tuple[float, float], reached: Sequence[bool]
) -> str:
    word = "goal" if reached[1] else "must" if reached[0] else "MISSED"
    must, goal = map(_number, targets)
    return f"{word:6} {what} {_number(value)} (must {sign} {must}, goal {sign} {goal})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3f}"
