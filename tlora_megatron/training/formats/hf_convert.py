"""Hugging Face weights as the Megatron tensors of one rank, rounded to FP8 where it asks for that.

A scale of FP8 codes is that of a whole row of the stored tensor, whatever columns the rank keeps:
codes do not depend on tensor parallelism.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import ExpertPart, ModelSpec
from tlora_megatron.ops.quantised.rows import decode_rows, encode_rows
from tlora_megatron.training.formats.hf_checkpoint import WeightSource
from tlora_megatron.training.formats.rank_tensors import QKV, RankTensor


class CodePlaces(NamedTuple):
    """Places of some rows in a rank's tensors."""

    codes: Tensor
    """uint8 `[units, rows, columns]`."""
    scales: Tensor
    """fp32 `[units, rows]`."""

    def put(self, rows_URK: Tensor, cols: slice | None) -> Tensor:
        """Quantises whole rows into their places; returns `[2]`: sums of squares of D - W, of W."""
        wide_TK = rows_URK.flatten(0, 1).float()
        quantised = encode_rows(wide_TK)
        codes = quantised.codes_TK.view(rows_URK.shape)
        self.codes.copy_(codes if cols is None else codes[..., cols])
        self.scales.copy_(quantised.scales.view(rows_URK.shape[:2]))
        errors_TK = decode_rows(quantised, torch.float32).sub_(wide_TK)
        return torch.stack([_squares(errors_TK), _squares(wide_TK)])


def _squares(values_TK: Tensor) -> Tensor:
    # No dot: cuBLAS takes 32 MiB of a Hopper GPU for each stream that calls it, and keeps them.
    return torch.linalg.vector_norm(values_TK, dim=1).double().square().sum()


@dataclass(slots=True)
class Rounding:
    """Sums of squares of D - W and of W over the codes of each linear."""

    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, squares: Tensor) -> None:
        """Adds what `CodePlaces.put` returned for some rows of a weight."""
        held = self.sums.get(name)
        self.sums[name] = squares if held is None else held + squares

    def join(self, others: Iterable[Rounding]) -> Rounding:
        """Adds the sums of others, whose streams have ended."""
        for other in others:
            for name, squares in other.sums.items():
                self.add(name, squares)
        return self

    def relative(self) -> dict[str, float]:
        """Returns |D - W| / |W| of every weight, of the rows that this rank has read."""
        sums = {name: value.tolist() for name, value in self.sums.items()}
        return {name: math.sqrt(error / max(of, 1e-30)) for name, (error, of) in sums.items()}


logger = logging.getLogger(__name__)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_TIED_ROWS = 8192
"""Rows of the two that are compared at a time."""


def hf_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the architecture under Hugging Face's name, with its shape.

    Of gpt-oss, whose files hold a layer's experts in one tensor, under the names that
    `gpt_oss_experts` gives to parts of it.
    """
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        _EMBEDDING: (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tied_embeddings:
        shapes[_HEAD] = (spec.vocab_size, hidden)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: shape for name, shape in layer_shapes(spec).items()}
    return shapes


def layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of a layer under its name in it, with its shape."""
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (spec.hidden_size,),
        "post_attention_layernorm.weight": (spec.hidden_size,),
    }
    for target in (*QKV, "o_proj"):
        shapes[f"self_attn.{target}.weight"] = spec.target_shape(target)
    shapes |= _mlp_shapes(spec)
    if spec.qkv_bias:
        shapes |= {f"self_attn.{target}.bias": spec.target_shape(target)[:1] for target in QKV}
    if spec.gpt_oss is not None:
        shapes |= {"self_attn.o_proj.bias": (spec.hidden_size,)}
        shapes |= {"self_attn.sinks": (spec.num_heads,)}
    if spec.qk_norm:
        shapes |= {f"self_attn.{n}.weight": (spec.head_dim,) for n in ("q_norm", "k_norm")}
    return shapes


