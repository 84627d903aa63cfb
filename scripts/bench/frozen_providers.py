"""Ways to compute the frozen backbone's parts: the project's, and what else one could take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from tlora_megatron.layers import vocabulary_head as head_module
from tlora_megatron.layers.vocabulary_head import VocabularyHead
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.ops.frozen.qkv_rotary import rotate_halves, unpack_qkv, unpack_qkv_reference
from tlora_megatron.ops.frozen.rms_norm import add_rms_norm
from tlora_megatron.ops.frozen.swiglu import swiglu, swiglu_reference
from tlora_megatron.ops.frozen.varlen_attention import CumulativeLengths, varlen_attention
from tlora_megatron.parallel.groups import ParallelGroups

HIDDEN, FFN, HEADS, GROUPS, DIM, VOCABULARY = 4096, 14336, 32, 8, 128, 128256
EPS = 1e-5
_VARLEN_HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


class Provider(NamedTuple):
    """One way to compute a part; returns a tuple of tensors."""

    name: str
    run: Callable[..., tuple[Tensor, ...]]


class Case(NamedTuple):
    """A part at one size."""

    name: str
    inputs: Sequence[Tensor]
    """bf16; every one gets a gradient."""
    reference: Callable[..., tuple[Tensor, ...]]
    """In the dtype of its inputs."""
    providers: Sequence[Provider]
    moved_bytes: int
    """What forward and backward must read and write at least."""

    def upstream(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """The same gradients of the outputs at every call, whatever their dtype."""
        return [_upstream(tuple(out.shape)).to(out) for out in outputs]


_UPSTREAM: dict[tuple[int, ...], Tensor] = {}


def _upstream(shape: tuple[int, ...]) -> Tensor:
    if shape not in _UPSTREAM:
        _UPSTREAM[shape] = _draw(*shape)
    return _UPSTREAM[shape]


def _draw(*shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    drawn = torch.randn(*shape, generator=generator, device="cuda")
    return (drawn * scale).bfloat16()


def norm(tokens: int, device: torch.device) -> Iterator[Case]:
    """Residual sum and RMSNorm; both outputs are used, so backward adds their gradients."""
    weight = 1 + _draw(HIDDEN, scale=0.1)

    def eager(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + x
        normed = F.rms_norm(total, (HIDDEN,), eps=EPS)
        return total, normed * weight.to(total.dtype)

    def torch_weight(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + x
        return total, F.rms_norm(total, (HIDDEN,), weight=weight, eps=EPS)

    inputs = [_draw(tokens, 1, HIDDEN), _draw(tokens, 1, HIDDEN).flip(0).contiguous()]
    yield Case(
        "norm",
        inputs,
        eager,
        [
            Provider("eager", eager),
            Provider("torch, weight fused", torch_weight),
            Provider("torch.compile", torch.compile(eager, dynamic=True)),
            Provider("tlora", lambda x, r: add_rms_norm(x, r, weight, EPS)),
        ],
        8 * inputs[0].nbytes,
    )


def swiglu_part(tokens: int, device: torch.device) -> Iterator[Case]:
    """Megatron's own is torch.compile over a forward and a backward written by hand."""
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    x = _draw(tokens, 1, 2 * FFN)
    yield Case(
        "swiglu",
        [x],
        lambda x: (swiglu_reference(x),),
        [
            Provider("eager", lambda x: (swiglu_reference(x),)),
            Provider("megatron", lambda x: (bias_swiglu_impl(x, None),)),
            Provider("tlora", lambda x: (swiglu(x),)),
        ],
        4 * x.nbytes,
    )


