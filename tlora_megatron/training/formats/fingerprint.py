"""The fingerprint of a base: the log-probabilities that it gives to a fixed text, in fp32.

A model that was built from the same weights with other arguments (rotary base, epsilon of the
norms, ...) gives other ones. The arithmetic is that of transformers' Llama, Mistral, Qwen2, Qwen3,
Qwen2-MoE, Qwen3-MoE, Mixtral and gpt-oss, with one layer in memory, written down once more, so that
it shares no code with the trainers whose models it is held against.

Shapes: T tokens, H hidden features, N heads, G key-value heads, D head dimension, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tlora_megatron.model.spec import EXPERT_PARTS, ExpertPart, ExpertsSpec, ModelSpec
from tlora_megatron.ops.frozen.rms_norm import rms_norm_reference
from tlora_megatron.ops.frozen.rotary import inverse_frequencies, rotary_factor, rotate_halves
from tlora_megatron.training.formats.hf_checkpoint import WeightSource
from tlora_megatron.training.formats.hf_convert import layer_shapes

FILE_NAME = "base_fingerprint.json"
_FORMAT = 1
_NUM_TOKENS = 512
_BLOCK = 32
_LEAST_SPREAD = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """A base model's log-probabilities of a fixed sequence of tokens."""

    vocab_size: int
    tokens: tuple[int, ...]
    """The text; shorter than usual where the model's positions or window end before."""
    log_probs: tuple[float, ...]
    """Log-probability of every token but the first, given those before it; in fp32."""
    bf16_error: float
    """`relative_error` of the same model with everything rounded to bfloat16."""

    @property
    def spread(self) -> float:
        """Standard deviation of the log-probabilities."""
        return max(statistics.pstdev(self.log_probs), _LEAST_SPREAD)


def fingerprint_tokens(
    vocab_size: int, max_positions: int, sliding_window: int | None
) -> tuple[int, ...]:
    """The text for a vocabulary: low ids, which stand for frequent words, more often than high.

    Every fourth block of 32 tokens repeats an earlier one, 96 to 288 tokens before: copying is what
    language models do by position, so that wrong positions show.
    """
    tokens: list[int] = []
    for block in range(_NUM_TOKENS // _BLOCK):
        if block % 4 == 3:
            begin = (block - 3) // 2 * _BLOCK
            tokens += tokens[begin : begin + _BLOCK]
        else:
            tokens += [_token(block * _BLOCK + i, vocab_size) for i in range(_BLOCK)]
    return tuple(tokens[: min(_NUM_TOKENS, max_positions, sliding_window or _NUM_TOKENS)])


def _token(index: int, vocab_size: int) -> int:
    digest = hashlib.sha256(f"tlora fingerprint {index}".encode()).digest()
    uniform = int.from_bytes(digest[:7], "little") / 2**56
    return int(uniform * uniform * vocab_size)


def write_fingerprint(folder: Path, fingerprint: Fingerprint) -> None:
    document = {"format": _FORMAT, **asdict(fingerprint)}
    (folder / FILE_NAME).write_text(json.dumps(document))


def read_fingerprint(folder: Path) -> Fingerprint | None:
    """Reads a folder's fingerprint; None if it has none."""
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    try:
        return _parse(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} must be a fingerprint that `tlora convert` wrote for this base, got {error}; "
            f"convert the base again, or delete the file to train unchecked"
        ) from error


def _parse(document: dict[str, Any]) -> Fingerprint:
    if document["format"] != _FORMAT:
        raise ValueError(f"format {document['format']}")
    found = Fingerprint(
        vocab_size=int(document["vocab_size"]),
        tokens=tuple(map(int, document["tokens"])),
        log_probs=tuple(map(float, document["log_probs"])),
        bf16_error=float(document["bf16_error"]),
    )
    if len(found.tokens) != len(found.log_probs) + 1 or len(found.tokens) < 3:
        raise ValueError(f"{len(found.tokens)} tokens, {len(found.log_probs)} log-probabilities")
    if not all(0 <= token < found.vocab_size for token in found.tokens):
        raise ValueError(f"token {max(found.tokens)} of {found.vocab_size}")
    if not all(map(math.isfinite, (*found.log_probs, found.bf16_error))):
        raise ValueError("numbers that are not finite")
    return found


_ROUNDED_TOKENS = 128
"""The error of bfloat16 is measured on so many tokens: as good as on all, at a quarter of it."""
_VOCABULARY_ROWS = 16384
"""Rows of the output layer in memory."""

Round = Callable[[Tensor], Tensor]
_Weights = Callable[..., Tensor]
"""From Hugging Face's name of a tensor, and maybe rows of it, to fp32 values on the device."""


