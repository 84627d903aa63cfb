"""The end-to-end benchmark: its jobs, its verdicts, and a run of every mode on a tiny model."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.bench_modules import bench_modules
from tests.helpers.launch import HANG_S

COLUMNS = "gpu,commit,model,jobs,mode,step_ms,tokens,tokens_per_s,peak_bytes,mfu"
TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The modules of scripts/bench."""
    with bench_modules() as modules:
        yield modules


def mixes(bench: SimpleNamespace, **changes: Any) -> list[Any]:
    options = {"vocab_size": 96, "target_share": 1.0, "dropout": 0.0, "longest": 2048} | changes
    return bench.load("end_to_end_jobs").make_mixes(options.pop("lengths", None), **options)


def test_jobs_are_those_of_the_issue_and_the_same_every_time(bench: SimpleNamespace) -> None:
    first, second = mixes(bench), mixes(bench)
    for mix, again in zip(first, second, strict=True):
        assert len(mix.specs) == 8
        assert {spec.lora.rank for spec in mix.specs} == {4, 8, 16, 24, 32, 64}
        assert max(s.batch_size for s in mix.specs) == int(mix.name[-1])
        assert min(s.batch_size for s in mix.specs) == 1
        lengths = [len(s.tokens) - 1 for data in mix.data for s in data]
        assert min(lengths) >= 256
        assert max(lengths) <= 2048
        assert all(
            (a.tokens == b.tokens).all()
            for x, y in zip(mix.data, again.data, strict=True)
            for a, b in zip(x, y, strict=True)
        )


def test_drawn_lengths_have_the_stated_quantiles(bench: SimpleNamespace) -> None:
    lengths = sorted(len(s.tokens) - 1 for mix in mixes(bench) for data in mix.data for s in data)
    at = {q: lengths[int(q * len(lengths))] for q in (0.25, 0.5, 0.75, 0.9)}
    assert at[0.25] == pytest.approx(278, rel=0.03)
    assert at[0.5] == pytest.approx(313, rel=0.04)
    assert at[0.75] == pytest.approx(446, rel=0.15)
    assert at[0.9] == pytest.approx(837, rel=0.2)


@pytest.mark.shared
def test_the_stated_quantiles_are_the_data_s(bench: SimpleNamespace, shared_data: Path) -> None:
    jobs = bench.load("end_to_end_jobs")
    lengths = sorted(jobs._read_lengths(shared_data / "lengths" / "lengths.csv.gz"))
    for quantile, tokens in zip(jobs._QUANTILES, jobs._TOKENS, strict=True):
        assert lengths[min(int(len(lengths) * quantile), len(lengths) - 1)] == tokens, quantile


@pytest.mark.parametrize("name", ["lengths.csv", "lengths.csv.gz"])
def test_lengths_from_a_file(name: str, bench: SimpleNamespace, tmp_path: Path) -> None:
    text = "prompt_tokens,completion_tokens\n1,2\n300,7\n5000,1\n"
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    for mix in mixes(bench, lengths=path):
        assert {len(s.tokens) - 1 for data in mix.data for s in data} == {307}


@pytest.mark.parametrize(("share", "targets"), [(1.0, 307), (0.5, 154), (0.0, 1)])
def test_target_share(share: float, targets: int, bench: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,completion_tokens\n300,7\n")
    for mix in mixes(bench, lengths=path, target_share=share):
        for data in mix.data:
            assert {int(s.is_target.sum()) for s in data} == {targets}
            assert not any(s.is_target[0] for s in data)


def test_verdicts(bench: SimpleNamespace) -> None:
    module = bench.load("end_to_end")
    row = module.Row(
        gpu="NVIDIA H200", commit="c", model="m", jobs="8 (batch 1-8)", mode="super_model",
        step_ms=500.0, tokens=8000, tokens_per_s=16000.0, peak_bytes=70, mfu=0.6,
    )  # fmt: skip
    rows = [
        row,
        dataclasses.replace(row, mode="frozen_floor", step_ms=450.0),
        dataclasses.replace(row, mode="sequential", tokens_per_s=12000.0),
        dataclasses.replace(row, jobs="8 (batch 1-4)", tokens_per_s=15000.0),
        dataclasses.replace(row, jobs="8 (batch 1-4)", mode="sequential", tokens_per_s=11000.0),
        dataclasses.replace(
            row, jobs="1 (8 x 1024)", mode="hf_peft", tokens_per_s=10000.0, peak_bytes=100
        ),
        dataclasses.replace(row, jobs="1 (1 x 512)", mode="hf_peft", tokens_per_s=5000.0),
    ]
    found = {sentence: (value, reached) for sentence, value, reached in module.verdicts(rows)}
    assert found == {
        "batch 1-8: step over floor <= 1.12": (pytest.approx(500 / 450), True),
        "aggregate >= 15000 tokens/s": (16000.0, True),
        "batch 1-4: over sequential >= 1.5": (pytest.approx(15 / 11), False),
        "batch 1-8: over sequential > 1": (pytest.approx(16 / 12), True),
        "over HF PEFT, 1 (8 x 1024), >= 1.55": (1.6, True),
        "over HF PEFT, 1 (1 x 512), >= 4.0": (3.2, False),
        "peak bytes a token over HF PEFT's, 1 (8 x 1024), < 1": (0.7, True),
    }


@pytest.mark.slow
def test_all_modes_on_a_tiny_model(repo: Path, tmp_path: Path) -> None:
    model = tmp_path / "tiny.json"
    model.write_text(json.dumps(TINY))
    command = [sys.executable, str(repo / "scripts/bench/end_to_end.py"), "--model", str(model)]
    options = ["--layers=1", "--tokens=512", "--warmup=1", "--rounds=2", "--steps=1", "--commit=c"]
    files = [f"--csv={tmp_path / 'rows.csv'}", f"--json={tmp_path / 'all.json'}"]
    result = subprocess.run(
        [*command, *options, *files], cwd=repo, capture_output=True, text=True, timeout=HANG_S
    )
    assert result.returncode == 0, result.stderr
    text = (tmp_path / "rows.csv").read_text()
    assert text.splitlines()[0] == COLUMNS
    rows = list(csv.DictReader(text.splitlines()))
    modes = ["super_model", "frozen_floor", "sequential"]
    assert [row["mode"] for row in rows] == [*(modes * 2), *["hf_peft"] * 4]
    by_mode = {(row["mode"], row["jobs"]): row for row in rows}
    for name in ("8 (batch 1-8)", "8 (batch 1-4)"):
        together, floor = by_mode["super_model", name], by_mode["frozen_floor", name]
        assert 256 <= int(together["tokens"]) <= 512
        assert together["tokens"] == floor["tokens"], "the same micro-batches"
    assert all(float(row["tokens_per_s"]) > 0 for row in rows)
    found = json.loads((tmp_path / "all.json").read_text())
    assert len(found["rows"]) == len(rows)
    assert len(found["verdicts"]) == 8
