"""Rows of timed steps, and the targets that they are held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scripts.bench.step.jobs import MIXES

STEP_OVER_FLOOR, OVER_SEQUENTIAL, OVER_PEFT, OVER_PEFT_SMALL = 1.12, 1.5, 1.55, 4.0
TOKENS_PER_S = {"H200": 15_000}
"""Least rate of `batch 1-8` together, by GPU."""
SMALL_PEFT = "1 (1 x "
"""How the jobs of PEFT's smallest batch begin."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measurement; the fields are the CSV's columns."""

    gpu: str
    versions: str
    commit: str
    model: str
    tp: int
    sequence_parallel: bool
    recompute: str
    dropout: float
    jobs: str
    """Number and mix of the jobs: `8 (batch 1-8)`, `1 (8 x 1024)`."""
    mode: str
    step_ms: float
    """Mean time of a round, or of a job's optimizer step."""
    p20_ms: float | str
    p50_ms: float | str
    p80_ms: float | str
    tokens: int
    """Mean tokens of a step, without padding."""
    tokens_per_s: float
    ratio_to_floor: float | str
    """Step over the floor's on the same micro-batches."""
    peak_bytes: int
    """Most that the first process's tensors took."""
    mfu: float
    tflops_per_gpu: float


def show(row: Row) -> str:
    """A row for reading."""
    over = f"  {row.ratio_to_floor:.3f} of the floor" if row.ratio_to_floor != "" else ""
    return (
        f"{row.mode:10} {row.jobs:20} step {row.step_ms:8.1f} ms  {row.tokens:6} tokens  "
        f"{row.tokens_per_s:9.0f} tokens/s  peak {row.peak_bytes / 2**30:6.1f} GiB  "
        f"mfu {row.mfu:.3f}{over}"
    )


Verdict = tuple[str, float, bool]
"""A target in words, the value measured, and whether it is reached."""


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Every target that there are rows for; none without a row of `batch 1-8` together."""
    mixed, small = (
        {row.mode: row for row in rows if row.jobs.endswith(f"({name})")} for name in MIXES
    )
    if "together" not in mixed:
        return []
    ours = mixed["together"]
    peft = [row for row in rows if row.mode == "hf_peft"]
    return [
        *_over_floor("batch 1-8", mixed),
        *_over_floor("batch 1-4", small),
        *(
            _at_least(f"aggregate >= {least} tokens/s", ours.tokens_per_s, least)
            for gpu, least in TOKENS_PER_S.items()
            if gpu in ours.gpu
        ),
        *_over_sequential(mixed, small),
        *_over_peft(ours, peft),
    ]


def _at_least(sentence: str, value: float, least: float) -> Verdict:
    return sentence, value, value >= least


def _over_floor(name: str, mix: Mapping[str, Row]) -> list[Verdict]:
    if "together" not in mix or "floor" not in mix:
        return []
    value = mix["together"].step_ms / mix["floor"].step_ms
    sentence = f"{name}: step over floor <= {STEP_OVER_FLOOR}"
    return [(sentence, value, value <= STEP_OVER_FLOOR)]


def _over_sequential(mixed: Mapping[str, Row], small: Mapping[str, Row]) -> list[Verdict]:
    found = []
    if "sequential" in small and "together" in small:
        value = small["together"].tokens_per_s / small["sequential"].tokens_per_s
        sentence = f"batch 1-4: over sequential >= {OVER_SEQUENTIAL}"
        found.append(_at_least(sentence, value, OVER_SEQUENTIAL))
    if "sequential" in mixed:
        value = mixed["together"].tokens_per_s / mixed["sequential"].tokens_per_s
        found.append(("batch 1-8: over sequential > 1", value, value > 1))
    return found


def _over_peft(ours: Row, peft: Sequence[Row]) -> list[Verdict]:
    found = []
    for row in peft:
        least = OVER_PEFT_SMALL if row.jobs.startswith(SMALL_PEFT) else OVER_PEFT
        value = ours.tokens_per_s / row.tokens_per_s
        found.append(_at_least(f"over HF PEFT, {row.jobs}, >= {least}", value, least))
    if peft and peft[0].peak_bytes:
        value = ours.peak_bytes / peft[0].peak_bytes * peft[0].tokens / ours.tokens
        sentence = f"peak bytes a token over HF PEFT's, {peft[0].jobs}, < 1"
        found.append((sentence, value, value < 1))
    return found
