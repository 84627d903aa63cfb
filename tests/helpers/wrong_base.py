"""GPTModels over one base's weights: as its config.json says, and with one thing wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)

from tests.helpers.user_models import local_name
from tlora_megatron.integrations.megatron.built.model import freeze, install_packed_attention
from tlora_megatron.integrations.megatron.layer.core_attention import PackedCoreAttention
from tlora_megatron.integrations.megatron.layer.norm_and_rotary import RMSNorm
from tlora_megatron.integrations.megatron.model import load_backbone, transformer_config
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Wrong:
    config: Mapping[str, Any] = field(default_factory=dict)
    """Fields of TransformerConfig."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of GPTModel."""
    weights: Callable[[dict[str, torch.Tensor]], None] = lambda _: None
    """Changes the loaded weights."""
    qk_l2_norm: bool = False


def _each(
    part: str, change: Callable[[torch.Tensor], object]
) -> Callable[[dict[str, torch.Tensor]], None]:
    def change_all(weights: dict[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            if part in name:
                change(weight)

    return change_all


def _noise(weights: dict[str, torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    for weight in weights.values():
        weight.mul_(1 + 0.05 * torch.randn(weight.shape, generator=generator).to(weight))


def _swap_layers(weights: dict[str, torch.Tensor]) -> None:
    for name, weight in weights.items():
        if "layers.0." in name:
            other = weights[name.replace("layers.0.", "layers.1.")]
            kept = weight.clone()
            weight.copy_(other)
            other.copy_(kept)


def _turn(weight: torch.Tensor) -> None:
    """As if all queries came before keys and values."""
    weight.copy_(weight.roll(weight.shape[0] // 8, 0))


LLAMA3 = {"rope_scaling": True, "rope_scaling_factor": 8.0}
WRONG: dict[str, Wrong] = {
    "--rotary-base 1000000": Wrong(model={"rotary_base": 1000000}),
    "--rotary-base 500000": Wrong(model={"rotary_base": 500000}),
    "--use-rope-scaling": Wrong(model=LLAMA3),
    "--norm-epsilon 1e-6": Wrong(config={"layernorm_epsilon": 1e-6}),
    "--norm-epsilon 1e-4": Wrong(config={"layernorm_epsilon": 1e-4}),
    "--apply-layernorm-1p": Wrong(weights=_each("norm.weight", lambda w: w.add_(1.0))),
    "--glu-linear-offset 1.0": Wrong(config={"glu_linear_offset": 1.0}),
    "--use-mup: embeddings x 2": Wrong(weights=_each("word_embeddings", lambda w: w.mul_(2.0))),
    "--use-mup: logits x 0.5": Wrong(weights=_each("output_layer", lambda w: w.mul_(0.5))),
    "--softmax-scale 0.125": Wrong(config={"softmax_scale": 0.125}),
    "--activation-func-clamp-value 1": Wrong(config={"activation_func_clamp_value": 1.0}),
    "GELU in the place of SiLU": Wrong(config={"activation_func": F.gelu}),
    "--qk-l2-norm": Wrong(qk_l2_norm=True),
    "--rotary-percent 0.5": Wrong(model={"rotary_percent": 0.5}),
    "--rotary-interleaved": Wrong(config={"rotary_interleaved": True}),
    "--rotary-seq-len-interpolation-factor 2": Wrong(model={"seq_len_interpolation_factor": 2.0}),
    "--no-rope-freq 4": Wrong(config={"no_rope_freq": 4}),
    "another fine-tuning (weights off by 5 %)": Wrong(weights=_noise),
    "two layers swapped": Wrong(weights=_swap_layers),
    "gate and up swapped": Wrong(
        weights=_each("linear_fc1", lambda w: w.copy_(torch.cat(w.chunk(2)[::-1])))
    ),
    "rows of q, k, v in another order": Wrong(weights=_each("linear_qkv.weight", _turn)),
}
"""Effect of a wrong flag or checkpoint on a model -> how it is made here."""


def build(
    spec: ModelSpec,
    folder: Path,
    layout: ParallelLayout,
    *,
    dtype: torch.dtype = torch.float32,
    wrong: Wrong = Wrong(),
    te: bool = False,
    fp8_recipe: str | None = None,
) -> list[GPTModel]:
    """This rank's chunk, loaded, frozen and with packed attention.

    Args:
        te: with Transformer Engine's linears and norms.
        fp8_recipe: of their FP8; None turns it off.
    """
    config = transformer_config(spec, layout, dtype=dtype, recompute="none")
    config.deallocate_pipeline_outputs = False
    for name, value in wrong.config.items():
        assert hasattr(config, name), name
        setattr(config, name, value)
    if fp8_recipe is not None:
        config.fp8, config.fp8_recipe = "hybrid", fp8_recipe
    if isinstance(config.no_rope_freq, int):
        every = config.no_rope_freq
        config.no_rope_freq = [int((i + 1) % every == 0) for i in range(spec.num_layers)]
    block = _te_block if te else _local_block
    arguments: dict[str, Any] = {
        "rotary_base": int(spec.rope_theta),
        "rope_scaling": spec.rope_scaling is not None,
        "rope_scaling_factor": (spec.rope_scaling or {"factor": 8.0})["factor"],
    }
    model = GPTModel(
        config, block(config, spec, wrong), vocab_size=spec.vocab_size,
        max_sequence_length=spec.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=spec.tied_embeddings, position_embedding_type="rope",
        **(arguments | dict(wrong.model)),
    )  # fmt: skip
    if dtype != torch.float32:
        model.to(dtype)
    load_backbone(_LocalNames(model) if te else model, spec, folder, layout)  # type: ignore[arg-type]
    with torch.no_grad():
        wrong.weights(dict(model.named_parameters()))
    freeze([model])
    install_packed_attention([model])
    return [model]


def _local_block(config: Any, spec: ModelSpec, wrong: Wrong) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(
        qk_layernorm=spec.qk_norm, normalization="RMSNorm", qk_l2_norm=wrong.qk_l2_norm
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    if config.context_parallel_size > 1:
        parts.self_attention.submodules.core_attention = PackedCoreAttention
    layers = [layer] * get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _te_block(config: Any, spec: ModelSpec, wrong: Wrong) -> TransformerBlockSubmodules:
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    layer = get_gpt_layer_with_transformer_engine_spec(
        qk_layernorm=spec.qk_norm, qk_l2_norm=wrong.qk_l2_norm
    )
    layer.submodules.self_attention.submodules.core_attention = PackedCoreAttention
    layers = [layer] * get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=TENorm)


class _LocalNames:
    """A model of Transformer Engine's specification under the names of the local one."""

    def __init__(self, model: GPTModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def named_parameters(self, **_: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in self._model.named_parameters(remove_duplicate=False):
            yield local_name(name), weight
