"""One job trained by Hugging Face transformers and PEFT, as it is or sped up as users do."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from scripts.bench.harness.clock import Timing, timed

Stack = Literal["hf_peft", "hf_liger", "hf_compile"]
"""PEFT alone, with Liger's kernels for Llama, or compiled by torch."""
RANK = 16


def build_peft(
    model_path: Path, changes: dict[str, Any], *, fp32_factors: bool = False, **lora: Any
) -> Any:
    """A base with a LoRA of rank 16, weights drawn where they lie, in bf16 with sdpa.

    Args:
        changes: of the model's configuration.
        fp32_factors: PEFT's default over a bf16 base: the branch runs in fp32, and is slower.
        lora: what PEFT's configuration says besides, its targets at least.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(model_path), use_cache=False, **changes)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        base = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        adapter = LoraConfig(r=RANK, lora_alpha=2 * RANK, task_type="CAUSAL_LM", **lora)
        model = get_peft_model(base, adapter, autocast_adapter_dtype=fp32_factors)
    return model.train()


def run_peft(model: Any, batch: int, length: int, vocab_size: int, repeats: int) -> Timing | None:
    """Forward, backward and a fused AdamW step; every token is a target. None: out of memory."""
    device = next(model.parameters()).device
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4, fused=True)
    tokens = torch.randint(vocab_size, (batch, length), device=device)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    try:
        timing = timed(step, 3, repeats)
    except torch.OutOfMemoryError:
        return None
    finally:
        optimizer.zero_grad(set_to_none=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return timing._replace(tokens=batch * length * repeats)
