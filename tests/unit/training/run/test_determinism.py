"""Environment, refusals and fingerprints of deterministic runs."""

from __future__ import annotations

import json
import logging
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from scripts.bench.determinism.cases import SIZES
from tests.helpers.launch import python
from tests.unit.training.run.test_output_dir import config_for
from tlora_megatron.config.job import DataSpec, JobSpec
from tlora_megatron.layers.sites import stage_sites
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.training.formats.quantised import QuantisationCard
from tlora_megatron.training.run import determinism
from tlora_megatron.training.run.determinism import (
    ENVIRONMENT,
    FILE_NAME,
    check_deterministic,
    keep_fingerprints,
    let_segments_grow,
    run_fingerprint,
    set_environment,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the variables is set, before and after."""
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_variables_are_set_where_the_key_asks_for_it() -> None:
    set_environment(False)
    assert not ENVIRONMENT.keys() & os.environ.keys()
    set_environment(True)
    assert {name: os.environ[name] for name in ENVIRONMENT} == ENVIRONMENT
    set_environment(True)


def test_an_opposing_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    with pytest.raises(ValueError, match=r"NCCL_ALGO must be Ring with .*, got Tree: unset it"):
        set_environment(True)


def test_a_variable_that_comes_too_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="export CUBLAS_WORKSPACE_CONFIG=:16:8"):
        set_environment(True)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    set_environment(True)


def test_a_variable_of_the_allocator_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        monkeypatch.setenv(name, "max_split_size_mb:64")
        let_segments_grow()
        assert [os.environ.get(n) for n in names].count("max_split_size_mb:64") == 1
        monkeypatch.delenv(name)
    let_segments_grow()
    assert os.environ[names[1]] == "expandable_segments:True"
    monkeypatch.delenv(names[1])


def test_linears_of_others_are_refused() -> None:
    foreign = type("TELinear", (nn.Module,), {"__module__": "transformer_engine.pytorch.module"})
    host = type("MultiLoRATELinear", (foreign,), {})
    site: Any = SimpleNamespace(in_size=2, out_size=2)
    check_deterministic(CPU, torch.bfloat16, [(site, nn.Linear(2, 2))])
    with pytest.raises(NotImplementedError, match="got Transformer Engine's MultiLoRATELinear"):
        check_deterministic(CPU, torch.bfloat16, [(site, nn.Linear(2, 2)), (site, host())])


def test_on_cpus_libraries_that_look_at_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    site: Any = SimpleNamespace(in_size=4, out_size=2)
    multiply = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda x, w: multiply(x, w) + (len(x) == 5))
    with pytest.raises(NotImplementedError, match=r"sums over 4 elements: take float32, and expor"):
        check_deterministic(CPU, torch.float32, [(site, nn.Linear(4, 2))])


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="another library multiplies")
def test_rows_of_wide_products_do_not_depend_on_their_number() -> None:
    """In a process of its own: MKL reads its environment once."""
    lines = (
        "from tlora_megatron.training.run import determinism",
        "determinism.set_environment(True)",
        "determinism._check_rows([(256, 700), (1024, 64), (2048, 256)], determinism.torch.float32)",
    )
    python("-c", "; ".join(lines))


def test_on_gpus_only_our_cuda_kernels_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    choice: Any = SimpleNamespace(name="torch", reason="TLORA_KERNELS=torch")
    monkeypatch.setattr(determinism, "kernel_choice", lambda *_: choice)
    sentence = r"must have the CUDA kernels, got torch \(TLORA_KERNELS=torch\)"
    with pytest.raises(NotImplementedError, match=sentence):
        check_deterministic(torch.device("cuda"), torch.bfloat16, [])


@pytest.mark.parametrize(
    ("head_dim", "hidden_size", "sentence"),
    [
        (64, 128, None),
        (32, 128, "linear_qkv of layer 0: fused outputs must come in multiples of 64"),
        (64, 132, "linear_qkv of layer 0: sizes must be multiples of 8, up to 65536, got 132"),
    ],
)
def test_on_gpus_a_linear_that_a_library_would_compute_is_refused_by_name(
    head_dim: int, hidden_size: int, sentence: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice: Any = SimpleNamespace(name="cuda", reason="")
    monkeypatch.setattr(determinism, "kernel_choice", lambda *_: choice)
    spec = replace(
        SIZES["toy"].spec(), hidden_size=hidden_size, num_heads=4, num_kv_heads=2,
        head_dim=head_dim, ffn_size=128,
    )  # fmt: skip
    sites = stage_sites(spec, ParallelLayout(), tp_rank=0, pp_rank=0)
    linears = [(site, nn.Linear(1, 1)) for site in sites]
    refused = pytest.raises(NotImplementedError, match=sentence) if sentence else nullcontext()
    with refused:
        check_deterministic(torch.device("cuda"), torch.bfloat16, linears)


class Ours:
    """Stands for an engine."""


class Theirs(Ours):
    """Stands for another trainer's."""


def test_a_fingerprint_names_trainer_and_codes() -> None:
    config = config_for(Path("out"))
    groups: Any = SimpleNamespace(layout=ParallelLayout(), device=CPU, deployment=None)
    engines: tuple[Any, ...] = (Ours(), Theirs())
    ours, theirs = (run_fingerprint(config, groups, torch.bfloat16, x) for x in engines)
    assert ours == theirs | {"engine": "Ours"}
    assert theirs["engine"] == "Theirs"
    base = QuantisationCard(method="fp8", format="e4m3", digest="0123456789abcdef")
    found = run_fingerprint(config, groups, torch.bfloat16, engines[0], base)
    assert found == ours | {"quantization": "fp8 (e4m3, 0123456789ab)"}


HERE = {"device": "a", "layout": {"tp_size": 1, "pp_size": 1}}
OTHER = {"device": "a", "layout": {"tp_size": 2, "pp_size": 1}}


def trains(name: str, goes_on_from: Path | None = None, *, is_done: bool = False) -> Any:
    """A prepared job with portions of 64 tokens, fresh or with a checkpoint of a job's folder."""
    spec = JobSpec(name=name, data=DataSpec(train="a"), max_steps=1, portion_tokens=64)
    path = None if goes_on_from is None else goes_on_from / "checkpoints" / "step_00000002"
    checkpoint = None if path is None else SimpleNamespace(path=path)
    return SimpleNamespace(spec=spec, checkpoint=checkpoint, is_done=is_done)


def kept(out: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((out / "jobs" / name / FILE_NAME).read_text()))


def test_a_fingerprint_beside_the_adapter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    keep_fingerprints(HERE, tmp_path, [trains("one")])
    assert kept(tmp_path, "one") == HERE | {"portion_tokens": 64}
    assert json.dumps(HERE) in caplog.text
    keep_fingerprints(HERE, tmp_path, [trains("one", tmp_path / "jobs" / "one")])
    assert kept(tmp_path, "one") == HERE | {"portion_tokens": 64}
    assert "another fingerprint" not in caplog.text


def test_a_job_that_goes_on_under_another_fingerprint_is_told_and_keeps_the_earlier_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    keep_fingerprints(HERE, old, [trains("one")])
    keep_fingerprints(OTHER, new, [trains("moved", old / "jobs" / "one")])
    assert "job moved goes on from a run with another fingerprint" in caplog.text
    assert caplog.text.rstrip().endswith(": layout.tp_size 2 instead of 1")
    mixed = OTHER | {"portion_tokens": 64, "earlier": kept(old, "one")}
    assert kept(new, "moved") == mixed
    caplog.clear()
    keep_fingerprints(OTHER, new, [trains("moved", new / "jobs" / "moved")])
    assert kept(new, "moved") == mixed
    assert "another fingerprint" not in caplog.text


def test_a_job_whose_first_steps_promised_nothing_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = [trains("one", tmp_path / "jobs" / "one")]
    keep_fingerprints(HERE, tmp_path, jobs)
    assert caplog.text.rstrip().endswith(": no fingerprint there")
    assert kept(tmp_path, "one") == HERE | {"portion_tokens": 64, "earlier": None}
    caplog.clear()
    keep_fingerprints(None, tmp_path, jobs)
    assert "job one goes on without run.deterministic" in caplog.text
    assert not (tmp_path / "jobs" / "one" / FILE_NAME).exists()


def test_an_ended_job_s_fingerprint_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep_fingerprints(HERE, tmp_path, [trains("one")])
    for later in (OTHER, None):
        keep_fingerprints(later, tmp_path, [trains("one", tmp_path / "jobs" / "one", is_done=True)])
    assert kept(tmp_path, "one") == HERE | {"portion_tokens": 64}
    assert "goes on" not in caplog.text
