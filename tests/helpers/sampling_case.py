"""Bases with adapters for tests of sampling, and Hugging Face's own generation from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.helpers.tiny_models import random_factors
from tlora_megatron.config.job import EXPERT_TARGETS, SHARED_EXPERT_TARGETS, LoraSpec
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.runtime.sampling.batcher import Batcher, open_batcher
from tlora_megatron.runtime.sampling.values import Answer, Piece, Prompt, SamplerLimits, gather
from tlora_megatron.training.formats.peft import export_adapter

ATTENTION, EVERYTHING = ("q_proj", "v_proj"), (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
)  # fmt: skip
LORAS: Mapping[str, LoraSpec] = {
    "attention": LoraSpec(rank=4, alpha=16.0, target_modules=ATTENTION),
    "everything": LoraSpec(rank=10, alpha=10.0, target_modules=EVERYTHING),
    "mlp": LoraSpec(rank=3, alpha=6.0, target_modules=("up_proj", "down_proj")),
}

OVER_EXPERTS: Mapping[str, LoraSpec] = {
    "attention": LORAS["attention"],
    "everything": LoraSpec(
        rank=10, alpha=10.0, expert_rank=3, target_modules=(*EVERYTHING[:4], *EXPERT_TARGETS)
    ),
    "mlp": LoraSpec(rank=3, alpha=6.0, expert_sharing="outer", target_modules=EXPERT_TARGETS),
}
OVER_SHARED: Mapping[str, LoraSpec] = {
    "attention": LORAS["attention"],
    "everything": LoraSpec(
        rank=10, alpha=10.0, target_modules=(*EVERYTHING[:4], *SHARED_EXPERT_TARGETS)
    ),
    "mlp": LoraSpec(rank=3, alpha=6.0, target_modules=SHARED_EXPERT_TARGETS[1:]),
}
"""Beside a shared expert PEFT loads nothing on the others."""


def write_adapters(base: Path, folder: Path, first_seed: int = 0) -> dict[str, str]:
    """Writes random adapters that change what the base says; returns their folders by name."""
    spec = read_model_spec(base / "config.json")
    loras = LORAS if spec.experts is None else OVER_EXPERTS
    if spec.shared_ffn_size is not None:
        loras = OVER_SHARED
    for seed, (name, lora) in enumerate(loras.items(), first_seed):
        factors = random_factors(spec, lora, seed=seed, b_std=0.1)
        export_adapter(folder / name, lora=lora, factors=factors, model=spec, base_model=str(base))
    return {name: str(folder / name) for name in loras}


@contextmanager
def opened(base: Path, dtype: str = "float32", **limits: Any) -> Iterator[Batcher]:
    """Opens a base for sampling in this process, and takes Megatron's groups down behind it."""
    try:
        yield open_batcher({"path": str(base), "dtype": dtype}, SamplerLimits(**limits))
    finally:
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()


def sample(batcher: Batcher, prompts: Sequence[Prompt]) -> list[Answer]:
    """Runs prompts together until all have ended."""
    pieces: list[Piece | ValueError] = []
    for number, prompt in enumerate(prompts):
        batcher.add(batcher.request(prompt, number, seed=number, tell=pieces.append))
    while batcher.has_work:
        batcher.step()
    refused = [piece for piece in pieces if isinstance(piece, ValueError)]
    if refused:
        raise refused[0]
    return gather(prompts, [piece for piece in pieces if isinstance(piece, Piece)])


class Reference:
    """The base in transformers, with an adapter by PEFT."""

    def __init__(self, base: Path, adapter: str | None, dtype: torch.dtype = torch.float32) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=dtype).eval()
        if adapter is not None:
            self.model = PeftModel.from_pretrained(self.model, adapter).eval()

    @torch.no_grad()
    def generate(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        """The greedy continuation."""
        out = self.model.generate(
            input_ids=torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return out[0, len(tokens) :].tolist()

    @torch.no_grad()
    def logprobs(self, tokens: Sequence[int]) -> Tensor:
        """Log-probability of each token but the first, fp32."""
        logits = self.model(input_ids=torch.tensor([tokens])).logits[0, :-1].float()
        index = torch.tensor(tokens[1:])[:, None]
        return torch.log_softmax(logits, dim=-1).gather(1, index)[:, 0]


def greedy(prompt: Prompt, max_tokens: int) -> Prompt:
    """The same prompt, always the likeliest token."""
    return replace(prompt, params=replace(prompt.params, temperature=0.0, max_tokens=max_tokens))
