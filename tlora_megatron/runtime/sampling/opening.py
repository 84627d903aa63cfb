"""Opens a base for sampling, on this process alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tlora_megatron.config.load import read_gang_config
from tlora_megatron.layers.adapter_bank import AdapterBank, BankShape
from tlora_megatron.layers.multi_adapter import attach
from tlora_megatron.model.gpt_oss import refuse_gpt_oss
from tlora_megatron.model.quantisation import base_quantisation
from tlora_megatron.model.spec import ModelSpec, read_model_spec
from tlora_megatron.runtime.backbone import model_config, model_dir, open_backbone, ready_process
from tlora_megatron.runtime.own_replica import own_replica
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
        base: the section `base_model` of a configuration, its path absolute.

    On a CPU the weights are held in fp32, whatever the base says: bf16 is slower there, and the
    same weights in fp32 are exact.
    """
    on_gpu = torch.cuda.is_available()
    step_tokens = limits.step_tokens or (_GPU_TOKENS if on_gpu else _CPU_TOKENS)
    sections = {
        "base_model": dict(base) if on_gpu else {**base, "dtype": "float32"},
        "run": {"micro_batch_tokens": step_tokens},
    }
    config = read_gang_config(sections, Path("/"), output_dir="/")
    spec = read_model_spec(model_config(config))
    refuse_gpt_oss(spec.model_type, "the base of a sampler")
    quantisation = base_quantisation(config.base_model, spec)
    own = own_replica(config, rank=0, world_size=1)
    ready_process(config, own.layout)
    opened = open_backbone(config, spec, own, quantisation)
    held = frozenset(spec.peft_targets)
    bank = AdapterBank(
        [site for site, _ in opened.linears],
        BankShape(targets=held, block_targets=held),
        dtype=DTYPES[config.base_model.dtype],
        device=opened.groups.device,
    )
    attach(opened.linears, bank)
    # Not at the top: what needs no model needs no Megatron-core.
    from tlora_megatron.integrations.megatron.stepper import Stepper

    engine: Any = opened.engine
    stepper = Stepper(engine.model, spec, cache_bytes=_cache_bytes(limits), step_tokens=step_tokens)
    shelf = AdapterShelf(bank, spec, limits.adapters)
    words = read_words(model_dir(config), spec)
    return Batcher(stepper, shelf, words, most_sequences=limits.sequences)


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


def _cache_bytes(limits: SamplerLimits) -> int:
    if limits.cache_bytes is not None:
        return limits.cache_bytes
    if not torch.cuda.is_available():
        return _CPU_BYTES
    return int(_GPU_SHARE * torch.cuda.mem_get_info()[0])
