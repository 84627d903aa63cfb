"""One job trained by Hugging Face transformers and PEFT, as it is or sped up as users do."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from scripts.bench.harness.clock import Timing, timed

Stack = Literal["hf_peft", "hf_liger", "hf_compile"]
"""PEFT alone, with Liger's kernels for Llama, or compiled by torch."""


def build_peft(
    model_path: Path,
    layers: int | None,
    rank: int,
    dropout: float,
    *,
    fp32_factors: bool,
    stack: Stack = "hf_peft",
) -> Any:
    """Llama with a LoRA on all its linears, weights drawn on the GPU, in bf16 with sdpa.

    Args:
        fp32_factors: PEFT's default over a bf16 base: the branch runs in fp32, and is slower.
        stack: Liger's kernels take the place of Llama's in this process for good.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    if stack == "hf_liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    shrunk = {} if layers is None else {"num_hidden_layers": layers}
    config = AutoConfig.from_pretrained(str(model_path), use_cache=False, **shrunk)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        base = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        lora = LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            lora_dropout=dropout,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(base, lora, autocast_adapter_dtype=fp32_factors)
    model.train()
    return torch.compile(model, dynamic=False) if stack == "hf_compile" else model


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
