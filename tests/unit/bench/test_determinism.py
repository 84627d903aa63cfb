"""The benchmark of determinism on tiny models: what leaks is found, and what does not is equal."""

from __future__ import annotations

import csv
from pathlib import Path

import torch

from tests.helpers.exact_operations import Context, search
from tests.helpers.standing_world import forked
from tlora_megatron.ops.exactness import Exactness


def leaky(context: Context, exactness: Exactness | None) -> dict[str, torch.Tensor]:
    """Own rows whose sums take the number of rows, of slots and their place."""
    view = context.view((5, 8), exactness)
    odd = [view.num_tokens, view.num_slots, context.first_row % 64]
    return {"y": torch.tensor([1.0, -0.0, *odd])}


def test_what_leaks_is_named() -> None:
    found = search(leaky, None, 16, repeats=1)
    assert found["again"] == ""
    assert found["place"].startswith("DIFF at row 1: y 4")
    assert found["neighbours"].startswith("DIFF rank 1: y")
    assert found["fill"].startswith("DIFF 48 rows: y 20 %")


def test_a_tiny_model_keeps_a_job_s_bits(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    few = ("--size", "toy", "--seeds", 1, "--steps", 3, "--rounds", 1, "--warmup", 0)
    jobs = ("--layouts", "tp1 full", "--documents", "9 of 148 to 1800")
    forked("-m", "scripts.bench.determinism", *few, *jobs, "--csv", path)
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["layout"], row["runs"], row["equal"]) == (
        "tp1 full, 9 of 148 to 1800", "5", "5",
    )  # fmt: skip
    assert float(row["step_ms"]) > 0
