"""The smoke figures: which rows they are made of, and what the docs say that they are.

Every figure is a time, so smaller is better. Most are ratios of two rows of one run, which are
compared as ratios, since machines differ. A time to a first step has no baseline in its run: it is
compared with the time that the docs state.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.bench.harness.arguments import RESULTS

SHORT = 1.05
"""A figure is short if it is more than this times what the docs say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """A value of one row, over the same value of another row of the same run."""

    column: str
    row: Mapping[str, str]
    over: Mapping[str, str] | None = None
    """Where the row of the baseline differs; None = the value has no baseline."""

    def read(self, file: Path) -> tuple[float, float | None]:
        """Returns the value and its baseline, each of exactly one row."""
        value = self._find(file, self.row)
        return value, None if self.over is None else self._find(file, {**self.row, **self.over})

    def _find(self, file: Path, wanted: Mapping[str, str]) -> float:
        with file.open(newline="", encoding="utf-8") as opened:
            rows = [row for row in csv.DictReader(opened) if wanted.items() <= row.items()]
        if len(rows) != 1:
            raise LookupError(f"{file.name} must have one row with {dict(wanted)}, got {len(rows)}")
        return float(rows[0][self.column])


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A figure of the docs that every run measures again."""

    name: str
    part: str
    """Name of the benchmark that measures it."""
    unit: str
    measured: Rows
    """In the rows that the part has just written."""
    source: str
    """Where the docs have it: a file of `results/`, or words."""
    stated: Rows | float
    """In the rows of that file, or the largest ratio that it may have."""
    slack_s: float = 0.0
    """Of a time in seconds: so much more than stated is not short, however small the time is."""

    def expected(self) -> tuple[float | None, float]:
        """Returns the time that is stated, if it is compared, and the ratio to the baseline."""
        if isinstance(self.stated, float):
            return None, self.stated
        value, baseline = self.stated.read(RESULTS / self.source)
        return (value, 1.0) if baseline is None else (None, value / baseline)

    def measure(self, file: Path, *, compares: bool) -> Measured:
        """Reads the figure from a part's rows; compares it with the docs where times count."""
        value, baseline = self.measured.read(file)
        stated_s, ratio = self.expected()
        baseline = stated_s if baseline is None else baseline
        assert baseline is not None, "a figure has a baseline, in its run or in the docs"
        limit = baseline * ratio * SHORT
        short = value > max(limit, baseline * ratio + self.slack_s)
        return Measured(
            name=self.name, value=value, unit=self.unit, baseline=baseline,
            ratio=round(value / baseline, 3), expected_ratio=round(ratio, 3) if compares else None,
            source=self.source, short=compares and short,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a run found; the fields are those of the record."""

    name: str
    value: float
    unit: str
    baseline: float
    """In the same unit: of the same run, or the time that the docs state."""
    ratio: float
    expected_ratio: float | None
    """What the docs say; None = not compared."""
    source: str
    short: bool


def show(figures: Iterable[Measured]) -> str:
    """A table for reading, and a line for every short figure."""
    lines = [f"{'smoke figure':58} {'value':>9} {'baseline':>9}      {'ratio':>6} {'docs':>6}"]
    short = []
    for figure in figures:
        said = "" if figure.expected_ratio is None else f"{figure.expected_ratio:.3f}"
        lines.append(
            f"{figure.name:58} {figure.value:9.2f} {figure.baseline:9.2f} {figure.unit:4} "
            f"{figure.ratio:6.3f} {said:>6}"
        )
        if figure.short:
            short.append(
                f"SHORT: {figure.name}: {figure.ratio:.3f} of its baseline, "
                f"{said} in the docs ({figure.source})"
            )
    return "\n".join(lines + short)


def figures(gang_base: str, train_case: str) -> tuple[Figure, ...]:
    """Returns all figures, in the order in which they are measured.

    Args:
        gang_base: the base of the part `submit`, as its rows name it.
        train_case: the case of the part `train`.
    """
    floor, own, flag = {"mode": "floor"}, {"mode": "own"}, {"mode": "flag"}
    bf16, fp8 = ({"mode": "together", "precision": precision} for precision in ("bf16", "fp8"))
    jobs = {"jobs": "8 (batch 1-8)"}
    bare_bf16 = Rows(
        column="step_ms",
        row=jobs | {"commit": "b308047", "mode": "super_model"},
        over={"mode": "frozen_floor"},
    )
    measured = flag | {"commit": "98d5556"}
    te = {"impl": "transformer_engine"}
    local_bf16 = measured | {"impl": "local", "precision": "bf16", "layout": "TP1"}
    te_bf16, te_fp8 = local_bf16 | te, measured | te | {"precision": "fp8"}
    h200 = fp8 | jobs | {"commit": "c6ca12a", "gpu": "NVIDIA H200"}
    steps, flags, fp8_steps = "end_to_end.csv", "flag_speed.csv", "fp8.csv"
    limit, bare = "a limit, no row", "over the bare FP8 model"
    step, engine = "8B step of eight jobs,", "flag, Transformer Engine"
    return (
        # README: "8B, eight jobs, one GPU" over the bare model, and the same with a base in FP8.
        _step(f"{step} bf16, over the bare model", "step", bf16, floor, steps, bare_bf16),
        _step(f"{step} FP8 base, {bare}", "step", fp8, floor, fp8_steps, _over(h200, floor)),
        # README: "the same with eight jobs: local spec; Transformer Engine in FP8".
        _step(
            "flag, local spec, over our own trainer",
            "flag local",
            flag,
            own,
            flags,
            _over(local_bf16, own),
        ),
        _step(
            f"{engine} bf16, over our own trainer",
            "flag te bf16",
            flag,
            own,
            flags,
            _over(te_bf16, own),
        ),
        _step(f"{engine} FP8, over our own FP8 trainer", "flag te fp8", flag, own, limit, 1.02),
        _step(f"{engine} FP8, {bare}", "flag te fp8", flag, floor, flags, _over(te_fp8, floor)),
        *_first_steps(gang_base, train_case),
    )


def _step(
    name: str,
    part: str,
    row: Mapping[str, str],
    over: Mapping[str, str],
    source: str,
    stated: Rows | float,
) -> Figure:
    """A step's time over that of another mode of the same run."""
    measured = _over(row, over)
    return Figure(name=name, part=part, unit="ms", measured=measured, source=source, stated=stated)


def _over(row: Mapping[str, str], over: Mapping[str, str]) -> Rows:
    return Rows(column="step_ms", row=row, over=over)


def _first_steps(gang_base: str, train_case: str) -> tuple[Figure, ...]:
    """docs/service.md: submit to first step; docs/benchmarks.md, Around training: first step.

    The gang's base has six layers, not 8B's: it costs no 16 GB of files, and takes no longer.
    First steps of a command vary by a few seconds with the machine's file cache.
    """
    case = "submit to first step, warm idle gang"
    submit = Figure(
        name="warm submit to first step", part="submit", unit="s",
        measured=Rows(column="value", row={"case": f"{gang_base}: {case}"}), source="live.csv",
        stated=Rows(column="value", row={"commit": "525c001", "case": f"8B: {case}"}), slack_s=0.5,
    )  # fmt: skip
    train = Figure(
        name="tlora train to its first step, six layers",
        part="train",
        unit="s",
        measured=Rows(column="first_step_s", row={"case": train_case}),
        source="around_training.csv",
        stated=Rows(column="first_step_s", row={"commit": "6eff7ecc", "case": "six layers"}),
        slack_s=3.0,
    )
    return submit, train
