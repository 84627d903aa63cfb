"""DeepSpeed on GPUs: kernels on gathered and on cut weights, NCCL, and the bits of a job alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="needs deepspeed")

from tests.helpers.deepspeed_cases import run_cases, write_config, zero
from tests.helpers.scenario import have_same_adapters, losses, make_scenario
from tests.helpers.scenario_worlds import entry
from tests.helpers.tiny_models import GPU_SHAPE, make_tiny_model
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, save_tiny_tokenizer

NAMES = ("attention", "mlp", "everything", "outputs")
TP2 = {"tensor_parallel": {"autotp_size": 2}}


def make_section(root: Path) -> dict[str, Any]:
    """The losslessness scenario in bf16 on a base that all kernels take."""
    section = json.loads(make_scenario(root).read_text())
    shape = {"vocab_size": VOCAB_SIZE, "dtype": torch.bfloat16, **GPU_SHAPE}
    save_tiny_tokenizer(make_tiny_model(root / "wide", "llama", **shape))
    section["base_model"] = {"path": "wide", "dtype": "bfloat16"}
    section["run"] |= {"micro_batch_tokens": 1024, "portion_tokens": 256}
    return section


def train(root: Path, world: int, cases: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Runs `{name: (DeepSpeed JSON, section)}` in one set of processes."""
    entries = []
    for name, (deepspeed, section) in cases.items():
        config = write_config(root / f"{name}.json", deepspeed, section)
        entries.append(entry(config, root / name))
    run_cases(world, entries, root / f"cases{world}.json")


def check_together_is_alone(root: Path, stage: str) -> None:
    """Weights and losses of a job in both runs, bit for bit."""
    for name in ("attention", "everything"):
        together, alone = root / f"{stage} together", root / f"{stage} {name}"
        assert losses(together, name) == losses(alone, name)
        assert have_same_adapters(together, alone, name), f"{stage} {name}"


def with_alone(
    stage: str, deepspeed: dict[str, Any], section: dict[str, Any]
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """A run of all jobs and two of one."""
    jobs = {job["name"]: job for job in section["jobs"]}
    alone = {
        f"{stage} {name}": (deepspeed, section | {"jobs": [jobs[name]]})
        for name in ("attention", "everything")
    }
    return {f"{stage} together": (deepspeed, section), **alone}


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash attention adds its queries' gradients by atomics otherwise."""
    monkeypatch.setenv("TLORA_TEST_DETERMINISTIC", "1")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_one_gpu_together_is_alone_and_stages_agree(tmp_path: Path) -> None:
    section = make_section(tmp_path)
    recompute = section | {"run": section["run"] | {"recompute": "full"}}
    offload = {"offload_optimizer": {"device": "cpu"}}
    cases = with_alone("ZeRO-3", zero(3), section)
    cases |= {"ZeRO-0": (zero(0), section), "recompute": (zero(3, **offload), recompute)}
    train(tmp_path, 1, cases)
    check_together_is_alone(tmp_path, "ZeRO-3")
    for name in NAMES:
        expected = losses(tmp_path / "ZeRO-0", name)
        for other in ("ZeRO-3 together", "recompute"):
            assert losses(tmp_path / other, name) == pytest.approx(expected, rel=3e-2), name


@pytest.mark.multigpu
@pytest.mark.usefixtures("deterministic")
def test_two_gpus_together_is_alone_and_layouts_agree(tmp_path: Path) -> None:
    section = make_section(tmp_path)
    train(tmp_path, 2, with_alone("ZeRO-3", zero(3), section) | {"ZeRO-1": (zero(1), section)})
    (tmp_path / "cases2.json").unlink()
    train(tmp_path, 2, with_alone("TP2", zero(1) | TP2, section))
    check_together_is_alone(tmp_path, "ZeRO-3")
    check_together_is_alone(tmp_path, "TP2")
    for name in NAMES:
        expected = losses(tmp_path / "ZeRO-1", name)
        for other in ("ZeRO-3 together", "TP2 together"):
            assert losses(tmp_path / other, name) == pytest.approx(expected, rel=3e-2), name
