"""The benchmark of whole steps: its jobs, and a run of every mode on a tiny model."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.step import __main__ as step
from scripts.bench.step import jobs
from tests.helpers.standing_world import forked, world

COLUMNS = (
    "gpu,versions,commit,model,tp,sequence_parallel,recompute,dropout,jobs,mode,step_ms,p20_ms,"
    "p50_ms,p80_ms,tokens,tokens_per_s,ratio_to_floor,peak_bytes,mfu,tflops_per_gpu"
)
TINY = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}  # fmt: skip


def test_jobs_are_those_of_the_issue_and_the_same_every_time() -> None:
    drawn: dict[str, Any] = {"target_share": 1.0, "dropout": 0.0, "longest": 2048}
    first, second = (jobs.make_mixes(None, vocab_size=96, **drawn) for _ in range(2))
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


@pytest.mark.shared
def test_the_stated_quantiles_are_the_data_s(shared_data: Path) -> None:
    lengths = sorted(jobs._read_lengths(shared_data / "lengths" / "lengths.csv.gz"))
    for quantile, tokens in zip(jobs._QUANTILES, jobs._TOKENS, strict=True):
        assert lengths[min(int(len(lengths) * quantile), len(lengths) - 1)] == tokens, quantile


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return path


def _options(model: Path, rows: Path) -> list[object]:
    sizes = ["--layers", 1, "--tokens", 512, "--warmup", 1, "--rounds", 2, "--steps", 1]
    return ["--model", model, *sizes, "--csv", rows, "--commit", "c"]


def _read(path: Path) -> list[dict[str, str]]:
    text = path.read_text()
    assert text.splitlines()[0] == COLUMNS
    return list(csv.DictReader(text.splitlines()))


def _check_rounds(rows: Sequence[dict[str, str]]) -> None:
    """Floor, adapters and whole rounds ran the same micro-batches and are held to the floor."""
    gemms, floor, adapters, together = rows
    assert [row["mode"] for row in rows] == ["gemms", "floor", "adapters", "together"]
    assert gemms["tokens"] == floor["tokens"] == adapters["tokens"] == together["tokens"]
    assert floor["ratio_to_floor"] == "1.0"
    for row in (adapters, together):
        assert float(row["ratio_to_floor"]) == pytest.approx(
            float(row["step_ms"]) / float(floor["step_ms"]), rel=0.01
        )
        assert float(row["p20_ms"]) <= float(row["p50_ms"]) <= float(row["p80_ms"])


@pytest.mark.slow
def test_all_modes_on_a_tiny_model(tiny: Path, tmp_path: Path) -> None:
    options = [*_options(tiny, tmp_path / "rows.csv"), "--mixes", "batch 1-8"]
    forked("-m", "scripts.bench.step", *options)
    rows = _read(tmp_path / "rows.csv")
    modes = ["gemms", "floor", "adapters", "together", "sequential"]
    assert [row["mode"] for row in rows] == [*modes, *["hf_peft"] * 4]
    _check_rounds(rows[:4])
    assert 256 <= int(rows[0]["tokens"]) <= 512
    assert all(float(row["tokens_per_s"]) > 0 for row in rows)


@pytest.mark.slow
def test_a_full_micro_batch_under_tensor_parallelism(tiny: Path, tmp_path: Path) -> None:
    layout = ["--tp", 2, "--sequence-parallel", "--recompute", "selective", "--dropout", 0.05]
    options = [*_options(tiny, tmp_path / "rows.csv"), *layout, "--mixes", jobs.FULL]
    world("scripts.bench.step", 2, *options)
    rows = _read(tmp_path / "rows.csv")
    _check_rounds(rows)
    for row in rows:
        assert (row["tp"], row["sequence_parallel"], row["tokens"]) == ("2", "True", "512")
        assert (row["recompute"], row["dropout"]) == ("selective", "0.05")


@pytest.mark.slow
def test_bases_of_two_precisions_take_turns_beside_other_stacks(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")  # compiling takes longer than all the rest
    modes = ("floor", "together", "hf_peft", "hf_compile")
    options = [*_options(tiny, tmp_path / "rows.csv"), "--mixes", "512 a step", "--modes", *modes]
    forked("-m", "scripts.bench.step", *options, "--precisions", "bf16", "fp8")
    rows = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    assert ",".join(rows[0]) == (
        "gpu,commit,model,jobs,mode,precision,step_ms,floor_ms,tokens,tokens_per_s,peak_bytes"
    )
    ours = [(p, mode, "8 (512 a step)") for p in ("bf16", "fp8") for mode in modes[:2]]
    assert [(row["precision"], row["mode"], row["jobs"]) for row in rows] == [
        *ours, ("bf16", "hf_peft", "1 (1 x 512)"), ("bf16", "hf_compile", "1 (1 x 512)")
    ]  # fmt: skip
    assert {row["tokens"] for row in rows} == {"512"}
    for floor, together in (rows[:2], rows[2:4]):
        assert floor["step_ms"] == floor["floor_ms"] == together["floor_ms"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tp", "2"], r"--tp must be the number of processes \(1\), got 2"),
        (["--mixes", "nosuch"], "invalid choice: 'nosuch'"),
        (["--precisions", "fp8", "--modes", "floor"], "--modes must name together, not seq"),
    ],
)
def test_a_command_that_cannot_be_run_is_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        step.arguments(options)
    assert re.search(message, capsys.readouterr().err)
