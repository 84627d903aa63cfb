"""The benchmark of rounds: what is simulated meets the musts, and mixes are what they are named."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pytest

from scripts.bench.rounds.__main__ import rate_of
from scripts.bench.rounds.mixes import LONGEST, batches, lognormals, public, with_documents
from scripts.bench.rounds.simulate import simulate


@pytest.mark.parametrize(("replicas", "least"), [(8, 0.15), (32, 0.25)])
def test_rounds_by_time_save_gpu_seconds(replicas: int, least: float) -> None:
    mix = lognormals()
    rates = [rate_of(mix, LONGEST, "none")] * replicas
    tokens, auto = (simulate(mix, rates, mode) for mode in ("tokens", "auto"))
    assert 1 - auto.step_s / tokens.step_s >= least
    assert auto.busy_share > tokens.busy_share
    # For a gain of less than 5 % nobody may be slower by more.
    assert auto.smallest_steps_per_s * 1.25 > tokens.smallest_steps_per_s


def test_documents_have_their_share() -> None:
    mix = with_documents(0.002, 65536)
    counts = [sum(rows == 65536 for rows in lengths) for lengths in mix.values()]
    assert all(4 <= count <= 5 for count in counts)
    assert max(max(lengths) for lengths in lognormals().values()) == LONGEST


def test_batches_go_round_their_data() -> None:
    lengths = list(range(1, 101))
    batch = batches(lengths, seed=3)
    assert sorted(set(batch(0)) | set(batch(1))) == lengths
    assert batch(0) == batches(lengths, seed=3)(0)


def test_public_lengths_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv.gz"
    with gzip.open(path, "wt", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["dataset", "prompt_tokens", "completion_tokens"])
        writer.writerows([["a", 10, 5], ["b", 1, 0], ["a", 2, 2]])
    assert public(path) == {"a": [15, 4], "b": [2]}
