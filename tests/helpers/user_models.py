"""Megatron models as a user's script builds them; weights depend on their names only."""

from __future__ import annotations

import inspect
import re
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from tests.helpers import te_stand_in
from tlora_megatron.integrations.megatron import cpu
from tlora_megatron.integrations.megatron.layer.core_attention import PackedCoreAttention
from tlora_megatron.integrations.megatron.layer.norm_and_rotary import RMSNorm
from tlora_megatron.model.spec import ExpertsSpec, ModelSpec

SPEC = ModelSpec(
    model_type="llama", num_layers=4, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16,
    ffn_size=96, vocab_size=128, max_positions=64, norm_eps=1e-5, rope_theta=1e4,
)  # fmt: skip
MOE_SPEC = replace(SPEC, shared_ffn_size=48)
EXPERTS_SPEC = replace(
    MOE_SPEC, ffn_size=32, experts=ExpertsSpec(num_experts=4, top_k=2, ffn_size=32, normalizes=True)
)
MOE: dict[str, Any] = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 48, "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "allgather",
}  # fmt: skip
ROPE: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"rotary_base": 500, "rope_scaling": True, "rope_scaling_factor": 4.0},
    "interleaved": {"rotary_interleaved": True, "rotary_percent": 0.5},
    "partial": {"rotary_percent": 0.5},
    "stretched": {"seq_len_interpolation_factor": 2.0},
    "yarn": {"position_embedding_type": "yarn"},
}
KINDS = ROPE | {"qwen": {"share_embeddings_and_output_weights": True, "add_qkv_bias": True}}
"""All that `build_user_gpt` builds of dense layers."""
_CONFIG_FIELDS = ("rotary_interleaved", "add_qkv_bias")
_YARN = {
    "yarn_rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 8,
    "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_mscale": 1.0, "yarn_mscale_all_dim": 0.5,
    "yarn_correction_range_round_to_int": True,
}  # fmt: skip


def user_config(spec: ModelSpec = SPEC, **options: Any) -> TransformerConfig:
    fields: dict[str, Any] = {
        "num_layers": spec.num_layers, "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_heads, "num_query_groups": spec.num_kv_heads,
        "kv_channels": spec.head_dim, "ffn_hidden_size": spec.ffn_size, "normalization": "RMSNorm",
        "gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32, "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False, "bias_activation_fusion": False,
        "bias_dropout_fusion": False, "apply_rope_fusion": False, "calculate_per_token_loss": True,
        "deallocate_pipeline_outputs": False,
    }  # fmt: skip
    return TransformerConfig(**(fields | options))


def build_user_gpt(
    rope: str = "plain", *, te: bool = False, torch_norms: bool = False, **options: Any
) -> list[GPTModel]:
    """This rank's chunks of a GPTModel; weights depend on their names only.

    Args:
        te: linears as in Megatron's Transformer Engine spec, norms inside (`te_stand_in`); in
            `moe` those of the experts alone, one for all of them.
        torch_norms: those of the local spec, which refuse sequence parallelism.
    """
    arguments = dict(KINDS.get(rope, {}))
    fields = {key: arguments[key] for key in _CONFIG_FIELDS if key in arguments}
    if rope == "yarn":
        fields |= dict.fromkeys(_YARN)
    if rope == "moe":
        options = MOE | options
        cpu.install_dispatchers()
    config = user_config(**options, **{k: v for k, v in fields.items() if k in _CONFIG_FIELDS})
    if rope == "yarn":
        # As Megatron's trainer does: these are no fields of TransformerConfig in every version.
        for name, value in _YARN.items():
            setattr(config, name, value)
    vp_size = config.virtual_pipeline_model_parallel_size
    stages = [None] if vp_size is None else list(range(vp_size))
    chunks = [_gpt_chunk(config, stage, arguments, te, torch_norms) for stage in stages]
    for chunk in chunks:
        set_weights(chunk)
    return chunks


def _gpt_chunk(
    config: Any, vp_stage: int | None, arguments: Mapping[str, Any], te: bool, torch_norms: bool
) -> GPTModel:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, normalization="RMSNorm",
        qk_layernorm=config.qk_layernorm, qk_l2_norm=config.qk_l2_norm,
    )  # fmt: skip
    parts = layer.submodules
    if not torch_norms:
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        if config.qk_layernorm:
            heads = parts.self_attention.submodules
            heads.q_layernorm = heads.k_layernorm = RMSNorm
    if te and config.num_moe_experts:
        te_stand_in.use_in_experts(layer)
    elif te:
        te_stand_in.use_in(layer)
    if config.context_parallel_size > 1:
        # Megatron's own refuses context parallelism when it is built.
        parts.self_attention.submodules.core_attention = PackedCoreAttention
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    block = TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)
    stage: dict[str, Any] = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    options = {"position_embedding_type": "rope"} | dict(arguments)
    return GPTModel(
        config, block, vocab_size=SPEC.vocab_size, max_sequence_length=SPEC.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage), vp_stage=vp_stage,
        **{k: v for k, v in options.items() if k not in _CONFIG_FIELDS},
    )  # fmt: skip


