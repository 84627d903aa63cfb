"""The planner's benchmark: its cases, the rounds it times, its rows; no model is run."""

from __future__ import annotations

import statistics
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.bench.harness.rows import append_rows
from scripts.bench.planner import __main__ as script
from scripts.bench.planner import cases, results
from tests.helpers.planner_case import H200
from tlora_megatron.planner.cost.cost_model import CostModel
from tlora_megatron.planner.cost.rates import Rates

_PACKED = 15_000
"""Sequences, about, of the rounds that stand for all."""
_KINDS = {
    "8b/16 tp1 pp1 none 16j 16384t": 1,
    "8b/32 tp1 pp1 none 2j 4096t": 2,
    "8b/32 tp1 pp1 cp2 none 8j 16384t": 2,
    "8b/32 tp1 pp1 none 8j 8192t": 4,
    "70b/16 tp2 pp2 selective 16j 8192t": 4,
    "8b/32 tp1 pp4x4 none 8j 4096t m8": 4,
    "8b/32 tp1 pp2x4 cp2 none 8j 8192t m4": 4,
}
"""A case of each kind of packing, and its number of GPUs."""
_COLUMNS = (
    "gpu,versions,commit,gpus,model,layers,tp,pp,vpp,cp,dp,nodes,batches,recompute,jobs,tokens,"
    "predicted_s,measured_s,"
    "predicted_bytes,measured_bytes,predicted_round_tokens,measured_round_tokens"
)


def test_the_planner_knows_the_mean_round_of_every_kind() -> None:
    rates = Rates(H200)
    errors = {}
    for case in map(cases.parse_case, _KINDS, _KINDS.values()):
        load = CostModel(case.spec, case.jobs, H200, rates=rates).round_load(case.plan)
        count = min(max(int(_PACKED / sum(load.job_sequences)), 200), 800)
        packed = cases.packed_rounds(case, count)
        tokens, padded = (statistics.fmean(values) for values in zip(*packed, strict=True))
        errors[case.plan.num_gpus, case.name] = (
            load.tokens / tokens - 1,
            load.rows * load.micro_batches / padded - 1,
        )
    sizes = [abs(error) for pair in errors.values() for error in pair]
    assert max(sizes) < 0.035, errors
    assert statistics.median(sizes) < 0.01, errors


def test_the_rounds_timed_are_like_the_mean_one() -> None:
    case = cases.parse_case("8b/32 tp1 pp1 none 2j 4096t", 2)
    packed = cases.packed_rounds(case, 256)
    mean = statistics.fmean(r.tokens for r in packed)
    first = cases.typical_window(packed[:72], 8, 2)
    assert 2 <= first <= 64
    window = statistics.fmean(r.tokens for r in packed[first : first + 8])
    worst = max(
        abs(statistics.fmean(r.tokens for r in packed[b : b + 8]) / mean - 1) for b in range(2, 64)
    )
    assert abs(window / mean - 1) < 0.05 < 0.15 < worst


def test_rows_read_back_with_the_columns_they_should_have(tmp_path: Path) -> None:
    row = results.Row(
        gpu="g", versions="", commit="c", gpus=2, model="llama-3.1-8b", layers=32, tp=2, pp=1, dp=1,
        recompute="none", jobs=8, tokens=8192, predicted_s=9.0, measured_s=0.25, predicted_bytes=1,
        measured_bytes=2**35, predicted_round_tokens=1, measured_round_tokens=8000,
    )  # fmt: skip
    path = tmp_path / "rows.csv"
    append_rows(path, [asdict(row), asdict(row)])
    assert path.read_text().splitlines()[0] == _COLUMNS
    assert results.read_csv(path) == [row, row]
    again = script.repredicted(row, H200)
    assert again.predicted_s != 9.0
    assert again.predicted_bytes > 2**34
    measured = {"predicted_s": 9.0, "predicted_bytes": 1, "predicted_round_tokens": 1}
    assert replace(again, **measured) == row


def test_cases_are_told_as_they_are_asked_for() -> None:
    texts = ("70b/80 tp1 pp2x20 cp2 none 8j 4096t m4", "8b/32 tp2 pp1 full 4j 8192t")
    for text in texts:
        case = cases.parse_case(text, 8)
        prediction: Any = (
            SimpleNamespace(step_time_s=1.0, load=SimpleNamespace(tokens=9.0)),
            SimpleNamespace(allocated_bytes=3.0),
        )
        row = results.Row.of(case, prediction, (1.0, 8.0, 1), commit="c")
        assert row.case == text
    assert row.layout == "TP2 PP1 DP4"
    for text in ("8b/32 tp1 pp2x2 none 8j 4096t", "8b/32 tp1 pp2x3 none 8j 4096t m2"):
        with pytest.raises(ValueError, match="must fit its model"):
            cases.parse_case(text, 2)


def test_the_report_says_errors_and_what_the_choice_is_worth() -> None:

    def row(tp: int, predicted_s: float, measured_s: float) -> Any:
        return results.Row(
            gpu="g", versions="", commit="c", gpus=2, model="m", layers=1, tp=tp, pp=1, dp=2 // tp,
            recompute="none", jobs=8, tokens=8192, predicted_s=predicted_s, measured_s=measured_s,
            predicted_bytes=110, measured_bytes=100, predicted_round_tokens=1000,
            measured_round_tokens=1000,
        )  # fmt: skip

    lines = results.report([row(1, 0.9, 1.0), row(2, 1.0, 0.8)])
    assert lines[1] == "step time: median error 17.5%, worst 25.0%, mean +7.5%"
    assert "peak memory: +10.0% to +10.0%" in lines
    assert lines[-1].endswith("chosen TP1 PP1 DP2 1,000 tokens/s, 80.0% of the best measured, "
                              "TP2 PP1 DP1")  # fmt: skip
