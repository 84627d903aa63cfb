"""One small GPTModel with adapters, by Megatron's local spec and by its Transformer Engine spec,
and its steps. A mode is a spec and what of Transformer Engine is on. All modes share weights,
adapters, data, dropout masks and core attention, so that what differs is rounding.
"""

from __future__ import annotations

import importlib.util
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from tests.helpers.built_model import output_of, whole_gradients
from tests.helpers.user_models import local_name, user_config
from tlora_megatron.config.job import LoraSpec
from tlora_megatron.integrations.megatron.built.model import (
    discover,
    freeze,
    install_packed_attention,
    record_stages,
)
from tlora_megatron.integrations.megatron.built.own_compute import use_own_compute
from tlora_megatron.integrations.megatron.layer.norm_and_rotary import RMSNorm
from tlora_megatron.layers.adapter_bank import Adapter, AdapterBank
from tlora_megatron.layers.multi_adapter import attach
from tlora_megatron.layers.slab import initial_factor
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.dropout import mix_ints
from tlora_megatron.ops.routing import Document, MicroBatchView, pack_micro_batch
from tlora_megatron.parallel.groups import ParallelGroups

NEEDS_TE = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="needs transformer_engine"
)
LORAS = (
    LoraSpec(rank=16, alpha=16),
    LoraSpec(rank=8, alpha=16, target_modules=("linear_qkv", "linear_fc1", "linear_fc2")),
    LoraSpec(rank=4, alpha=8, dropout=0.1, target_modules=("q_proj", "v_proj", "down_proj")),
)


class Mode(NamedTuple):
    te: bool = False
    black_box: bool = False
    """Adapters go around Megatron's own linears as they go around Transformer Engine's."""
    own: bool = False
    """Our kernels compute the layers."""
    fused_rope: bool = False
    fp8_recipe: str | None = None
    holds_fp8: bool = False
    """Weights are held in FP8 alone."""
    dtype: torch.dtype = torch.bfloat16
    recompute_modules: tuple[str, ...] = ()
    fp32_stream: bool = False
    foreign: str | None = None
    """Half of each layer, `mlp` or `self_attention`, that is of a class which nobody knows."""