def build_user_hybrid(**options: Any) -> list[Any]:
    """This rank's chunk of Megatron's other kind of model, whose attention and MLP are layers.

    As many parameters as the GPTModel has, of other names. It is HybridModel, or MambaModel before
    megatron-core 0.18.
    """
    try:
        from megatron.core.models.hybrid import hybrid_block as block
        from megatron.core.models.hybrid.hybrid_model import HybridModel as Model

        stack, submodules = block.HybridStack, block.HybridStackSubmodules
    except ImportError:
        from megatron.core.models.mamba import MambaModel as Model
        from megatron.core.ssm import mamba_block as block

        stack, submodules = block.MambaStack, block.MambaStackSubmodules
    block.TENorm = RMSNorm  # the final norm's class is not in the spec
    layer: Any = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=RMSNorm,
        self_attention=layer.self_attention,
        self_attn_bda=layer.self_attn_bda,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=RMSNorm, mlp=layer.mlp, mlp_bda=layer.mlp_bda
    )
    parts = submodules(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
    )
    pattern = {"hybrid_layer_pattern": "*-" * SPEC.num_layers}
    if "hybrid_layer_pattern" not in inspect.signature(Model).parameters:
        pattern = {"hybrid_override_pattern": "*-" * SPEC.num_layers}
    model = Model(
        user_config(**(options | {"num_layers": 2 * SPEC.num_layers})),
        ModuleSpec(module=stack, submodules=parts),
        vocab_size=SPEC.vocab_size,
        max_sequence_length=SPEC.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        **pattern,
    )
    set_weights(model)
    return [model]


def local_name(name: str) -> str:
    """The name in the local spec of a weight of Transformer Engine's spec."""
    name = name.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
    return name.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")


def set_weights(model: Any) -> None:
    """Draws every parameter by its name with global layer numbers, the same in every layout."""
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            place = (tp_rank, tp_size)
            whole_name = _of_all_experts(name)
            if ".local_experts." in whole_name:
                place = (
                    parallel_state.get_expert_tensor_parallel_rank(),
                    parallel_state.get_expert_tensor_parallel_world_size(),
                )
            weight.copy_(_shard(model, whole_name, weight, *place))


def _of_all_experts(name: str) -> str:
    """The name of an expert's weight on any rank, as `SequentialMLP` of one rank has it."""
    name = re.sub(
        r"experts\.(linear_fc\d)\.weight(\d+)", r"experts.local_experts.\2.\1.weight", name
    )
    found = re.search(r"\.local_experts\.(\d+)\.", name)
    if found is None:
        return name
    held = MOE["num_moe_experts"] // parallel_state.get_expert_model_parallel_world_size()
    number = int(found[1]) + held * parallel_state.get_expert_model_parallel_rank()
    return name.replace(found[0], f".local_experts.{number}.")


def _shard(model: Any, name: str, weight: Tensor, tp_rank: int, tp_size: int) -> Tensor:
    parts = name.split(".")
    if "layers" in parts:
        place = parts.index("layers") + 1
        parts[place] = str(model.decoder.layers[int(parts[place])].layer_number)
    whole_name = local_name(".".join(parts))
    shape = list(weight.shape)
    is_split = weight.dim() == 2 or name.endswith(".bias")
    dim = getattr(weight, "partition_dim", -1) if is_split else -1
    if dim >= 0:
        shape[dim] *= tp_size
    generator = torch.Generator().manual_seed(zlib.crc32(whole_name.encode()))
    whole = torch.randn(shape, generator=generator)
    whole = whole * 0.1 + 1.0 if weight.dim() == 1 else whole * 0.15
    if dim < 0:
        return whole
    if "linear_fc1" in name:
        gate_up = whole.shape[0] // 2
        half = gate_up // tp_size
        gate = torch.arange(tp_rank * half, (tp_rank + 1) * half)
        return whole[torch.cat([gate, gate + gate_up])]
    return whole.chunk(tp_size, dim)[tp_rank]
