"""The planner's benchmark: its cases, the rounds it times, its rows; no model is run."""

from __future__ import annotations

import statistics
from types import SimpleNamespace
from typing import Any

import pytest

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
