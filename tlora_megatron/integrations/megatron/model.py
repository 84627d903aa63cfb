"""The frozen backbone: a `GPTModel` of Megatron-core's local layer spec, and its process groups."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from tlora_megatron.config.schema import Recompute
from tlora_megatron.integrations.megatron.base_weights import (
    OnMeta,
    hold_codes,
    read_weights,
)
from tlora_megatron.integrations.megatron.layer.core_attention import PackedCoreAttention
from tlora_megatron.integrations.megatron.layer.frozen_experts import FrozenExperts
from tlora_megatron.integrations.megatron.layer.frozen_layer import freeze_layer
from tlora_megatron.integrations.megatron.layer.norm_and_rotary import (
    PackedRotaryEmbedding,
    RMSNorm,
)
from tlora_megatron.integrations.megatron.process_groups import current_sizes, lay_out_replicas
from tlora_megatron.layers.quantised_linear import quantised_linears
from tlora_megatron.model.layout import Deployment, ParallelLayout
from tlora_megatron.model.quantisation import BaseQuantisation, check_block_layout
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.parallel.overlap import set_queues
from tlora_megatron.training.formats.hf_checkpoint import RandomWeights
from tlora_megatron.training.formats.hf_convert import (
    Rounding,
    check_layout,
    draw_base,
    hf_shapes,
)
from tlora_megatron.training.formats.rank_tensors import (
    ExpertShare,
    padded_vocab_size,
    rank_tensors,
)

_RECOMPUTE: dict[Recompute, dict[str, Any]] = {
    "none": {},
    # Not "core_attn": attention stores no scores here. Not "layernorm": core 0.19 compiles C++ for
    # it. The MLP's intermediates are the largest activations of a layer.
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


_laid_out: Deployment | None = None
"""The unlike replicas that Megatron's groups are of; None = one grid over the world, or none."""


def initialize_parallel(
    layout: ParallelLayout, *, overlaps: bool = False, deployment: Deployment | None = None
) -> None:
    """Joins the process group that torchrun's environment describes and lays Megatron's groups out.

    NCCL with one GPU a process where there is CUDA, else gloo. Without torchrun it is a world of
    one. A second call with the same layout does nothing; another layout makes new groups.

    Args:
        overlaps: nano-batches will hide each other's communication
            (`parallel.overlap`).
        deployment: unlike replicas, of one of which `layout` is; None = all are alike.
    """
    set_queues(overlaps=overlaps)
    if torch.cuda.is_available():
        _bind_gpu()
    else:
        from tlora_megatron.integrations.megatron import cpu

        cpu.install()
    if not dist.is_initialized():
        # Groups of a process group that was left are gone, but Megatron would still name them.
        parallel_state.destroy_model_parallel()
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        size = int(os.environ.get("WORLD_SIZE", "1"))
        _init_process_group(size, {} if "RANK" in os.environ else alone)
    world_size = layout.world_size if deployment is None else deployment.world_size
    if dist.get_world_size() != world_size:
        raise ValueError(
            f"world size must be {world_size} for {deployment or layout}, "
            f"got {dist.get_world_size()}"
        )
    _lay_out_groups(layout, deployment)
    # Nothing here draws from these generators, but Megatron's layers enter their contexts.
    model_parallel_cuda_manual_seed(0)


def _bind_gpu() -> None:
    local_rank, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= gpus:
        raise ValueError(
            f"processes a node must be at most its {gpus} GPUs, got local rank {local_rank}"
        )
    torch.cuda.set_device(local_rank)


def join_process_group(store: dist.Store, rank: int, world_size: int) -> None:
    """Joins a process group whose processes meet in a store; nothing is read from the environment.

    It comes before `initialize_parallel`, in a process that has no group yet.
    """
    if torch.cuda.is_available():
        _bind_gpu()
    parallel_state.destroy_model_parallel()
    _init_process_group(world_size, {"store": store, "rank": rank, "world_size": world_size})


def _init_process_group(world_size: int, place: Mapping[str, Any]) -> None:
    """Joins with the backend of this machine.

    Args:
        place: a store, rank and size; empty = as torchrun's environment says.
    """
    options: dict[str, Any] = {"backend": "gloo"}
    if torch.cuda.is_available():
        options = {"backend": "nccl"}
        if world_size > 1:
            # Alone, most of Megatron's two dozen groups are never used: opening and closing all of
            # their communicators takes 11 s on an H200.
            options["device_id"] = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(**options, **place)


def _lay_out_groups(layout: ParallelLayout, deployment: Deployment | None) -> None:
    global _laid_out
    before, _laid_out = _laid_out, deployment
    sizes = (
        layout.tp_size, layout.pp_size, layout.cp_size, layout.ep_size, layout.expert_tp,
    )  # fmt: skip
    if parallel_state.model_parallel_is_initialized():
        if current_sizes() == sizes and before == deployment:
            return
        parallel_state.destroy_model_parallel()
    if deployment is not None:
        lay_out_replicas(deployment)
        return
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp_size,
        pipeline_model_parallel_size=layout.pp_size,
        context_parallel_size=layout.cp_size,
        expert_model_parallel_size=layout.ep_size,
        expert_tensor_parallel_size=layout.expert_tp_size,
    )


