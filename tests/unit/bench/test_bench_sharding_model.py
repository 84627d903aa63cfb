"""scripts/bench/lora_sharding_model.py: the model behind `auto` is held to the measured steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.helpers.bench_modules import bench_modules


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """The script."""
    with bench_modules() as modules:
        yield modules.load("lora_sharding_model")


@pytest.fixture(scope="module")
def found(bench: Any) -> list[Any]:
    """Every measured cell beside its prediction."""
    return [bench.compare(*item) for item in bench.read_cells(bench.RESULTS).items()]


def test_s_lora_over_fold_is_predicted_as_measured(found: list[Any]) -> None:
    errors = [abs(one.ratio_error) for one in found]
    assert len(errors) >= 18
    assert statistics.median(errors) < 0.02
    assert max(errors) < 0.06


def test_what_auto_takes_is_nearly_the_fastest(found: list[Any]) -> None:
    """The 2 % that another sharding must save over fold, and no more."""
    assert {one.choice for one in found} == {"fold", "s_lora"}
    assert max(one.lost for one in found) <= 0.02


def test_a_line_is_the_cell_s(bench: Any) -> None:
    cell = bench.Cell(
        gpu="NVIDIA H200", tp_size=4, sequence_parallel=True, model="8b", layers=8, tokens=8192,
        adapters=8, rank=16,
    )  # fmt: skip
    one = bench.Comparison(
        cell=cell,
        measured_s={"fold": 1.0, "rank_exchange": 1.4, "s_lora": 1.25},
        step_s={"fold": 2.0, "rank_exchange": 3.0, "s_lora": 2.0},
        round_s={"fold": 3.0, "rank_exchange": 4.0, "s_lora": 1.5},
    )
    assert one.line == (
        "TP4+SP 8b 8 x 16: measured 1.250, predicted 1.000 (-20.0%), in a round 0.500 "
        "(3,000.0, 4,000.0, 1,500.0 ms): auto takes s_lora, 25.0% over the fastest"
    )


def test_a_cell_measured_twice_is_an_error(bench: Any, tmp_path: Path) -> None:
    lines = bench.RESULTS.read_text().splitlines()
    path = tmp_path / "rows.csv"
    path.write_text("\n".join([*lines[:3], lines[2]]))
    with pytest.raises(ValueError, match="must have one row for rank_exchange, got two"):
        bench.read_cells(path)
