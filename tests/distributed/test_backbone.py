"""The Megatron backbone equals Hugging Face's models, in every layout, on packed odd documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.distributed.backbone_logits import RANDOM_SEED
from tests.helpers.standing_world import forked, world
from tests.helpers.tiny_models import load_peer, make_tiny_model, to_mxfp4
from tlora_megatron.integrations.megatron import process_groups
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.training.formats.hf_checkpoint import RandomWeights
from tlora_megatron.training.formats.hf_convert import hf_shapes

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
    # Windows, sinks, biases everywhere, YaRN, and experts with a limit that values meet.
    "gpt_oss": {"model_type": "gpt_oss"},
    "gpt_oss_mxfp4": {"model_type": "gpt_oss", "num_hidden_layers": 2},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models, each with its `reference.pt`; an odd vocabulary, so TP has to pad."""
    root = tmp_path_factory.mktemp("models")
    for name, options in MODELS.items():
        directory = make_tiny_model(root / name, vocab_size=127, **options)
        if name.endswith("mxfp4"):
            to_mxfp4(directory)  # transformers decodes it, too
        model = load_peer(directory)
        batches = [reference(model, lens, seed) for seed, lens in enumerate(PACKED_LENGTHS)]
        torch.save(batches, directory / "reference.pt")
    draw_weights(root / "drawn")
    return root


def draw_weights(directory: Path) -> None:
    """A folder without weights; the reference has those that `RANDOM_SEED` draws."""
    make_tiny_model(directory, "qwen2", vocab_size=127)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    (directory / "model.safetensors").unlink()
    shapes = hf_shapes(read_model_spec(directory / "config.json"))
    weights = RandomWeights(
        shapes, seed=RANDOM_SEED, device=torch.device("cpu"), dtype=torch.float32
    )
    model.load_state_dict({name: weights.read(name) for name in shapes})
    torch.save([reference(model, PACKED_LENGTHS[0], 0)], directory / "reference.pt")


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
        "ids": ids, "lengths": list(lengths), "weights": weights, "logits": logits.detach(),
        "grads": grads,
    }  # fmt: skip


ALL = ",".join((*MODELS, "drawn"))


def test_one_process_without_torchrun(models: Path) -> None:
    variants = ("", "recompute=full", "recompute=selective")
    assert "all equal" in forked(WORKER, models, ALL, *variants)


def test_two_processes(models: Path) -> None:
    variants = ("tp=2", "tp=2,sp=1", "pp=2", "cp=2", "pp=2,recompute=full")
    assert "all equal" in world(WORKER, 2, models, ALL, *variants)


def test_four_processes(models: Path) -> None:
    variants = ("tp=4,sp=1,recompute=selective", "tp=2,sp=1,pp=2", "tp=2,cp=2", "cp=4", "pp=4")
    assert "all equal" in world(WORKER, 4, models, "llama_tied,qwen3,drawn", *variants)


def test_halves_compute_what_modules_do_under_context_parallelism() -> None:
    assert "all equal" in world(WORKER.with_name("context_halves_worker.py"), 2)


def test_a_world_of_another_size_than_the_layout_is_refused() -> None:
    code = (
        "from tlora_megatron.integrations.megatron.process_groups import initialize_parallel\n"
        "from tlora_megatron.model.layout import ParallelLayout\n"
        "initialize_parallel(ParallelLayout(tp_size=2))"
    )
    with pytest.raises(AssertionError, match=r"ValueError: world size must be 2 for .*, got 1"):
        forked("-c", code)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    rule = r"processes a node must be at most its 1 GPUs, got local rank 1"
    with pytest.raises(ValueError, match=rule):
        process_groups._bind_gpu()
