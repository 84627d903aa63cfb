"""Where every Hugging Face row goes in the Megatron tensors of one rank, without reading any.

Hugging Face keeps query, key and value (and gate and up) apart; Megatron fuses them: `linear_qkv`
holds, for every query group, its query heads, then its key head, then its value head; `linear_fc1`
holds a rank's gate rows, then its up rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tlora_megatron.model.spec import EXPERT_PARTS, ModelSpec

QKV = ("q_proj", "k_proj", "v_proj")


class Piece(NamedTuple):
    """Rows of one stored tensor, and their place in every unit of a Megatron tensor."""

    source: str
    rows: slice
    """Slice of dim 0; as many as the units have places for."""
    cols: slice | None
    """Slice of dim 1; None: all."""
    begin: int
    """Place of the first of `width` rows in a unit."""
    width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTensor:
    """One tensor of a rank's `GPTModel`: dim 0 is cut into equal units, pieces fill all of them."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    units: int = 1
    num_rows: int
    """Rows that have a source; those behind are zeros (padding of the vocabulary)."""

    def units_of(self, tensor: Tensor) -> Tensor:
        """Views a tensor of this shape, or its rows with a source, as `[units, rows, ...]`."""
        return tensor[: self.num_rows].unflatten(0, (self.units, self.num_rows // self.units))


class ExpertShare(NamedTuple):
    """The part of every layer's routed experts that a rank holds."""

    numbers: range
    """Numbers of its experts."""
    tp_rank: int
    tp_size: int
    """Ranks that share each of them."""


def shard_range(size: int, tp_rank: int, tp_size: int) -> slice:
    """Rows (or columns) `tp_rank` holds when `size` of them are cut into `tp_size` equal runs."""
    part = size // tp_size
    return slice(tp_rank * part, (tp_rank + 1) * part)


def padded_vocab_size(spec: ModelSpec, tp_size: int) -> int:
    """Vocabulary rounded up to a multiple of `tp_size`."""
    return -(-spec.vocab_size // tp_size) * tp_size


def rank_tensors(
    spec: ModelSpec,
    *,
    tp_rank: int,
    tp_size: int,
    layers: range,
    with_embedding: bool,
    with_output: bool,
    experts: ExpertShare | None = None,
) -> Iterator[RankTensor]:
    """Yields every tensor of a rank's `GPTModel`.

    Args:
        layers: global indices of this pipeline stage; names count from 0.
        with_output: whether it holds the final norm and the output layer (when tied, the
            embedding's values).
        experts: the rank's routed experts; None = all of them, cut as dense linears are.
    """
    if experts is None and spec.experts is not None:
        experts = ExpertShare(range(spec.experts.num_experts), tp_rank, tp_size)
    shard = functools.partial(shard_range, tp_rank=tp_rank, tp_size=tp_size)
    vocab = shard_range(padded_vocab_size(spec, tp_size), tp_rank, tp_size)
    embedding = "model.embed_tokens.weight"
    if with_embedding:
        yield _vocabulary("embedding.word_embeddings.weight", spec, embedding, vocab)
    for local, layer in enumerate(layers):
        to, source = f"decoder.layers.{local}.", f"model.layers.{layer}."
        yield from _attention(spec, to, source, tp_rank, tp_size)
        if experts is None:
            sources = [f"{source}mlp.{part}.weight" for part in EXPERT_PARTS]
            yield from _mlp(spec, f"{to}mlp.", "", sources, shard(spec.ffn_size))
        else:
            yield from _experts(spec, to, source, experts)
            yield from _shared_expert(spec, to, source, shard)
        yield from _norms(spec, to, source)
    if with_output:
        head = embedding if spec.tied_embeddings else "lm_head.weight"
        yield _single("decoder.final_layernorm.weight", "model.norm.weight", (spec.hidden_size,))
        yield _vocabulary("output_layer.weight", spec, head, vocab)


def _vocabulary(name: str, spec: ModelSpec, source: str, rows: slice) -> RankTensor:
    held = slice(min(rows.start, spec.vocab_size), min(rows.stop, spec.vocab_size))
    return _single(name, source, (rows.stop - rows.start, spec.hidden_size), held)


def _attention(
    spec: ModelSpec, to: str, source: str, tp_rank: int, tp_size: int
) -> Iterator[RankTensor]:
    q, kv = (shard_range(size, tp_rank, tp_size) for size in (spec.q_size, spec.kv_size))
    attention = f"{source}self_attn."
    groups, dim, hidden = spec.num_kv_heads // tp_size, spec.head_dim, spec.hidden_size
    heads = spec.num_heads // spec.num_kv_heads
    for kind, rest in (("weight", (hidden,)), ("bias", ()))[: 1 + spec.qkv_bias]:
        places = zip(QKV, (q, kv, kv), (0, heads, heads + 1), (heads, 1, 1), strict=True)
        yield RankTensor(
            name=f"{to}self_attention.linear_qkv.{kind}",
            shape=(groups * (heads + 2) * dim, *rest),
            pieces=tuple(
                Piece(f"{attention}{part}.{kind}", rows, None, begin * dim, width * dim)
                for part, rows, begin, width in places
            ),
            units=groups,
            num_rows=groups * (heads + 2) * dim,
        )
    proj = f"{to}self_attention.linear_proj.weight"
    yield _columns(proj, spec, f"{attention}o_proj.weight", q)
    if spec.gpt_oss is not None:
        bias = f"{to}self_attention.linear_proj.bias"
        yield _single(bias, f"{attention}o_proj.bias", (hidden,))
        of_rank = shard_range(spec.num_heads, tp_rank, tp_size)
        sinks = f"{to}self_attention.core_attention.sinks"
        yield _single(sinks, f"{attention}sinks", (spec.num_heads // tp_size,), of_rank)


def _experts(spec: ModelSpec, to: str, source: str, share: ExpertShare) -> Iterator[RankTensor]:
    experts = spec.experts
    assert experts is not None, "the model has none"
    router = (experts.num_experts, spec.hidden_size)
    yield _single(f"{to}mlp.router.weight", source + experts.stored_router, router)
    if experts.glu is not None:
        yield _single(f"{to}mlp.router.bias", source + experts.stored_router_bias, router[:1])
    rows, to = shard_range(spec.ffn_size, share.tp_rank, share.tp_size), f"{to}mlp.experts."
    for local, number in enumerate(share.numbers):
        weights = [source + experts.stored(number, part) for part in EXPERT_PARTS]
        yield from _mlp(spec, to, f"{local}", weights, rows)
        if experts.glu is None:
            continue
        *into, out = (source + experts.stored_bias(number, part) for part in EXPERT_PARTS)
        yield _gate_and_up(f"{to}linear_fc1.bias{local}", spec, into, rows, is_bias=True)
        # Of ranks that share an expert, the first one adds the bias of its output.
        held = slice(0, spec.hidden_size if rows.start == 0 else 0)
        yield _single(f"{to}linear_fc2.bias{local}", out, (spec.hidden_size,), held)


def _shared_expert(
    spec: ModelSpec, to: str, source: str, shard: Callable[[int], slice]
) -> Iterator[RankTensor]:
    if spec.experts is None or spec.shared_ffn_size is None:
        return
    sources = [source + spec.experts.stored_shared(part) for part in EXPERT_PARTS]
    to = f"{to}mlp.shared_experts."
    yield from _mlp(spec, to, "", sources, shard(spec.shared_ffn_size))
    sigmoid = source + spec.experts.stored_shared_gate
    yield _single(f"{to}gate_weight", sigmoid, (1, spec.hidden_size))


def _mlp(
    spec: ModelSpec, to: str, number: str, sources: Sequence[str], rows: slice
) -> Iterator[RankTensor]:
    *into, out = sources
    yield _gate_and_up(f"{to}linear_fc1.weight{number}", spec, into, rows)
    yield _columns(f"{to}linear_fc2.weight{number}", spec, out, rows)


def _gate_and_up(
    name: str, spec: ModelSpec, sources: Sequence[str], rows: slice, *, is_bias: bool = False
) -> RankTensor:
    size = rows.stop - rows.start
    return RankTensor(
        name=name,
        shape=(2 * size,) if is_bias else (2 * size, spec.hidden_size),
        pieces=tuple(
            Piece(source, rows, None, begin, size)
            for source, begin in zip(sources, (0, size), strict=True)
        ),
        num_rows=2 * size,
    )


def _columns(name: str, spec: ModelSpec, source: str, cols: slice) -> RankTensor:
    return _single(name, source, (spec.hidden_size, cols.stop - cols.start), cols=cols)


def _norms(spec: ModelSpec, to: str, source: str) -> Iterator[RankTensor]:
    names = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
    for name, stored in names.items():
        yield _single(f"{to}{name}.weight", f"{source}{stored}.weight", (spec.hidden_size,))
    for part in ("q", "k") if spec.qk_norm else ():
        name, stored = f"self_attention.{part}_layernorm", f"self_attn.{part}_norm"
        yield _single(f"{to}{name}.weight", f"{source}{stored}.weight", (spec.head_dim,))


def _single(
    name: str,
    source: str,
    shape: tuple[int, ...],
    rows: slice | None = None,
    cols: slice | None = None,
) -> RankTensor:
    """A tensor of one piece: rows and columns of what is stored; None takes all of them."""
    rows = slice(0, shape[0]) if rows is None else rows
    count = rows.stop - rows.start
    piece = Piece(source, rows, cols, 0, count)
    return RankTensor(name=name, shape=shape, pieces=(piece,), num_rows=count)
