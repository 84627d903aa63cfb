"""A model that someone else built: frozen, its attention replaced, its linears and stages found.

Nothing is assumed of how layers are dealt out: virtual pipeline chunks, uneven stages and
HybridModel, whose attention and MLP are layers of their own, are read off the built modules.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from tlora_megatron.integrations.megatron.built.expert_layers import adapt_experts, expert_weight
from tlora_megatron.integrations.megatron.layer.core_attention import PackedCoreAttention
from tlora_megatron.integrations.megatron.layer.modules import mix
from tlora_megatron.integrations.megatron.layer.norm_and_rotary import DocumentRotaryEmbedding
from tlora_megatron.layers.sites import Site, make_expert_site, make_site
from tlora_megatron.model.spec import ALL_LINEARS, EXPERT_LINEARS, ModelSpec
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.training.formats.hf_checkpoint import all_finite

_BULK_OVERLAPS = ("ub_bulk_wgrad", "ub_bulk_dgrad")
"""Attributes of Transformer Engine's linears."""


def language_models(chunks: Sequence[nn.Module]) -> list[Any]:
    """Returns the GPTModel or HybridModel inside each chunk, out of DDP, Float16Module and so on.

    Raises:
        ValueError: if a chunk holds no model with a `decoder` of layers.
    """
    return [_language_model(chunk) for chunk in chunks]


def _language_model(chunk: nn.Module) -> Any:
    model: Any = chunk
    while not hasattr(model, "decoder") and isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    if not isinstance(getattr(getattr(model, "decoder", None), "layers", None), nn.ModuleList):
        raise ValueError(
            f"the model must be a GPTModel or HybridModel with a decoder of layers, got "
            f"{type(model).__name__}"
        )
    return model


@contextmanager
def cleared(configs: Iterable[Any], *fields: str) -> Iterator[None]:
    """Sets fields of configurations to None, and back."""
    given = [(config, name, getattr(config, name, None)) for config in configs for name in fields]
    given = [entry for entry in given if entry[2]]
    for config, name, _ in given:
        setattr(config, name, None)
    try:
        yield
    finally:
        for config, name, value in given:
            setattr(config, name, value)


def freeze(chunks: Sequence[nn.Module]) -> None:
    """Freezes every parameter and makes the embedding's output require grad.

    Without the latter a re-entrant checkpoint, and the first linear, see no input that requires
    grad, and the adapters get no gradient. Call it before the model is wrapped by DDP.

    Transformer Engine's bulk overlaps (`--tp-comm-overlap`) are turned off. They leave the sum of
    an input's gradient over the ranks to the GEMM of the weight's gradient, which a frozen weight
    does not run (2.17): ranks would go on with parts of it.
    """
    for model in language_models(chunks):
        model.requires_grad_(False)
        for module in model.modules():
            for name in _BULK_OVERLAPS:
                if getattr(module, name, False):
                    setattr(module, name, False)
        if hasattr(model, "embedding"):
            model.embedding.register_forward_hook(
                lambda module, args, output: output.requires_grad_(torch.is_grad_enabled())
            )


def require_whole_weights(chunks: Sequence[nn.Module]) -> None:
    """Makes loading a state dict that does not fit, or is not finite, raise ValueError.

    Megatron's loader answers `strict` by loading once more without it, for states of Transformer
    Engine that come and go (those are ignored here too), and would train over random weights.
    """
    for model in language_models(chunks):
        model.register_load_state_dict_post_hook(_check_loaded)


def _check_loaded(module: nn.Module, keys: Any) -> None:
    missing, unexpected = (
        [key for key in names if not key.endswith("_extra_state")]
        for names in (keys.missing_keys, keys.unexpected_keys)
    )
    if missing or unexpected:
        raise ValueError(
            f"the checkpoint must hold the weights of this model and no others, got "
            f"{len(missing)} missing ({', '.join(missing[:3])}) and {len(unexpected)} unexpected "
            f"({', '.join(unexpected[:3])})"
        )
    for name, parameter in module.named_parameters():
        values = parameter.data
        # Transformer Engine's FP8 weights are tensors of another kind, without this function.
        if type(values) is Tensor and values.numel() and not all_finite(values):
            raise ValueError(
                f"{name} of the checkpoint must be finite, got NaN or infinity: the base is "
                "damaged; convert it anew"
            )


_LINEAR_CLASSES = {
    "column": ("TEColumnParallelLinear", "TELayerNormColumnParallelLinear"),
    "row": ("TERowParallelLinear",),
}
"""Transformer Engine's, by name: it may not be installed."""

_FUSED_MLPS = ("TEFusedMLP", "FusedSharedExpertMLP")
"""They hold linears and compute without calling them."""

_REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_dropout": (0.0,),
    "gated_linear_unit": (True,),
    "attention_dropout": (0.0,),
    "window_size": (None,),
    "softmax_type": ("vanilla",),
    "qk_clip": (False,),
    "log_max_attention_logit": (False,),
    "multi_latent_attention": (False,),
    "fused_single_qkv_rope": (False,),
    "attention_output_gate": (False,),
    "experimental_attention_variant": (None,),
    "mtp_num_layers": (None, 0),
    "use_transformer_engine_op_fuser": (False,),
    "moe_shared_expert_overlap": (False,),
    "moe_expert_capacity_factor": (None,),
    "moe_expert_rank_capacity_factor": (None,),
}
"""Fields of TransformerConfig and the values that adapters work with; a version may lack some."""

_POSITIONS = ("rope", "yarn", "none")


def install_packed_attention(chunks: Sequence[nn.Module]) -> None:
    """Makes attention end at document borders, in place; a second time nothing.

    Every core attention becomes `PackedCoreAttention`, for Megatron's local layers and Transformer
    Engine's alike. Heads are still rotated by Megatron, by the model's own frequencies (base,
    percentage, interleaving, scaling), for the position of each token in its document.

    From then on the model runs inside `use_micro_batch(view)`, without attention mask and packed
    sequence parameters, on rows `[1, T]` of one context-parallel rank; Megatron's recompute works
    after `engine.install()`. With `context_parallel_size` above 1, Megatron's local spec must
    name `PackedCoreAttention` before the model is built: its own refuses to be.
    """
    for model in language_models(chunks):
        _check_config(model.config)
        kind = model.position_embedding_type
        if kind not in _POSITIONS:
            raise ValueError(f"position_embedding_type must be one of {_POSITIONS}, got {kind!r}")
        for layer in model.decoder.layers:
            attention = getattr(layer, "self_attention", None)
            if isinstance(attention, SelfAttention):
                _replace_core(attention)
        if kind != "none":
            mix(DocumentRotaryEmbedding, model.rotary_pos_emb)


def _replace_core(attention: Any) -> None:
    if isinstance(attention.core_attention, PackedCoreAttention):
        return
    core = PackedCoreAttention(
        attention.config,
        attention.layer_number,
        attention.attn_mask_type,
        attention.attention_type,
        softmax_scale=attention.config.softmax_scale,
        pg_collection=getattr(attention, "pg_collection", None),
    )
    attention.core_attention = core.train(attention.training)


def discover(
    chunks: Sequence[nn.Module], spec: ModelSpec, groups: ParallelGroups
) -> list[tuple[Site, nn.Module]]:
    """Returns this rank's linears that may carry adapters, in ascending order of (layer, linear).

    Those of routed experts come behind all others, if `groups` knows who holds them: then their
    modules are made able to carry adapters (`expert_layers`), and found under both linears.

    Args:
        chunks: this rank's model: one, or as many as it has virtual pipeline stages.
        spec: of the whole model; layers are numbered as in Hugging Face.
    """
    found: dict[tuple[int, str], nn.Module] = {}
    of_experts: dict[int, nn.Module] = {}
    for model in language_models(chunks):
        _check_config(model.config)
        num_groups, tp_size = model.config.num_query_groups, groups.layout.tp_size
        if num_groups % tp_size:
            raise ValueError(
                f"num_query_groups must be a multiple of tensor_model_parallel_size={tp_size}, got "
                f"{num_groups}"
            )
        for layer in model.decoder.layers:
            index = _layer_index(model, layer)
            found |= {(index, linear): module for linear, module in _linears(layer, spec)}
            if groups.experts is not None and isinstance(layer.mlp, BaseMoELayer):
                of_experts[index] = adapt_experts(layer.mlp)
    order = list(ALL_LINEARS)
    pairs = sorted(found, key=lambda pair: (pair[0], order.index(pair[1])))
    ranks = groups.tp_rank, groups.layout.tp_size
    sites = [make_site(spec, *pair, *ranks) for pair in pairs]
    linears = [(site, found[pair]) for site, pair in zip(sites, pairs, strict=True)]
    for site, module in linears:
        _check_linear(site, module, spec)
    return linears + _expert_linears(of_experts, spec, groups)


def _expert_linears(
    of_experts: dict[int, nn.Module], spec: ModelSpec, groups: ParallelGroups
) -> list[tuple[Site, nn.Module]]:
    linears = []
    for index, linear in itertools.product(sorted(of_experts), EXPERT_LINEARS):
        site = make_expert_site(spec, index, linear, groups.layout, groups.expert_place)
        module = of_experts[index]
        _check_shape(f"layers.{index}.{linear}", site, expert_weight(module, linear), spec)
        linears.append((site, module))
    return linears