MODES = {
    "fp32": Mode(dtype=torch.float32),
    "local": Mode(),
    "local-black-box": Mode(black_box=True),
    "local-own": Mode(own=True),
    "local-own-norms-again": Mode(own=True, recompute_modules=("layernorm",)),
    "te": Mode(te=True),
    "te-own": Mode(te=True, own=True),
    "te-fused-rope": Mode(te=True, fused_rope=True),
    "te-fp8": Mode(te=True, fused_rope=True, fp8_recipe="tensorwise"),
    "te-fp8-own": Mode(te=True, own=True, fp8_recipe="tensorwise"),
    "te-fp8-held-own": Mode(te=True, own=True, fp8_recipe="tensorwise", holds_fp8=True),
    "te-fp8-repeated-own": Mode(
        te=True, own=True, fp8_recipe="tensorwise", recompute_modules=("mlp",)
    ),
    "te-fp8-delayed": Mode(te=True, fused_rope=True, fp8_recipe="delayed"),
    "te-fp8-delayed-own": Mode(te=True, own=True, fp8_recipe="delayed"),
    "te-fp8-blockwise": Mode(te=True, fused_rope=True, fp8_recipe="blockwise"),
    "te-fp8-blockwise-own": Mode(te=True, own=True, fp8_recipe="blockwise"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    model: Any
    groups: ParallelGroups
    bank: AdapterBank
    spec: ModelSpec


def small_spec(num_layers: int, hidden_size: int) -> ModelSpec:
    """Llama-like, of heads of 128 (16 below a hidden size of 512), two to a key-value head."""
    head_dim = 128 if hidden_size >= 512 else 16
    heads = hidden_size // head_dim
    return ModelSpec(
        model_type="llama", num_layers=num_layers, hidden_size=hidden_size, num_heads=heads,
        num_kv_heads=heads // 2, head_dim=head_dim, ffn_size=hidden_size * 11 // 4, vocab_size=1024,
        max_positions=4096, norm_eps=1e-5, rope_theta=1e4,
    )  # fmt: skip


def build(mode: Mode, spec: ModelSpec, groups: ParallelGroups, source: Any = None) -> Subject:
    """Builds, freezes and attaches.

    Args:
        source: a model whose weights to take; None keeps what Megatron drew.
    """
    config = _config(mode, spec, groups)
    model: Any = GPTModel(
        config,
        _block(mode, config),
        vocab_size=spec.vocab_size,
        max_sequence_length=spec.max_positions,
        position_embedding_type="rope",
        rotary_base=int(spec.rope_theta),
    ).to(groups.device)
    _set_weights(model, source)
    freeze([model])
    install_packed_attention([model])
    linears = discover([model], spec, groups)
    groups = record_stages(groups, linears)
    if mode.foreign is not None:
        for layer in model.decoder.layers:
            half = getattr(layer, mode.foreign)
            half.__class__ = type("Foreign", (type(half),), {"__module__": __name__})
    if mode.own:
        compute = use_own_compute([model], linears, groups, spec.vocab_size)
        halves = spec.num_layers if mode.foreign else 0
        assert compute.layers == (spec.num_layers - halves, halves, 0), compute.line
    bank = AdapterBank([s for s, _ in linears], LORAS, dtype=mode.dtype, device=groups.device)
    attach(linears, bank, black_box=mode.black_box)
    return Subject(model=model.train(), groups=groups, bank=bank, spec=spec)


def _config(mode: Mode, spec: ModelSpec, groups: ParallelGroups) -> TransformerConfig:
    fp8: dict[str, Any] = {}
    if mode.fp8_recipe is not None:
        kind = "e4m3" if mode.fp8_recipe == "blockwise" else "hybrid"
        fp8 = {"fp8": kind, "fp8_recipe": mode.fp8_recipe, "fp8_param": mode.holds_fp8}
    return user_config(
        spec, layernorm_epsilon=spec.norm_eps, qk_layernorm=spec.qk_norm,
        tensor_model_parallel_size=groups.layout.tp_size,
        sequence_parallel=groups.layout.sequence_parallel, params_dtype=mode.dtype,
        pipeline_dtype=mode.dtype, bf16=mode.dtype == torch.bfloat16,
        apply_rope_fusion=mode.fused_rope, fp32_residual_connection=mode.fp32_stream,
        recompute_granularity="selective" if mode.recompute_modules else None,
        recompute_modules=list(mode.recompute_modules) or None, **fp8,
    )  # fmt: skip


def _block(mode: Mode, config: TransformerConfig) -> TransformerBlockSubmodules:
    if mode.te:
        layer, norm = te_layer(config.qk_layernorm)
    else:
        layer, norm = local_layer(config.qk_layernorm), RMSNorm
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=norm)


def local_layer(qk_norm: bool) -> Any:
    """Megatron's local spec of a layer; heads, if they are normed, by a norm that all modes share
    but for its rounding."""
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=qk_norm)
    if qk_norm:
        heads = layer.submodules.self_attention.submodules
        heads.q_layernorm = heads.k_layernorm = RMSNorm
    return layer


def te_layer(qk_norm: bool) -> tuple[Any, Any]:
    """Megatron's spec of a Transformer Engine layer, and the class of the final norm.

    Raises:
        ImportError: if Transformer Engine is not installed.
    """
    from megatron.core.extensions import transformer_engine
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    if not getattr(transformer_engine, "HAVE_TE", True):
        raise ImportError("transformer_engine must be installed for the modes te*")
    layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_norm)
    return layer, transformer_engine.TENorm


