"""The planner's benchmark: its cases and rows; no model is run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from scripts.bench.planner import cases, results


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