def record_stages(
    groups: ParallelGroups, linears: Sequence[tuple[Site, nn.Module]]
) -> ParallelGroups:
    """Returns groups whose layout knows which stage holds which linears; collective over PP."""
    held = tuple((site.layer, site.linear) for site, _ in linears)
    stages: list[Any] = [None] * groups.layout.pp_size
    pp_group = parallel_state.get_pipeline_model_parallel_group()
    dist.all_gather_object(stages, held, group=pp_group)
    return replace(groups, layout=replace(groups.layout, stage_linears=tuple(stages)))


def _check_config(config: Any) -> None:
    for name, allowed in _REQUIRED.items():
        value = getattr(config, name, allowed[0])
        if value not in allowed:
            raise ValueError(f"{name} must be {allowed[0]} to train adapters, got {value!r}")


def _layer_index(model: Any, layer: nn.Module) -> int:
    """Returns Hugging Face's number of the transformer layer that a decoder layer is (part of).

    HybridModel's must alternate, attention first: an attention is followed by its MLP.
    """
    if not isinstance(layer, TransformerLayer):
        raise ValueError(
            f"decoder layers must be attention or MLP (a state crosses the documents of a packed "
            f"row), got {type(layer).__name__}"
        )
    number = int(layer.layer_number) - 1
    pattern = getattr(model, "hybrid_layer_pattern", None) or getattr(
        model, "hybrid_override_pattern", None
    )
    if pattern is None:
        return number
    main = pattern.split("/")[0].replace("|", "")
    if len(main) % 2 or set(main[::2]) != {"*"} or not set(main[1::2]) <= {"-", "E"}:
        raise ValueError(
            f"hybrid_layer_pattern must repeat '*-' or '*E' (attention, then its MLP) to have the "
            f"layer numbers of PEFT's names, got {pattern!r}"
        )
    return number // 2


def _linears(layer: Any, spec: ModelSpec) -> Iterator[tuple[str, nn.Module]]:
    """Yields name and module of a layer's linears; not those of routed experts."""
    where = f"layer {layer.layer_number - 1}"
    attention, mlp = layer.self_attention, layer.mlp
    if not isinstance(getattr(layer, "cross_attention", None), IdentityOp | None):
        raise ValueError(f"{where} must have no cross-attention")
    if isinstance(attention, SelfAttention):
        yield "linear_qkv", attention.linear_qkv
        yield "linear_proj", attention.linear_proj
    elif not isinstance(attention, IdentityOp):
        raise ValueError(f"{where} must have SelfAttention, got {type(attention).__name__}")
    if isinstance(mlp, MLP):
        _check_calls_linears(mlp, where)
        yield "linear_fc1", mlp.linear_fc1
        yield "linear_fc2", mlp.linear_fc2
    elif isinstance(mlp, BaseMoELayer):
        if mlp.shared_experts is not None and spec.shared_ffn_size is not None:
            _check_calls_linears(mlp.shared_experts, where)
            yield "shared_fc1", mlp.shared_experts.linear_fc1
            yield "shared_fc2", mlp.shared_experts.linear_fc2
    elif not isinstance(mlp, IdentityOp):
        raise ValueError(f"{where} must have an MLP or experts, got {type(mlp).__name__}")


def _check_calls_linears(mlp: nn.Module, where: str) -> None:
    names = {c.__name__ for c in type(mlp).__mro__}
    if not names.isdisjoint(_FUSED_MLPS):
        raise ValueError(
            f"{where} must have an MLP whose linears are called (no --use-transformer-engine-op-"
            f"fuser), got {type(mlp).__name__}"
        )


def _check_linear(site: Site, module: nn.Module, spec: ModelSpec) -> None:
    name = f"layers.{site.layer}.{site.linear}"
    own = ColumnParallelLinear if site.kind == "column" else RowParallelLinear
    classes = {c.__name__ for c in type(module).__mro__}
    if not isinstance(module, own) and classes.isdisjoint(_LINEAR_CLASSES[site.kind]):
        allowed = ", ".join((own.__name__, *_LINEAR_CLASSES[site.kind]))
        raise ValueError(f"{name} must be one of {allowed}, got {type(module).__name__}")
    linear: Any = module
    _check_shape(name, site, linear.weight, spec)


def _check_shape(name: str, site: Site, weight: Any, spec: ModelSpec) -> None:
    shape = tuple(weight.shape)
    if shape != (site.out_size, site.in_size):
        raise ValueError(
            f"{name} must have a weight of [{site.out_size}, {site.in_size}] on a rank as "
            f"{spec.model_type} of hidden size {spec.hidden_size} has, got {list(shape)}"
        )
