"""Pictures and tables of the simulator's sweeps; those of the linear and the planner are theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench import plot


def _row(
    policy: str, seed: int, jct_s: float, rate: float, variant: str = "base"
) -> dict[str, str]:
    return {
        "source": "philly", "variant": variant, "target_load": "2", "seed": str(seed),
        "policy": policy, "mean_jct_s": str(jct_s), "throughput_tokens_per_s": str(rate),
        "gpu_utilisation": "0.5", "malleable_jct_s": "40.0", "least_jct_s": "20.0",
    }  # fmt: skip


def test_ratios_are_over_the_isolated_run_of_the_same_cell() -> None:
    rows = [
        _row("isolated", 0, 100.0, 10.0),
        _row("isolated", 1, 100.0, 10.0),
        _row("tlora", 0, 50.0, 11.0),
        _row("tlora", 1, 25.0, 12.0),
        _row("tlora", 0, 80.0, 9.0, "no residual"),
        _row("tlora", 2, 1.0, 1.0),
    ]
    found = plot.simulation_ratios(rows)
    cell = found["philly", "base", 2.0, "tlora"]
    assert cell["mean_jct_s"] == [2.0, 4.0], "seed 2 has nothing to compare with"
    assert cell["throughput_tokens_per_s"] == pytest.approx([1.1, 1.2])
    assert found["philly", "no residual", 2.0, "tlora"]["mean_jct_s"] == [1.25]
    lines = plot.simulation_table(found).splitlines()
    assert "| philly | base | 2 | no policy beats | 5.00 (5.00-5.00) |  |  | 2 |" in lines
    lines = [line for line in lines if "| tlora |" in line]
    assert lines[0] == (
        "| philly | base | 2 | tlora | 3.00 (2.00-4.00) | 1.15 (1.10-1.20) | 1.00 (1.00-1.00) | 2 |"
    )
    assert lines[1] == "| philly | no residual | 2 | tlora | 1.25 | 0.90 | 1.00 | 1 |"


def test_the_plot_is_a_picture(
    repo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, picture = repo / "scripts/bench/results/simulation_loads.csv", tmp_path / "loads.png"
    assert plot.main(["loads", "--csv", str(rows), "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "| kalos | base | 2 | tlora_elastic | " in printed
    assert "| kalos | base | 2 | no policy beats | " in printed