def _set_weights(model: Any, source: Any) -> None:
    """Takes the weights of `source`, or makes its own norms other than ones."""
    given = {} if source is None else dict(source.named_parameters())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if given:
                weight.copy_(given[local_name(name)])
            elif weight.dim() == 1:
                noise = torch.randn(weight.shape, generator=_generator(name)) * 0.1
                weight.copy_((1 + noise).to(weight.dtype))


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def install_adapters(
    subject: Subject, *, b_std: float, loudness: Sequence[float] = (1.0, 1.0, 1.0)
) -> None:
    """Puts one adapter a LoraSpec into the bank; `b_std=0` gives fresh ones.

    Args:
        loudness: multiplies each one's `lora_b`.
    """
    adapters = []
    for slot, lora in enumerate(LORAS):

        def whole(name: str, slot: int = slot, lora: LoraSpec = lora) -> Tensor:
            factor = initial_factor(subject.spec, name, lora, slot)
            if name.endswith("lora_b"):
                factor = torch.randn(factor.shape, generator=_generator(f"{slot}{name}"))
                factor *= b_std * loudness[slot]
            return factor

        slab = subject.bank.new_slab(lora)
        slab.load(whole)
        adapters.append(Adapter(name=f"job{slot}", lora=lora, slab=slab))
    subject.bank.install(adapters)


class Batch(NamedTuple):
    """A micro-batch on the device; all rows of it."""

    view: MicroBatchView
    tokens: Tensor
    labels: Tensor
    weights: Tensor
    """Weight of each row's loss; 0 in padding."""


def make_batch(step: int, num_tokens: int, spec: ModelSpec, device: torch.device) -> Batch:
    """Documents of every job: a token is followed by what the job's own table says.

    About an eighth of the rows is padding. A job's loss is the mean over its tokens.
    """
    draw = torch.Generator().manual_seed(step)
    shares = ((0, 0.3), (0, 0.07), (1, 0.2), (2, 0.13), (2, 0.18))
    documents, tokens, labels, weights = [], [], [], []
    for slot, share in shares:
        length = int(share * num_tokens)
        total = sum(int(s * num_tokens) for other, s in shares if other == slot)
        table = torch.randperm(spec.vocab_size, generator=torch.Generator().manual_seed(slot))
        row = torch.randint(spec.vocab_size // 8, (length,), generator=draw)
        documents.append(Document(slot=slot, length=length))
        tokens.append(row)
        labels.append(table[row])
        weights.append(torch.full((length,), 1.0 / total))
    padding = num_tokens - sum(len(row) for row in tokens)
    zeros = torch.zeros(padding, dtype=torch.long)
    view = pack_micro_batch(
        documents,
        num_slots=len(LORAS),
        num_tokens=num_tokens,
        dropout_keys=[mix_ints(slot, step) for slot in range(len(LORAS))],
    )
    return Batch(
        view,
        torch.cat([*tokens, zeros]).to(device),
        torch.cat([*labels, zeros]).to(device),
        torch.cat([*weights, torch.zeros(padding)]).to(device),
    )


def run(subject: Subject, batches: Sequence[Batch], *, targets_alone: bool = False) -> list[Tensor]:
    """One forward and backward of all micro-batches; each job's loss, summed over them, on TP 0.

    Gradients are left in the slabs.

    Args:
        targets_alone: padding has no loss, where the head can do without it.
    """
    losses = [torch.zeros((), device=subject.groups.device) for _ in LORAS]

    def step(iterator: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:
        batch = next(iterator)
        output = output_of(model, batch, targets_alone=targets_alone)

        def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            weighted = output.flatten().float() * batch.weights
            ends = batch.view.rows.ends
            for slot in range(len(LORAS)):
                losses[slot] += weighted[(0, *ends)[slot] : ends[slot]].detach().sum()
            return weighted.sum(), torch.ones((), dtype=torch.int, device=output.device), {}

        return output, loss

    get_forward_backward_func()(
        forward_step_func=step, data_iterator=iter(batches), model=[subject.model],
        num_microbatches=len(batches), seq_length=len(batches[0].tokens), micro_batch_size=1,
        forward_only=False,
    )  # fmt: skip
    return losses


def take_gradients(subject: Subject) -> list[dict[str, Tensor]]:
    """Every adapter's whole gradient by canonical name, fp32 on the CPU; the slabs' are zero then.

    Collective over the ranks, which are one tensor-parallel replica.
    """
    found = whole_gradients(subject.bank, subject.groups, subject.spec)
    for adapter in subject.bank.adapters:
        adapter.slab.zero_grad()
    return found