def _mlp_shapes(spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    into, out = (spec.ffn_size, spec.hidden_size), (spec.hidden_size, spec.ffn_size)
    parts: dict[ExpertPart, tuple[int, ...]] = {"gate_proj": into, "up_proj": into}
    parts["down_proj"] = out
    experts = spec.experts
    if experts is None:
        return {f"mlp.{part}.weight": shape for part, shape in parts.items()}
    shapes: dict[str, tuple[int, ...]] = {}
    shapes[experts.stored_router] = (experts.num_experts, spec.hidden_size)
    if experts.glu is not None:
        shapes[experts.stored_router_bias] = (experts.num_experts,)
    for part, shape in parts.items():
        for number in range(experts.num_experts):
            shapes[experts.stored(number, part)] = shape
            if experts.glu is not None:
                shapes[experts.stored_bias(number, part)] = shape[:1]
        if spec.shared_ffn_size is not None:
            shapes[experts.stored_shared(part)] = spec.target_shape(f"shared_expert.{part}")
    if spec.shared_ffn_size is not None:
        shapes[experts.stored_shared_gate] = (1, spec.hidden_size)
    return shapes


def check_layout(spec: ModelSpec, layout: ParallelLayout) -> None:
    """Refuses a layout that does not divide the model."""
    tp_size, experts = layout.tp_size, spec.experts
    sizes = [
        ("num_heads", spec.num_heads, "tp_size", tp_size),
        ("num_kv_heads", spec.num_kv_heads, "tp_size", tp_size),
    ]
    if experts is None:
        sizes.append(("ffn_size", spec.ffn_size, "tp_size", tp_size))
    else:
        sizes.append(("ffn_size", spec.ffn_size, "expert_tp_size", layout.expert_tp))
        sizes.append(("num_experts", experts.num_experts, "ep_size", layout.ep_size))
    if spec.shared_ffn_size is not None:
        sizes.append(("the shared expert's ffn_size", spec.shared_ffn_size, "tp_size", tp_size))
    for name, size, divisor, count in sizes:
        if size % count:
            raise ValueError(f"{name} must be a multiple of {divisor}={count}, got {size}")
    layout.stage_layers(spec.num_layers, 0)


def check_weights(spec: ModelSpec, source: WeightSource) -> None:
    """Checks name and shape of every tensor of the architecture; tells of those that it lacks.

    Raises:
        ValueError: naming the first tensor that is missing or has another shape, or an output
            layer of its own where config.json ties it to the embedding.
    """
    shapes = hf_shapes(spec)
    for name, expected in shapes.items():
        shape = source.shape(name)
        if shape != expected:
            raise ValueError(f"{name} must have shape {list(expected)}, got {list(shape)}")
    _check_tied(spec, source)
    if others := [name for name in source.keys() if name not in shapes and _is_unread(name, spec)]:  # noqa: SIM118
        logger.warning(
            "the base's files hold %d tensors that a %s of %d layers does not have, and which have "
            "no effect: %s",
            len(others), spec.model_type, spec.num_layers, ", ".join(others[:3]),
        )  # fmt: skip


def _is_unread(name: str, spec: ModelSpec) -> bool:
    """False for what belongs to tensors that are read (scales of FP8), or follows from others."""
    last = name.rpartition(".")[2]
    is_read = "scale" in last or (spec.gpt_oss is not None and ".experts." in name)
    return not (is_read or last == "inv_freq" or name == _HEAD)


def _check_tied(spec: ModelSpec, source: WeightSource) -> None:
    """Refuses an output layer that differs from the embedding to which config.json ties it."""
    if not spec.tied_embeddings or _HEAD not in source.keys():  # noqa: SIM118
        return
    size = source.shape(_HEAD)
    parts = (slice(begin, begin + _TIED_ROWS) for begin in range(0, size[0], _TIED_ROWS))
    if size != source.shape(_EMBEDDING) or not all(
        torch.equal(source.read(_HEAD, rows), source.read(_EMBEDDING, rows)) for rows in parts
    ):
        raise ValueError(
            f"{_HEAD} must equal {_EMBEDDING} where tie_word_embeddings is true, got another; set "
            "tie_word_embeddings to false in config.json, or take the tensor out of the files"
        )


@torch.no_grad()
def draw_base(
    source: WeightSource,
    tensors: Iterable[RankTensor],
    parameters: Mapping[str, Tensor],
    scales: Mapping[str, Tensor],
) -> Rounding:
    """Fills the parameters that the tensors name, one at a time, as `base_reader.read_base`."""
    rounding = Rounding()
    for tensor in tensors:
        to, of = parameters[tensor.name], scales.get(tensor.name)
        if of is None:
            to.copy_(assemble(tensor, source))
            continue
        sums = []
        for piece in tensor.pieces:
            window = slice(piece.begin, piece.begin + piece.width)
            places = CodePlaces(tensor.units_of(to)[:, window], tensor.units_of(of)[:, window])
            rows = source.read(piece.source, piece.rows)
            sums.append(places.put(rows.view(*places.scales.shape, -1), piece.cols))
        rounding.add(tensor.name, torch.stack(sums).sum(0))
    return rounding


def assemble(tensor: RankTensor, source: WeightSource) -> Tensor:
    """Reads a rank's tensor; it has the dtype that its pieces promote to."""
    parts = [source.read(piece.source, piece.rows, piece.cols) for piece in tensor.pieces]
    if len(parts) == 1 and parts[0].shape == tensor.shape:
        return parts[0]
    dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
    whole = parts[0].new_empty(tensor.shape, dtype=dtype)
    whole[tensor.num_rows :] = 0
    units = tensor.units_of(whole)
    for piece, part in zip(tensor.pieces, parts, strict=True):
        places = units[:, piece.begin : piece.begin + piece.width]
        places.copy_(part.reshape(places.shape))
    return whole
