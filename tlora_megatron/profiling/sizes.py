"""The shapes that `tlora profile` measures: those of Llama-3.1 8B and 70B, or tiny ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tlora_megatron.model.spec import LINEAR_TARGETS, ModelSpec
from tlora_megatron.planner.cost.adapter_sizes import local_shape


def _llama(hidden: int, heads: int, kv_heads: int, ffn: int, head_dim: int = 128) -> ModelSpec:
    return ModelSpec(
        model_type="llama",
        num_layers=1,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=ffn,
        vocab_size=1024,
        max_positions=131072,
        norm_eps=1e-5,
        rope_theta=5e5,
    )


LLAMA_8B = _llama(4096, 32, 8, 14336)
LLAMA_70B = _llama(8192, 64, 8, 28672)
LLAMA_70B_TP4 = _llama(8192, 16, 2, 7168)
"""A tensor-parallel rank's shard of 70B as a model of its own: its linears have the same sizes."""
_VOCABULARY = 128256
_TINY = _llama(64, 4, 2, 96, 16)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileSizes:
    gemm_shapes: tuple[tuple[int, int], ...]
    """Shapes `(columns, inner)`, most important first."""
    gemm_rows: tuple[int, ...]
    fp8_shapes: tuple[tuple[int, int], ...]
    fp8_rows: tuple[int, ...]
    head_shapes: tuple[tuple[int, int], ...]
    head_rows: tuple[int, ...]
    attention_lengths: tuple[int, ...]
    attention_tokens: int
    """Tokens of all sequences together."""
    lora_specs: tuple[ModelSpec, ...]
    lora_tokens: tuple[int, ...]
    lora_adapters: tuple[int, ...]
    layer_spec: ModelSpec
    """Of layers, and of their attention."""
    layer_tokens: int
    few_tokens: int
    """Number of tokens so small that only the host's work counts."""
    copy_bytes: int
    collective_bytes: tuple[int, ...]


FULL = ProfileSizes(
    gemm_shapes=tuple(
        dict.fromkeys(
            local_shape(spec, linear, tp_size)
            for tp_size in (1, 2, 4, 8)
            for spec in (LLAMA_8B, LLAMA_70B)
            for linear in LINEAR_TARGETS
        )
    ),
    gemm_rows=(128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384),
    fp8_shapes=tuple(
        dict.fromkeys(
            local_shape(spec, linear, tp_size)
            for spec, tp_size in ((LLAMA_8B, 1), (LLAMA_70B, 4))
            for linear in LINEAR_TARGETS
        )
    ),
    fp8_rows=(512, 2048, 4096, 8192, 16384),
    head_shapes=tuple(
        (_VOCABULARY // tp_size, spec.hidden_size)
        for tp_size in (1, 2, 4, 8)
        for spec in (LLAMA_8B, LLAMA_70B)
    ),
    head_rows=(512, 1024),
    attention_lengths=(64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    attention_tokens=8192,
    lora_specs=(LLAMA_8B, LLAMA_70B_TP4),
    lora_tokens=(8192, 2048, 16384),
    lora_adapters=(4, 1, 16, 64),
    layer_spec=LLAMA_8B,
    layer_tokens=8192,
    few_tokens=256,
    copy_bytes=2**30,
    collective_bytes=tuple(2**n for n in (14, 17, 20, 22, 23, 24, 25, 26, 27, 28)),
)
TINY = replace(
    FULL,
    gemm_shapes=tuple(local_shape(_TINY, linear, 1) for linear in LINEAR_TARGETS),
    gemm_rows=(16, 64, 128),
    fp8_shapes=(),
    fp8_rows=(),
    head_shapes=((1024, 64),),
    head_rows=(16,),
    attention_lengths=(8, 32),
    attention_tokens=64,
    lora_specs=(_TINY,),
    lora_tokens=(64, 128),
    lora_adapters=(1, 3),
    layer_spec=_TINY,
    layer_tokens=128,
    few_tokens=16,
    copy_bytes=2**22,
    collective_bytes=(2**12, 2**16),
)
"""Sizes that take seconds on one CPU core."""
