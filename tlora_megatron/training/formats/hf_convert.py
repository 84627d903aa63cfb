"""Hugging Face weights as the Megatron tensors of one tensor- and pipeline-parallel rank.

Only the rows and columns that a rank holds are read. Hugging Face keeps query, key and value (and
gate and up) apart; Megatron fuses them: `linear_qkv` holds, for every query group, its query heads,
then its key head, then its value head; `linear_fc1` holds a rank's gate rows, then its up rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tlora_megatron.layers.sites import fc1_row_order, qkv_row_order
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.training.formats.hf_checkpoint import HFCheckpoint, RandomWeights, WeightSource

__all__ = [
    "HFCheckpoint",
    "RandomWeights",
    "WeightSource",
    "check_layout",
    "check_weights",
    "fc1_row_order",
    "hf_shapes",
    "megatron_tensors",
    "padded_vocab_size",
    "qkv_row_order",
    "shard_range",
    "stage_layers",
]


_QKV = ("q_proj", "k_proj", "v_proj")


def hf_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the architecture under Hugging Face's name, with its shape."""
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(spec).items()}
    return shapes


def _layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (spec.hidden_size,),
        "post_attention_layernorm.weight": (spec.hidden_size,),
    }
    for target in (*_QKV, "o_proj"):
        shapes[f"self_attn.{target}.weight"] = spec.target_shape(target)
    for target in ("gate_proj", "up_proj", "down_proj"):
        shapes[f"mlp.{target}.weight"] = spec.target_shape(target)
    if spec.qkv_bias:
        shapes |= {f"self_attn.{target}.bias": spec.target_shape(target)[:1] for target in _QKV}
    if spec.qk_norm:
        shapes |= {f"self_attn.{n}.weight": (spec.head_dim,) for n in ("q_norm", "k_norm")}
    return shapes


def shard_range(size: int, tp_rank: int, tp_size: int) -> slice:
    """Rows (or columns) `tp_rank` holds when `size` of them are cut into `tp_size` equal runs."""
    part = size // tp_size
    return slice(tp_rank * part, (tp_rank + 1) * part)


def padded_vocab_size(spec: ModelSpec, tp_size: int) -> int:
    """Vocabulary rounded up to a multiple of `tp_size`."""
    return -(-spec.vocab_size // tp_size) * tp_size


def check_layout(spec: ModelSpec, layout: ParallelLayout) -> None:
    """Refuses a layout that does not divide the model evenly.

    Raises:
        ValueError: naming the size that does not divide.
    """
    for name, size in (
        ("num_heads", spec.num_heads),
        ("num_kv_heads", spec.num_kv_heads),
        ("ffn_size", spec.ffn_size),
    ):
        if size % layout.tp_size:
            raise ValueError(f"{name} must be a multiple of tp_size={layout.tp_size}, got {size}")
    if spec.num_layers % layout.pp_size:
        raise ValueError(
            f"num_layers must be a multiple of pp_size={layout.pp_size}, got {spec.num_layers}"
        )


def stage_layers(spec: ModelSpec, pp_rank: int, pp_size: int) -> range:
    """Global indices of one pipeline stage's layers."""
    run = shard_range(spec.num_layers, pp_rank, pp_size)
    return range(run.start, run.stop)


def check_weights(spec: ModelSpec, source: WeightSource) -> None:
    """Checks name and shape of every tensor of the architecture, reading none.

    Raises:
        ValueError: naming the first tensor that is missing or has another shape.
    """
    for name, expected in hf_shapes(spec).items():
        shape = source.shape(name)
        if shape != expected:
            raise ValueError(f"{name} must have shape {list(expected)}, got {list(shape)}")


def megatron_tensors(
    spec: ModelSpec,
    checkpoint: WeightSource,
    *,
    tp_rank: int,
    tp_size: int,
    layers: range,
    with_embedding: bool,
    with_output: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Yields name and value of every tensor of a rank's `GPTModel`, one at a time.

    Args:
        layers: global indices of this pipeline stage; produced names count from 0.
        with_embedding: whether the stage holds the embedding.
        with_output: whether it holds the final norm and the output layer (when tied, the
            embedding's values).

    Raises:
        ValueError: if a tensor is missing or its shape is not the architecture's.
    """
    check_weights(spec, checkpoint)
    vocab = shard_range(padded_vocab_size(spec, tp_size), tp_rank, tp_size)
    if with_embedding:
        embedding = _vocab_rows(checkpoint, "model.embed_tokens.weight", vocab)
        yield "embedding.word_embeddings.weight", embedding
    for local, layer in enumerate(layers):
        prefix = f"model.layers.{layer}."
        for name, value in _layer_tensors(spec, checkpoint, prefix, tp_rank, tp_size):
            yield f"decoder.layers.{local}.{name}", value
    if with_output:
        head = "model.embed_tokens.weight" if spec.tied_embeddings else "lm_head.weight"
        yield "decoder.final_layernorm.weight", checkpoint.read("model.norm.weight")
        yield "output_layer.weight", _vocab_rows(checkpoint, head, vocab)


def _vocab_rows(source: WeightSource, name: str, rows: slice) -> Tensor:
    """Rows of the padded vocabulary; those beyond the real one are zero."""
    vocab_size, hidden = source.shape(name)
    held = source.read(name, slice(min(rows.start, vocab_size), min(rows.stop, vocab_size)))
    padding = held.new_zeros(rows.stop - rows.start - held.shape[0], hidden)
    return torch.cat([held, padding]) if len(padding) else held


def _layer_tensors(
    spec: ModelSpec, source: WeightSource, prefix: str, tp_rank: int, tp_size: int
) -> Iterator[tuple[str, Tensor]]:
    q_rows, kv_rows, ffn = (
        shard_range(size, tp_rank, tp_size) for size in (spec.q_size, spec.kv_size, spec.ffn_size)
    )
    parts = tuple(zip(_QKV, (q_rows, kv_rows, kv_rows), strict=True))
    # What is read are the rank's rows in ascending order; the index picks by place among them.
    order = torch.argsort(torch.argsort(qkv_row_order(spec, tp_rank, tp_size)))
    for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
        names = ((f"{prefix}self_attn.{part}.{kind}", run) for part, run in parts)
        rows = torch.cat([source.read(name, run) for name, run in names])
        yield f"self_attention.linear_qkv.{kind}", rows[order.to(rows.device)]
    o_proj = source.read(f"{prefix}self_attn.o_proj.weight", cols=q_rows)
    yield "self_attention.linear_proj.weight", o_proj
    gate, up = (source.read(f"{prefix}mlp.{part}.weight", ffn) for part in ("gate_proj", "up_proj"))
    yield "mlp.linear_fc1.weight", torch.cat([gate, up])
    yield "mlp.linear_fc2.weight", source.read(f"{prefix}mlp.down_proj.weight", cols=ffn)
    norms = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
    if spec.qk_norm:
        norms |= {f"self_attention.{n}_layernorm": f"self_attn.{n}_norm" for n in ("q", "k")}
    for name, hf_name in norms.items():
        yield f"{name}.weight", source.read(f"{prefix}{hf_name}.weight")