def build_backbone(
    spec: ModelSpec,
    layout: ParallelLayout,
    *,
    dtype: torch.dtype,
    recompute: Recompute = "none",
    quantisation: BaseQuantisation | None = None,
) -> GPTModel:
    """Builds this rank's part of the model on its device, frozen, its weights not yet set.

    The model is called as `model(input_ids, position_ids, None)` inside `use_micro_batch(view)`:
    one packed row `[1, T]` of tokens; positions and document borders come from the view. The last
    stage returns vocabulary-parallel logits `[1, T, padded_vocab / tp_size]`; columns beyond the
    vocabulary mean nothing, and `layers.vocabulary_head` passes over them.

    Args:
        recompute: of micro-batches whose view names none: `selective` recomputes every MLP in
            backward, `full` every layer. Both need the micro-batch bound again in recompute:
            `ops.routing.bind_current`.
    """
    check_layout(spec, layout)
    if quantisation is not None:
        check_block_layout(spec, quantisation, layout)
    config = transformer_config(spec, layout, dtype=dtype, recompute=recompute)
    pre_process = parallel_state.is_pipeline_first_stage()
    post_process = parallel_state.is_pipeline_last_stage()
    with nullcontext() if quantisation is None else OnMeta():
        model = GPTModel(
            config,
            _block_spec(spec, layout),
            vocab_size=padded_vocab_size(spec, layout.tp_size),
            max_sequence_length=spec.max_positions,
            pre_process=pre_process,
            post_process=post_process,
            parallel_output=True,
            position_embedding_type="none",  # core attention rotates
            # Tied below instead: Megatron's way all-reduces the weights between pipeline stages.
            share_embeddings_and_output_weights=False,
        )
    if quantisation is not None:
        device = torch.device(torch.cuda.current_device())
        hold_codes(model, quantisation, _stage(spec, layout).start, device)
    if pre_process and post_process and spec.tied_embeddings:
        model.output_layer.weight = model.embedding.word_embeddings.weight
    if spec.gpt_oss is not None:
        for decoder_layer in model.decoder.layers:
            _add_bias(decoder_layer.self_attention.linear_proj)
    model.requires_grad_(False)
    for decoder_layer in model.decoder.layers:
        freeze_layer(decoder_layer)
    if pre_process:
        # A re-entrant checkpoint drops adapters' gradients if no input requires grad.
        model.embedding.register_forward_hook(
            lambda module, args, output: output.requires_grad_(torch.is_grad_enabled())
        )
    return model


def transformer_config(
    spec: ModelSpec, layout: ParallelLayout, *, dtype: torch.dtype, recompute: Recompute
) -> TransformerConfig:
    """Megatron's configuration of the backbone: no dropout, nothing scaled."""
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp_size,
        pipeline_model_parallel_size=layout.pp_size,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
        context_parallel_size=layout.cp_size,
        sequence_parallel=layout.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        # Megatron's schedules then leave the loss as it is: jobs are weighted by their own tokens.
        calculate_per_token_loss=True,
        deallocate_pipeline_outputs=torch.cuda.is_available(),
        **_RECOMPUTE[recompute],
    )


def _block_spec(spec: ModelSpec, layout: ParallelLayout) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(qk_layernorm=spec.qk_norm, normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    rotary = PackedRotaryEmbedding(spec)
    core = {"rotary": rotary, "gpt_oss": spec.gpt_oss}
    attention.core_attention = ModuleSpec(PackedCoreAttention, params=core)
    if spec.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if spec.experts is not None:
        params = {
            "spec": spec.experts,
            "ep_size": layout.ep_size,
            "expert_tp": layout.expert_tp,
            "shared_ffn_size": spec.shared_ffn_size,
        }
        parts.mlp = ModuleSpec(FrozenExperts, params=params)
    layers = [layer] * len(_stage(spec, layout))
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _add_bias(linear: Any) -> None:
    """Gives a row-parallel linear a bias that it adds itself, behind its reduction.

    Megatron's `add_bias_linear` would also give one to each other linear.
    """
    linear.bias = nn.Parameter(linear.weight.new_empty(linear.weight.shape[0]))
    linear.skip_bias_add = False


def _stage(spec: ModelSpec, layout: ParallelLayout) -> range:
    rank = parallel_state.get_pipeline_model_parallel_rank()
    return layout.stage_layers(spec.num_layers, rank)


def load_backbone(
    model: GPTModel,
    spec: ModelSpec,
    directory: Path | None,
    layout: ParallelLayout,
    *,
    seed: int = 0,
    quantisation: BaseQuantisation | None = None,
) -> Rounding:
    """Sets every weight of this rank's part; linears of a quantised model get codes.

    Args:
        directory: a Hugging Face directory with safetensors; None draws the weights by `seed`,
            the same ones whatever the layout (see `RandomWeights`).

    Returns:
        How far the codes of quantised linears are from their weights.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    part: dict[str, Any] = {
        "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
        "tp_size": layout.tp_size,
        "layers": _stage(spec, layout),
        "with_embedding": model.pre_process,
        "with_output": model.post_process,
        "experts": _expert_share(spec, layout),
    }
    tensors = list(rank_tensors(spec, **part))
    scales = {f"{name}.weight": held.scales for name, held in quantised_linears(model)}
    named = {tensor.name for tensor in tensors}
    assert named == parameters.keys(), f"weights without a value: {parameters.keys() - named}"
    if directory is not None:
        return read_weights(directory, spec, quantisation, tensors, parameters, scales)
    device = next(model.parameters()).device
    drawn = RandomWeights(
        hf_shapes(spec), seed=seed, device=device, dtype=model.config.params_dtype
    )
    return draw_base(drawn, tensors, parameters, scales)


def _expert_share(spec: ModelSpec, layout: ParallelLayout) -> ExpertShare | None:
    if spec.experts is None:
        return None
    count = spec.experts.num_experts // layout.ep_size
    first = count * parallel_state.get_expert_model_parallel_rank()
    tp_rank = parallel_state.get_expert_tensor_parallel_rank()
    return ExpertShare(range(first, first + count), tp_rank, layout.expert_tp)