class _Pass(NamedTuple):
    """The forward of the same text in one precision."""

    round: Round
    hidden_TH: Tensor


def make_fingerprint(
    spec: ModelSpec,
    source: WeightSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_layer: Callable[[int], None] = lambda _: None,
) -> Fingerprint:
    """Computes a base's fingerprint.

    Args:
        dtype: weights are rounded to it first: the type in which the base is stored.

    Raises:
        ValueError: if the base gives a token no probability that is a number.
    """
    tokens = fingerprint_tokens(spec.vocab_size, spec.max_positions, spec.sliding_window)

    def weights(name: str, rows: slice | list[slice] | None = None) -> Tensor:
        return source.read(name, rows).to(device).to(dtype).float()

    exact, rounded = _log_probs(spec, weights, tokens, on_layer)
    if not exact.isfinite().all():
        raise ValueError("the base must give finite log-probabilities, got nan or inf in float32")
    fingerprint = Fingerprint(
        vocab_size=spec.vocab_size,
        tokens=tokens,
        log_probs=tuple(exact.tolist()),
        bf16_error=0.0,
    )
    difference = (rounded - exact[: len(rounded)]).square().mean().sqrt()
    return replace(fingerprint, bf16_error=float(difference) / fingerprint.spread)


@torch.no_grad()
def _log_probs(
    spec: ModelSpec, weights: _Weights, tokens: Sequence[int], on_layer: Callable[[int], None]
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of all tokens but the first, fp64: exact, and the first in bfloat16."""
    embedded_TH = weights("model.embed_tokens.weight", [slice(t, t + 1) for t in tokens[:-1]])
    passes = [_Pass(_keep, embedded_TH), _Pass(_to_bf16, _to_bf16(embedded_TH[:_ROUNDED_TOKENS]))]
    device = embedded_TH.device
    positions_T = torch.arange(len(tokens) - 1, device=device)
    half = positions_T[:, None].float() * inverse_frequencies(spec).to(device)
    angles_TD = torch.cat([half, half], dim=-1)
    for index in range(spec.num_layers):
        layer = {name: weights(f"model.layers.{index}.{name}") for name in layer_shapes(spec)}
        window = None if spec.gpt_oss is None else spec.gpt_oss.windows[index]
        passes = [
            p._replace(hidden_TH=_run_layer(spec, layer, p, angles_TD, window)) for p in passes
        ]
        on_layer(index)
    norm_H = weights("model.norm.weight")
    passes = [
        p._replace(hidden_TH=p.round(rms_norm_reference(p.hidden_TH, norm_H, spec.norm_eps)))
        for p in passes
    ]
    exact, rounded = _score(spec, weights, passes, torch.tensor(tokens[1:], device=device))
    return exact, rounded


def _run_layer(
    spec: ModelSpec, layer: Mapping[str, Tensor], now: _Pass, angles_TD: Tensor, window: int | None
) -> Tensor:
    """The residual stream behind a layer, `[T, H]`."""
    run, hidden_TH = now
    if run is not _keep:
        layer = {name: run(weight) for name, weight in layer.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return run(rms_norm_reference(x, layer[f"{name}.weight"], spec.norm_eps))

    def linear(x: Tensor, name: str) -> Tensor:
        return run(F.linear(x, layer[f"{name}.weight"], layer.get(f"{name}.bias")))

    def mlp(x: Tensor, name: str) -> Tensor:
        gate, up = (linear(x, f"{name}.{part}_proj") for part in ("gate", "up"))
        return linear(run(F.silu(gate) * up), f"{name}.down_proj")

    normed_TH = norm(hidden_TH, "input_layernorm")
    q, k, v = (
        linear(normed_TH, f"self_attn.{name}_proj").unflatten(-1, (-1, spec.head_dim))
        for name in "qkv"
    )
    if spec.qk_norm:
        q, k = norm(q, "self_attn.q_norm"), norm(k, "self_attn.k_norm")
    factor = rotary_factor(spec)
    cos_TD, sin_TD = (run(part[: len(q)] * factor) for part in (angles_TD.cos(), angles_TD.sin()))
    q, k = (run(rotate_halves(x[:, None], cos_TD, sin_TD)).squeeze(1) for x in (q, k))
    if spec.gpt_oss is None:
        attended_TH = run(_attend(q, k, v).flatten(1))
    else:
        attended_TH = run(_attend_beside(q, k, v, layer["self_attn.sinks"], window).flatten(1))
    hidden_TH = run(hidden_TH + linear(attended_TH, "self_attn.o_proj"))
    normed_TH = norm(hidden_TH, "post_attention_layernorm")
    if spec.experts is not None:
        out_TH = _run_experts(spec.experts, layer, run, normed_TH)
        if spec.shared_ffn_size is not None:
            weights_T1 = run(linear(normed_TH, "mlp.shared_expert_gate").sigmoid())
            out_TH = run(out_TH + run(weights_T1 * mlp(normed_TH, "mlp.shared_expert")))
        return run(hidden_TH + out_TH)
    return run(hidden_TH + mlp(normed_TH, "mlp"))


def _run_experts(
    spec: ExpertsSpec, layer: Mapping[str, Tensor], run: Round, x_TH: Tensor
) -> Tensor:
    """The weighted sum of each row's experts, `[T, H]`."""
    logits_TE = run(F.linear(x_TH, layer[spec.stored_router], layer.get(spec.stored_router_bias)))
    weights_TK, experts_TK = logits_TE.softmax(-1).topk(spec.top_k, dim=-1)
    if spec.normalizes:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    out_TH = torch.zeros_like(x_TH)
    for expert in range(spec.num_experts):
        rows, choices = (experts_TK == expert).nonzero(as_tuple=True)

        def linear(x: Tensor, part: ExpertPart, number: int = expert) -> Tensor:
            bias = layer.get(spec.stored_bias(number, part))
            return run(F.linear(x, layer[spec.stored(number, part)], bias))

        gate, up = (linear(x_TH[rows], part) for part in EXPERT_PARTS[:2])
        y = linear(run(_activate(spec, gate, up)), "down_proj")
        out_TH[rows] += y * weights_TK[rows, choices, None]
    return run(out_TH)


def _activate(spec: ExpertsSpec, gate: Tensor, up: Tensor) -> Tensor:
    if spec.glu is None:
        return F.silu(gate) * up
    gate, up = gate.clamp(max=spec.glu.limit), up.clamp(-spec.glu.limit, spec.glu.limit)
    return (up + 1) * gate * torch.sigmoid(spec.glu.alpha * gate)


def _attend(q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q_TND, k_TGD, v_TGD))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return attended[0].transpose(0, 1)


