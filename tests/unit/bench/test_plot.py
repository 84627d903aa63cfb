"""The pictures of the rows in results/."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench import plot


def _row(policy: str, seed: int, jct_s: float, rate: float) -> dict[str, str]:
    return {
        "source": "philly", "target_load": "2", "seed": str(seed), "policy": policy,
        "mean_jct_s": str(jct_s), "throughput_tokens_per_s": str(rate),
        "least_jct_s": "20.0",
    }  # fmt: skip


def test_ratios_are_over_the_isolated_run_of_the_same_cell() -> None:
    rows = [
        _row("isolated", 0, 100.0, 10.0),
        _row("isolated", 1, 100.0, 10.0),
        _row("tlora", 0, 50.0, 11.0),
        _row("tlora", 1, 25.0, 12.0),
        _row("tlora", 2, 1.0, 1.0),
    ]
    found = plot.simulation_ratios(rows)
    cell = found["philly", 2.0, "tlora"]
    assert cell["mean_jct_s"] == [2.0, 4.0], "seed 2 has nothing to compare with"
    assert cell["throughput_tokens_per_s"] == pytest.approx([1.1, 1.2])
    assert found["philly", 2.0, "no policy beats"]["mean_jct_s"] == [5.0, 5.0]


@pytest.mark.parametrize(
    ("what", "rows"),
    [("linear", "lora_linear"), ("planner", "plan_vs_measured"), ("loads", "simulation_loads")],
)
def test_rows_become_a_picture(repo: Path, tmp_path: Path, what: str, rows: str) -> None:
    file, picture = repo / f"scripts/bench/results/{rows}.csv", tmp_path / "picture.png"
    assert plot.main([what, "--csv", str(file), "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
