"""The bench of the flag's speed: how it starts the script, and what its rows say."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.bench.flag_speed.cases import Case, Place
from scripts.bench.flag_speed.stock import cut_by_job
from tests.helpers.launch import python
from tlora_megatron.ops.routing import Document, pack_micro_batch
from tlora_megatron.training.packing.packing import PackedBatch


def make_case(**changes: Any) -> Case:
    fields: dict[str, Any] = {
        "impl": "local", "precision": "bf16", "model": "toy", "layers": None, "tp": 2,
        "tokens": 256, "rounds": 8, "turns": 2, "commit": "abc", "kernels": None,
        "modes": ("flag_modules", "own", "floor"), "sequence_parallel": True,
    }  # fmt: skip
    return Case(**(fields | changes))


def test_the_command_of_a_life(tmp_path: Path) -> None:
    case, place = make_case(), Place(checkout=tmp_path, work=tmp_path / "work", on_cpu=False)
    place.prepare(case)
    words = place.command(case)
    assert words[words.index("--nproc-per-node") + 1] == "2"
    assert words[words.index("--train-iters") + 1] == str(2 * 2 * (3 + 8))
    for flag in ("--sequence-parallel", "--bf16", "--swiglu", "--tlora-config"):
        assert flag in words
    assert {path.name for path in (tmp_path / "work").iterdir()} >= {"jobs.json", "job7.jsonl"}


def test_what_overlaps_is_asked_for_and_in_the_layout(tmp_path: Path) -> None:
    place = Place(checkout=tmp_path, work=tmp_path / "work", on_cpu=False)
    nano = make_case(sequence_parallel=False, nano=2)
    place.prepare(nano)
    jobs = json.loads((tmp_path / "work" / "jobs.json").read_text())
    assert jobs["run"]["nano_batches"] == 2
    assert "--sequence-parallel" not in place.command(nano)
    assert nano.layout == "TP2 nano 2"
    plain = make_case(impl="transformer_engine", userbuffers="userbuffers")
    more = make_case(impl="transformer_engine", userbuffers="userbuffers rs-dgrad")
    assert plain.layout == "TP2+SP userbuffers"
    for case in (plain, more):
        assert {"--tp-comm-overlap", "--sequence-parallel"} <= set(place.command(case))
        assert ("--tp-comm-overlap-cfg" in place.command(case)) == (case is more)
        # NVLink multicast may disturb others on a shared host.
        assert place.environment(case, tmp_path)["UB_SKIPMC"] == "1"


def test_a_micro_batch_is_cut_into_one_for_each_job() -> None:
    documents = [Document(slot=0, length=3), Document(slot=2, length=2), Document(slot=2, length=4)]
    rows = torch.arange(12)
    batch = PackedBatch(
        view=pack_micro_batch(documents, num_slots=3, num_tokens=12), tokens=rows[None],
        labels=rows[None] + 1, weights=(rows % 2).float(), target_rows=torch.arange(1, 12, 2),
    )  # fmt: skip
    first, second = cut_by_job(batch, multiple=4)
    assert first.tokens.tolist() == [[0, 1, 2, 0]]
    assert second.tokens.tolist() == [[3, 4, 5, 6, 7, 8, 0, 0]]
    assert second.labels[0, second.target_rows].tolist() == [4, 6, 8]
    assert second.view.positions(rows.device)[:6].tolist() == [0, 1, 0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.megatron_lm
@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_a_life_over_gloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file = tmp_path / "rows.csv"
    size = ("--model", "toy", "--tokens", 256, "--rounds", 1, "--turns", 1)
    checkout = os.environ["MEGATRON_LM_PATH"]
    options = ("--megatron-lm", checkout, "--precision", precision, "--csv", file)
    output = python("-m", "scripts.bench.flag_speed", *size, *options)
    assert "base: 2 of 2 layers by our kernels, head by ours" in output
    with file.open() as rows:
        found = [(row["mode"], row["precision"]) for row in csv.DictReader(rows)]
    modes = ("flag", "flag_modules", "own", "floor")
    assert found == [(mode, precision) for mode in modes]