def _attend_beside(
    q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor, sinks_N: Tensor, window: int | None
) -> Tensor:
    """gpt-oss: a query sees a window, and its head's sink takes a share of the softmax."""
    group = q_TND.shape[1] // k_TGD.shape[1]
    q_NTD = q_TND.transpose(0, 1) * q_TND.shape[-1] ** -0.5
    k_NTD, v_NTD = (x.transpose(0, 1).repeat_interleave(group, dim=0) for x in (k_TGD, v_TGD))
    rows_T = torch.arange(len(q_TND), device=q_TND.device)
    behind_TT = rows_T[:, None] - rows_T
    seen_TT = (behind_TT >= 0) & (behind_TT < (window or len(rows_T)))
    scores_NTT = (q_NTD @ k_NTD.mT).masked_fill(~seen_TT, -torch.inf)
    shares_NTT = torch.exp(
        scores_NTT - torch.logaddexp(scores_NTT.logsumexp(-1), sinks_N[:, None])[..., None]
    )
    return (shares_NTT @ v_NTD).transpose(0, 1)


def _score(
    spec: ModelSpec, weights: _Weights, passes: Sequence[_Pass], labels_T: Tensor
) -> list[Tensor]:
    """Log-probabilities of the labels for each pass, reading the output layer in parts."""
    head = "model.embed_tokens.weight" if spec.tied_embeddings else "lm_head.weight"
    normalizers: list[list[Tensor]] = [[] for _ in passes]
    chosen = [p.hidden_TH.new_zeros(len(p.hidden_TH)) for p in passes]
    for begin in range(0, spec.vocab_size, _VOCABULARY_ROWS):
        end = min(begin + _VOCABULARY_ROWS, spec.vocab_size)
        rows_VH = weights(head, slice(begin, end))
        for (run, hidden_TH), parts, picked in zip(passes, normalizers, chosen, strict=True):
            logits_TV = run(hidden_TH @ run(rows_VH).T)
            parts.append(logits_TV.logsumexp(-1))
            places = labels_T[: len(hidden_TH)] - begin
            held = (places >= 0) & (places < end - begin)
            picked[held] = logits_TV[held, places[held]]
    return [
        (picked - torch.stack(parts).logsumexp(0)).double().cpu()
        for picked, parts in zip(chosen, normalizers, strict=True)
    ]


def _keep(x: Tensor) -> Tensor:
    return x


def _to_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()
