"""Loads a base with room for adapters, and the batcher that samples from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tlora_megatron.config.load import read_gang_config
from tlora_megatron.layers.adapter_bank import AdapterBank, BankShape
from tlora_megatron.layers.multi_adapter import attach
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.decoding_ops import DecodingOps
from tlora_megatron.ops.lora.kernel_choice import choose_ops
from tlora_megatron.runtime.backbone import know_base, open_backbone
from tlora_megatron.runtime.sampling.adapters import AdapterShelf
from tlora_megatron.runtime.sampling.batcher import Batcher, Words
from tlora_megatron.runtime.sampling.values import SamplerLimits
from tlora_megatron.training.data.tokenize import load_tokenizer, stop_tokens
from tlora_megatron.training.run.training_run import DTYPES

_CPU_TOKENS, _GPU_TOKENS = 2048, 8192
_CPU_BYTES, _GPU_SHARE = 512 << 20, 0.5


def open_batcher(base: Mapping[str, Any], limits: SamplerLimits) -> Batcher:
    """Loads a base and makes it ready for requests.

    Args:
        base: the section `base_model` of a configuration, its path absolute. Its dtype is that
            of training, too, so that both say the same log-probabilities.
    """
    on_gpu = torch.cuda.is_available()
    step_tokens = limits.step_tokens or (_GPU_TOKENS if on_gpu else _CPU_TOKENS)
    sections = {
        "base_model": dict(base),
        "run": {"micro_batch_tokens": step_tokens},
    }
    config = read_gang_config(sections, Path("/"), output_dir="/")
    known = know_base(config, (0, 1), refuses_gpt_oss="the base of a sampler")
    spec = known.spec
    if on_gpu and limits.memory_bytes is not None:
        share = limits.memory_bytes / torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    opened = open_backbone(config, known)
    held = frozenset(spec.peft_targets)
    dtype, device = DTYPES[config.base_model.dtype], opened.groups.device
    bank = AdapterBank(
        [site for site, _ in opened.linears],
        BankShape(targets=held, block_targets=held),
        dtype=dtype,
        device=device,
        ops=DecodingOps(choose_ops(device, dtype)),
    )
    attach(opened.linears, bank)
    # Not at the top: what needs no model needs no Megatron-core.
    from tlora_megatron.integrations.megatron.stepper import Stepper

    engine: Any = opened.engine
    cache_bytes = limits.cache_bytes
    if cache_bytes is None:
        cache_bytes = int(_GPU_SHARE * _room(limits)) if on_gpu else _CPU_BYTES
    stepper = Stepper(engine.model, spec, bank, cache_bytes=cache_bytes, step_tokens=step_tokens)
    shelf = AdapterShelf(bank, spec, limits.adapters)
    words = read_words(config.base_model.folder, spec)
    return Batcher(stepper, shelf, words, most_sequences=limits.sequences)


def _room(limits: SamplerLimits) -> int:
    """Bytes of the GPU that are left, of all or of the sampler's part."""
    if limits.memory_bytes is None:
        return torch.cuda.mem_get_info()[0]
    taken = torch.cuda.memory_reserved()
    if taken >= limits.memory_bytes:
        raise ValueError(
            f"--sampler-memory must hold the base, which takes {taken / 1e9:.1f} GB, and keys and "
            f"values, got {limits.memory_bytes / 1e9:g}"
        )
    return limits.memory_bytes - taken


def read_words(folder: Path, spec: ModelSpec) -> Words:
    """Reads the tokenizer of a base, and which of its tokens end a sequence."""
    tokenizer = load_tokenizer(folder)
    positions = spec.max_positions
    if spec.sliding_window is not None:  # the base runs without a window
        positions = min(positions, spec.sliding_window)
    return Words(
        tokenizer=tokenizer,
        eos=stop_tokens(tokenizer),
        vocab_size=spec.vocab_size,
        max_positions=positions,
    )
