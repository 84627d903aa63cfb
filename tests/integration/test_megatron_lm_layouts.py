"""The harness of GPU layouts, tried where there is no GPU."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.helpers.launch import python

pytestmark = [pytest.mark.megatron_lm, pytest.mark.slow]

LAYOUTS = ("local TP2+SP", "local PP2 full recompute")


def test_two_layouts_over_gloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    rows = tmp_path / "rows.csv"
    options = ("--layouts", ",".join(LAYOUTS), "--csv", rows)
    output = python("-m", "scripts.bench.megatron_lm", *options)
    assert "all 2 layouts passed" in output
    with rows.open() as file:
        measured = list(csv.DictReader(file))
    assert {(row["layout"], row["job"]) for row in measured} == {
        (layout, job) for layout in LAYOUTS for job in ("attention", "mlp", "everything", "outputs")
    }
    assert all(float(row["max_rel_loss_error"]) < 1e-5 for row in measured)