def heads(tokens: int, device: torch.device) -> Iterator[Case]:
    """`copied` sorts first, rotates then and repeats keys and values for the query heads."""
    positions = torch.arange(tokens, device=device) % 1024
    frequencies = 500000.0 ** -(torch.arange(0, DIM, 2, device=device) / DIM)
    angles = (positions[:, None] * frequencies).repeat(1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    rotate = torch.compile(rotate_halves, dynamic=True)

    def copied(mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = mixed.split([HEADS // GROUPS, 1, 1], dim=2)
        query = rotate(query.reshape(tokens, 1, HEADS, DIM), cos, sin).squeeze(1)
        key = rotate(key.transpose(1, 2), cos, sin).squeeze(1)
        return query, key, value.squeeze(2)

    def reference(mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return unpack_qkv_reference(mixed, cos.to(mixed.dtype), sin.to(mixed.dtype))

    mixed = _draw(tokens, GROUPS, HEADS // GROUPS + 2, DIM)
    yield Case(
        "heads",
        [mixed],
        reference,
        [
            Provider("copied", copied),
            Provider("tlora", lambda mixed: unpack_qkv(mixed, cos, sin)),
        ],
        4 * mixed.nbytes,
    )


def attention(tokens: int, device: torch.device) -> Iterator[Case]:
    """Causal, inside documents. `repeated` gives every query head keys and values of its own."""
    ragged = [tokens * share // 64 for share in (1, 2, 3, 4, 5, 6, 7, 9, 11)]
    ragged.append(tokens - sum(ragged))
    mixes = {"16 even": [tokens // 16] * 16, "ragged": ragged, "4 even": [tokens // 4] * 4}
    for name, lengths in mixes.items():
        yield _attention_case(name, lengths, tokens, device)


def _attention_case(name: str, lengths: list[int], tokens: int, device: torch.device) -> Case:
    ends = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    cumulative = CumulativeLengths(ends, ends, max(lengths), max(lengths))
    scale = DIM**-0.5

    def reference(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
        parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        outs = [
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in part), is_causal=True, enable_gqa=True
            )
            for part in parts
        ]
        return (torch.cat([out[0].transpose(0, 1) for out in outs]),)

    def plain(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor]:
        args = (ends, ends, max(lengths), max(lengths))
        out = varlen_attn(q, k, v, *args, scale=scale, window_size=(-1, 0), **options)
        assert isinstance(out, Tensor)
        return (out,)

    def repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
        k, v = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (k, v))
        return plain(q, k, v)

    def grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
        return plain(q, k, v, **({"enable_gqa": True} if _VARLEN_HAS_GQA else {}))

    q, k, v = _draw(tokens, HEADS, DIM), *(_draw(tokens, GROUPS, DIM, scale=s) for s in (1, 0.9))
    return Case(
        f"attention, {name}",
        [q, k, v],
        reference,
        [
            Provider("repeated, atomics", repeated),
            Provider("grouped, atomics", grouped),
            Provider("tlora", lambda q, k, v: (varlen_attention(q, k, v, cumulative, scale),)),
        ],
        5 * q.nbytes + 5 * k.nbytes + 5 * v.nbytes,
    )


def head(tokens: int, device: torch.device) -> Iterator[Case]:
    """Output layer and loss. `eager` is fp32 logits of all rows, as Megatron's own loss takes."""
    weight = _draw(VOCABULARY, HIDDEN, scale=HIDDEN**-0.5)
    labels = torch.randint(VOCABULARY, (tokens,), device=device)
    groups: Any = ParallelGroups(
        layout=ParallelLayout(),
        tp_rank=0, pp_rank=0, cp_rank=0, dp_rank=0,
        tp_group=None, dp_cp_group=None, model_group=None,  # type: ignore[arg-type]
        device=device,
    )  # fmt: skip
    holder = torch.nn.Linear(1, 1)
    holder.weight = torch.nn.Parameter(weight, requires_grad=False)
    vocabulary = VocabularyHead(holder, VOCABULARY, groups)
    for share in (1.0, 0.5):
        rows = (torch.arange(tokens, device=device) % 2 < 2 * share).nonzero().flatten()
        yield _head_case(f"head, {share:.0%} targets", vocabulary, rows, labels)


def _head_case(name: str, vocabulary: VocabularyHead, rows: Tensor, labels: Tensor) -> Case:
    weight, tokens = vocabulary.weight_VH, len(labels)
    is_target = torch.zeros(tokens, device=labels.device).index_fill_(0, rows, 1.0)

    def eager(hidden: Tensor) -> tuple[Tensor]:
        logits = F.linear(hidden[:, 0], weight.to(hidden.dtype)).float()
        return (F.cross_entropy(logits, labels, reduction="none") * is_target,)

    def chunked(rows_at_once: int) -> Callable[[Tensor], tuple[Tensor]]:
        def run(hidden: Tensor) -> tuple[Tensor]:
            head_module.ROWS_AT_ONCE = rows_at_once
            return (vocabulary.losses(hidden, rows, labels),)

        return run

    gemm_bytes = 2 * 2 * len(rows) * VOCABULARY
    return Case(
        name,
        [_draw(tokens, 1, HIDDEN)],
        eager,
        [Provider("eager", eager)]
        + [Provider(f"tlora, {n} rows", chunked(n)) for n in (512, 1024, 2048, 4096)],
        2 * gemm_bytes,
    )


PARTS: dict[str, Callable[[int, torch.device], Iterator[Case]]] = {
    "norm": norm,
    "swiglu": swiglu_part,
    "heads": heads,
    "attention": attention,
    "head": head,
}
