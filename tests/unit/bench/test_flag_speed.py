"""The bench of the flag's speed: how it starts the script, and what its rows say."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.flag_speed.cases import Case, Place
from tests.helpers.launch import python


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
