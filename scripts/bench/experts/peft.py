"""One job on all linears and routed experts, trained by Hugging Face transformers and PEFT."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from scripts.bench.harness.clock import Timing
from scripts.bench.harness.world import say
from scripts.bench.step.peft import run_peft
from tlora_megatron.model.spec import ModelSpec

SHAPES = ((1, 1024), (8, 1024), (16, 1024), (32, 1024), (64, 1024))
"""Sequences and their length: one of eight jobs' tokens, then as many as fit."""
RANK = 16
_REPEATS = 5


def measure_peft(path: Path, spec: ModelSpec) -> Iterator[tuple[int, int, Timing]]:
    """Yields batch, length and the time of steps, until memory ends.

    Args:
        path: config.json of the base.
        spec: its shape as it is measured, with fewer layers and a smaller vocabulary.
    """
    model = _build(path, spec)
    for batch, length in SHAPES:
        timing = run_peft(model, batch, length, spec.vocab_size, _REPEATS)
        if timing is None:
            say(f"PEFT: {batch} x {length} tokens do not fit")
            break
        yield batch, length, timing
    del model
    gc.collect()


def _build(path: Path, spec: ModelSpec) -> Any:
    """A base with random weights in bf16 and an adapter with factors in bf16, PEFT's fastest."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(
        str(path),
        use_cache=False,
        num_hidden_layers=spec.num_layers,
        vocab_size=spec.vocab_size,
    )
    with torch.device("cuda"):
        base = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    lora = LoraConfig(
        r=RANK,
        lora_alpha=2 * RANK,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base, lora, autocast_adapter_dtype=False).train()
