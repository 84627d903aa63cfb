"""The frozen backbone: a `GPTModel` of Megatron-core's local layer spec, built and filled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tlora_megatron.config.schema import Recompute
from tlora_megatron.integrations.megatron.layer.core_attention import PackedCoreAttention
from tlora_megatron.integrations.megatron.layer.frozen_experts import FrozenExperts
from tlora_megatron.integrations.megatron.layer.frozen_layer import freeze_layer
from tlora_megatron.integrations.megatron.layer.norm_and_rotary import (
    PackedRotaryEmbedding,
    RMSNorm,
)
from tlora_megatron.layers.quantised_linear import quantise_in_place, quantised_linears
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.quantisation import PARTS, BaseQuantisation, check_block_layout
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.training.formats.base_reader import read_base
from tlora_megatron.training.formats.hf_checkpoint import HFCheckpoint, RandomWeights, weight_source
from tlora_megatron.training.formats.hf_convert import (
    Rounding,
    check_layout,
    check_weights,
    draw_base,
    hf_shapes,
)
from tlora_megatron.training.formats.quantised import QuantizedSource
from tlora_megatron.training.formats.rank_tensors import (
    ExpertShare,
    RankTensor,
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
        # Behind the reduction. `add_bias_linear` would also give one to each other linear.
        for linear in (layer.self_attention.linear_proj for layer in model.decoder.layers):
            linear.bias = nn.Parameter(linear.weight.new_empty(linear.weight.shape[0]))
            linear.skip_bias_add = False
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


def read_weights(
    directory: Path,
    spec: ModelSpec,
    quantisation: BaseQuantisation | None,
    tensors: Sequence[RankTensor],
    parameters: Mapping[str, Tensor],
    scales: Mapping[str, Tensor],
) -> Rounding:
    """Fills a rank's parameters from a Hugging Face folder, whatever form its weights have.

    Args:
        quantisation: the one that the model was built with.
        tensors: where in the folder each parameter's rows are.
        scales: those of the parameters that hold codes, by the same names.

    Returns:
        How far the codes of quantised linears are from their weights.

    Raises:
        ValueError: if the folder's weights are missing, corrupt, not finite, or of another
            architecture.
    """
    if quantisation is None or quantisation.published is None:
        checkpoint = HFCheckpoint(directory)
        if spec.gpt_oss is not None:
            return _read_gpt_oss(checkpoint, spec, tensors, parameters)
        check_weights(spec, checkpoint)
        return read_base(checkpoint, tensors, parameters, scales)
    source = QuantizedSource(directory, quantisation.published)
    check_weights(spec, source)
    source.check(spec, quantisation)
    rounding = read_base(source, tensors, parameters, scales)
    for tensor in tensors:
        if tensor.name in scales:
            source.put_scales(tensor, scales[tensor.name])
    return rounding


def _read_gpt_oss(
    checkpoint: HFCheckpoint,
    spec: ModelSpec,
    tensors: Sequence[RankTensor],
    parameters: Mapping[str, Tensor],
) -> Rounding:
    """Reads a base whose files hold all experts of a layer in one tensor, maybe in MXFP4."""
    device = next(iter(parameters.values())).device
    source = weight_source(spec, checkpoint, device)
    check_weights(spec, source)
    stored = set(checkpoint.keys())
    of_experts = [t for t in tensors if t.pieces[0].source not in stored]
    names = {tensor.name for tensor in of_experts}
    draw_base(source, of_experts, parameters, {})
    return read_base(checkpoint, [t for t in tensors if t.name not in names], parameters)


class OnMeta(TorchFunctionMode):
    """Gives memory to nothing that `torch.empty` makes: Megatron's parameters name a device."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def hold_codes(
    model: Any, quantisation: BaseQuantisation, first_layer: int, device: torch.device
) -> None:
    """Gives a model that was built `OnMeta` its memory: codes, scales, and what is left as it is.

    Args:
        first_layer: global index of this stage's first layer.
    """
    for local, layer in enumerate(model.decoder.layers):
        modules = {name.rsplit(".", 1)[-1]: module for name, module in layer.named_modules()}
        for linear in PARTS:
            if (first_layer + local, linear) in quantisation.linears:
                quantise_in_place(modules[linear], quantisation.kind, device)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                made = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
                made.__dict__.update(parameter.__dict__)
                module._parameters[name] = made
