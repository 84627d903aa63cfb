"""`tlora convert`: Megatron loads what it wrote in any layout, and has Hugging Face's logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.launch import torchrun
from tests.helpers.standing_world import forked, world
from tests.helpers.tiny_models import _LLAMA3_ROPE, make_tiny_model
from tlora_megatron.cli.main import main

WORKER = Path(__file__).parents[1] / "helpers" / "megatron_load.py"
TRAINER = WORKER.with_name("megatron_lm_cpu.py")

MODELS: dict[str, dict[str, Any]] = {
    # Megatron fixes all of llama3's scaling but its factor; 16 rotation frequencies reach it.
    "llama3": {"model_type": "llama3", "head_dim": 32,
     "rope_parameters": _LLAMA3_ROPE
     | {"rope_theta": 500000.0, "original_max_position_embeddings": 8192},
     "max_position_embeddings": 16384},
    "mistral": {"model_type": "mistral", "num_key_value_heads": 8, "num_shards": 2},
    # 100 rows of the vocabulary are filled up to 128.
    "qwen2_tied": {"model_type": "qwen2", "tied": True, "vocab_size": 100},
    "qwen3": {"model_type": "qwen3", "vocab_size": 127},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_hidden_layers": 2},
    "mixtral": {"model_type": "mixtral", "num_hidden_layers": 2},
    "qwen2_moe": {"model_type": "qwen2_moe", "num_hidden_layers": 2},
    "scores": {"model_type": "qwen3_moe", "num_hidden_layers": 2, "norm_topk_prob": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, options in MODELS.items():
        directory = make_tiny_model(root / name, **options)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        ids = torch.randint(model.config.vocab_size, (1, 32))
        with torch.no_grad():
            torch.save({"ids": ids, "logits": model(ids).logits}, directory / "reference.pt")
        assert main(["convert", str(directory), str(directory / "megatron")]) == 0
    return root


def test_one_process(models: Path) -> None:
    assert "all equal" in forked(WORKER, "core", models, "tp=1")


def test_two_processes(models: Path) -> None:
    assert "all equal" in world(WORKER, 2, "core", models, "tp=2", "pp=2")


@pytest.mark.megatron_lm
@pytest.mark.parametrize(("name", "layout"), [("llama3", "tensor"), ("qwen2_tied", "pipeline")])
def test_megatron_lm_loads_it_strictly(
    models: Path, monkeypatch: pytest.MonkeyPatch, name: str, layout: str
) -> None:
    monkeypatch.setenv("TLORA_PLAIN", "1")
    checkpoint = models / name / "megatron"
    flags = (checkpoint / "model_flags.txt").read_text().splitlines()
    run = [*flags, *OTHER_ARGUMENTS, "--load", checkpoint, f"--{layout}-model-parallel-size", 2]
    assert "all equal" in torchrun(TRAINER, 2, WORKER, "trainer", models, name, *run)


OTHER_ARGUMENTS = (
    *("--use-cpu-initialization", "--seq-length", 32, "--micro-batch-size", 1),
    *("--global-batch-size", 1, "--train-iters", 1, "--lr", 1e-3, "--mock-data"),
    *("--tokenizer-type", "NullTokenizer", "--exit-on-missing-checkpoint"),
)
