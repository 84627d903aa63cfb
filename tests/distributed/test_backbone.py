"""The Megatron backbone equals Hugging Face's models, in every layout, on packed odd documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.helpers.launch import python, torchrun
from tests.helpers.tiny_models import make_tiny_model

WORKER = Path(__file__).with_name("backbone_logits.py")

PACKED_LENGTHS = ((17, 1, 6, 24), (48,), (3, 5, 7, 1, 1, 31), (29, 13))
"""Documents of each micro-batch of 48 tokens; the last one leaves 6 tokens of padding."""

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_shards": 3},
    # 16 dimensions a head: some rotation frequencies then lie where llama3 scaling interpolates.
    "llama3": {"model_type": "llama3", "head_dim": 16},
    "llama_tied": {"model_type": "llama", "tied": True},
    "mistral": {"model_type": "mistral"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "tied": True},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models, each with its `reference.pt`; an odd vocabulary, so TP has to pad."""
    root = tmp_path_factory.mktemp("models")
    for name, options in MODELS.items():
        directory = make_tiny_model(root / name, vocab_size=127, **options)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        batches = [reference(model, lens, seed) for seed, lens in enumerate(PACKED_LENGTHS)]
        torch.save(batches, directory / "reference.pt")
    return root


def reference(model: PreTrainedModel, lengths: tuple[int, ...], seed: int) -> dict[str, Any]:
    """Logits and gradients of one micro-batch, every document (and the padding) alone."""
    generator = torch.Generator().manual_seed(seed)
    vocab_size = model.config.vocab_size
    ids = torch.randint(vocab_size, (48,), generator=generator)
    weights = torch.randn(48, vocab_size, generator=generator)
    padding = 48 - sum(lengths)
    documents = [*lengths, *([padding] if padding else [])]
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    parts = [model(inputs_embeds=x[None]).logits[0] for x in embedded.split(documents)]
    logits = torch.cat(parts)
    (grads,) = torch.autograd.grad((logits * weights).sum(), embedded)
    return {
        "ids": ids,
        "lengths": list(lengths),
        "weights": weights,
        "logits": logits.detach(),
        "grads": grads,
    }


ALL = ",".join(MODELS)


def test_one_process_without_torchrun(models: Path) -> None:
    variants = ("", "recompute=full", "recompute=selective")
    assert "all equal" in python(WORKER, models, ALL, *variants)


def test_two_processes(models: Path) -> None:
    variants = ("tp=2", "tp=2,sp=1", "pp=2", "cp=2", "pp=2,recompute=full")
    assert "all equal" in torchrun(WORKER, 2, models, ALL, *variants)


def test_four_processes(models: Path) -> None:
    variants = ("tp=4,sp=1,recompute=selective", "tp=2,sp=1,pp=2", "tp=2,cp=2", "cp=4", "pp=4")
    assert "all equal" in torchrun(WORKER, 4, models, "llama_tied,qwen3", *variants)
