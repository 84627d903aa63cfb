"""Refuses arguments and weights of another model than a Hugging Face folder describes.

Every argument that enters the forward is compared with the file (`_FLAGS`), has one value in all
models that such a file can describe (`ONE_VALUE`), is fixed by a rule of `guard`, or is listed as
having no effect on values (`NO_EFFECT`). A field of `TransformerConfig` that is in none of them is
a newer Megatron's: it is told when it is set.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from torch import nn

from tlora_megatron.integrations.megatron.built.model import cleared, language_models
from tlora_megatron.integrations.megatron_lm.experts import ROUTER, check_router
from tlora_megatron.integrations.megatron_lm.guard import RULES, shown
from tlora_megatron.model.spec import ExpertsSpec, ModelSpec
from tlora_megatron.training.run.fingerprint import Precision

logger = logging.getLogger(__name__)

_FLAGS = {
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "num_heads": "--num-attention-heads",
    "num_kv_heads": "--num-query-groups",
    "head_dim": "--kv-channels",
    "ffn_size": "--ffn-hidden-size",
    "norm_eps": "--norm-epsilon",
    "rope_theta": "--rotary-base",
    "rope_scaling": "--use-rope-scaling",
    "tied_embeddings": "--untie-embeddings-and-output-weights",
    "qkv_bias": "--add-qkv-bias",
    "qk_norm": "--qk-layernorm",
    "shared_ffn_size": "--moe-shared-expert-intermediate-size",
}
"""Fields of `ModelSpec` that arguments and a config.json both fix, and the argument's flag."""

COMPARED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "ffn_hidden_size",
    "layernorm_epsilon",
    "add_qkv_bias",
    "qk_layernorm",
    "num_moe_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_router_pre_softmax",
    "moe_shared_expert_intermediate_size",
)
"""Fields of TransformerConfig behind those of `_FLAGS`; the others are arguments of GPTModel."""

ONE_VALUE: Mapping[str, tuple[Any, str]] = {
    "gated_linear_unit": (True, "--swiglu"),
    "glu_linear_offset": (0.0, "--glu-linear-offset"),
    "activation_func_clamp_value": (None, "--activation-func-clamp-value"),
    "layernorm_zero_centered_gamma": (False, "--apply-layernorm-1p"),
    "softmax_type": ("vanilla", "--softmax-type"),
    "qk_l2_norm": (False, "--qk-l2-norm"),
    "attention_output_gate": (False, "--attention-output-gate"),
    "head_wise_attn_gate": (False, "--head-wise-attn-gate"),
    "use_mup": (False, "--use-mup"),
    "mrope_section": (None, "--mrope-section"),
    "rotary_base_per_layer": (None, "--rotary-base-per-layer"),
    "linear_attention_freq": (None, "--linear-attention-freq"),
    "heterogeneous_block_specs": (False, "--heterogeneous-layers-config-path"),
    "enable_hyper_connections": (False, "--enable-hyper-connections"),
    "enable_mhc_connections": (False, "--enable-mhc-connections"),
}
"""Fields of TransformerConfig that have one value in every model that a config.json can describe:
the value and the flag. A version may lack some. `softmax_scale` and `activation_func` beside
them have rules of their own."""

_OWN_RULES = (
    *("softmax_scale", "activation_func", "moe_layer_freq", "moe_shared_expert_gate"),
    "moe_router_dtype",
)

NO_EFFECT: Mapping[str, tuple[str, ...]] = {
    "how the model is cut over processes, and what they say to each other": (
        *("tensor_model_parallel_size", "pipeline_model_parallel_*", "sequence_parallel"),
        *("virtual_pipeline_model_parallel_size", "context_parallel_size", "cp_comm_type"),
        *("hierarchical_context_parallel_sizes", "max_seqlen_per_dp_cp_rank", "cp_partition_mode"),
        *("min_dynamic_context_parallel_size", "sequence_packing_scheduler"),
        *("pad_packed_seq_alignment", "thd_tail_padding_policy"),
        *("expert_*", "num_layers_in_*_pipeline_stage", "account_for_*_in_pipeline_split"),
        *("tp_comm_*", "tp_only_amax_red", "*p2p*", "microbatch_group_size_per_vp_stage"),
        *("async_tensor_model_parallel_allreduce", "gtp_*", "tensor_parallel_num_weight_shards"),
        *("high_priority_a2a_comm_stream", "symmetric_ar_type", "linear_cp_mode"),
        *("clone_scatter_output_in_embedding", "create_attention_mask_in_dataloader"),
        *("variable_seq_lengths", "thd_max_packed_sequences", "hetereogenous_dist_checkpoint"),
    ),
    "which kernels compute it": (
        *("attention_backend", "flash_attention_version", "transformer_impl"),
        *("apply_rope_fusion", "bias_*_fusion", "masked_softmax_fusion"),
        *("cross_entropy_loss_fusion", "gradient_accumulation_fusion"),
        *("fused_single_qkv_rope", "fused_residual_rmsnorm", "use_fused_*", "enable_autocast"),
        *("use_transformer_engine_op_fuser", "use_te_activation_func", "use_te_rng_tracker"),
        *("use_grouped_gemm_for_*", "dense_grouped_gemm", "cross_entropy_fusion_impl"),
        *("persist_layer_norm", "memory_efficient_layer_norm", "deterministic_mode"),
        *("batch_invariant_*", "fallback_to_eager_attn", "disable_parameter_transpose_cache"),
        *("cuda_graph_*", "enable_cuda_graph", "external_cuda_graph", "test_mode"),
        *("overlap_*", "delay_wgrad_compute", "ep_overlap_early_attn_memory_release"),
    ),
    "how rows go to experts, and which kernels compute these": (
        *("moe_grouped_gemm", "moe_use_*", "moe_single_grouped_*", "moe_permute_fusion*"),
        *("moe_enable_deepep", "moe_flex_*", "moe_deepep_*", "moe_hybridep_*", "moe_ncclep_*"),
        *("moe_router_padding_for_*", "moe_pad_experts_for_*", "moe_paged_stash*"),
        *("moe_shared_expert_overlap", "moe_per_layer_logging", "moe_layer_recompute"),
        "moe_extended_tp",
    ),
    "how precisely it is computed": (
        *("moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype"),
        *("fp16", "bf16", "fp8", "fp8_*", "fp4", "fp4_*", "params_dtype", "pipeline_dtype"),
        *("autocast_dtype", "first_last_layers_bf16", "num_layers_at_*_in_bf16"),
        *("fp32_residual_connection", "attention_softmax_in_fp32", "quant_recipe"),
        *("disable_bf16_reduced_precision_matmul", "activation_func_fp8_input_store"),
        *("use_kitchen", "use_kitchen_attention", "kitchen_attention_backend"),
    ),
    "what is kept for the backward pass": (
        *("recompute_*", "distribute_saved_activations", "mhc_recompute_layer_num"),
        *("cpu_offloading*", "_cpu_offloading_context", "deallocate_pipeline_outputs"),
        *("num_microbatches_with_partial_activation_checkpoints", "activation_offload_fraction"),
        *("fine_grained_*", "offload_modules", "min_offloaded_tensor_size", "delay_offload_*"),
        *("delta_offload_*", "defer_embedding_wgrad_compute", "wgrad_deferral_limit"),
    ),
    "losses and gradients of a base that trains": (
        *("calculate_per_token_loss", "finalize_model_grads_func", "*_scale_func"),
        *("*_sync_func", "qk_clip*", "log_*", "mtp_*"),
    ),
    "weights before they are loaded": (
        *("*init_method*", "init_model_with_meta_device", "perform_initialization"),
        *("use_cpu_initialization",),
    ),
    "what core models never read, or what attention here leaves out": (
        *("apply_residual_connection_post_layernorm", "apply_query_key_layer_scaling"),
    ),
    "inference and logging": (
        *("inference_*", "use_inference_optimized_layers", "nccl_all_reduce_for_prefill"),
        *("flash_decode", "mlp_chunks_for_prefill", "config_logger_dir", "timers"),
        *("barrier_with_L1_time",),
    ),
    "parts that a field of ONE_VALUE or a rule of the guard switches on": (
        *("mup_*", "mhc_*", "num_residual_streams", "actual_vocab_size"),
        *("moe_token_drop*", "moe_pad_expert_input_to_capacity", "moe_router_bias_update_rate"),
        *("moe_router_load_balancing_type", "moe_router_quantile_balancing_ema"),
        *("mamba_*", "use_mamba_mem_eff_path", "gdp_*", "gdn_*", "is_hybrid_model"),
        *("dsa_*", "csa_*", "apply_dsa_kernel_fusion", "linear_attention_type"),
        *("linear_*_dim", "linear_num_*_heads"),
        *("experimental_attention_variant_loss_scale_func", "window_attn_skip_freq"),
        *("mrope_interleaved",),
    ),
}
"""Why -> fields of TransformerConfig that do not change what a model computes."""

_EXPERTS = {
    "num_experts": "--num-experts",
    "top_k": "--moe-router-topk",
    "ffn_size": "--moe-ffn-hidden-size",
    "normalizes": "--moe-router-pre-softmax",
}
"""Fields of `ExpertsSpec` that arguments and a config.json both fix."""


def check_described(
    ours: ModelSpec, theirs: ModelSpec, config_json: Path, *, padded_vocab_size: int
) -> None:
    """Refuses arguments that describe another model than a config.json."""
    _check_experts(ours.experts, theirs.experts, config_json)
    _compare(_FLAGS, ours, theirs, config_json)
    if theirs.vocab_size > padded_vocab_size:
        raise ValueError(
            f"Megatron's vocabulary must hold the {theirs.vocab_size} entries of {config_json}, "
            f"got {padded_vocab_size}; give --padded-vocab-size or --vocab-size"
        )


def _check_experts(ours: ExpertsSpec | None, theirs: ExpertsSpec | None, config_json: Path) -> None:
    if ours is None or theirs is None:
        if ours is not theirs:
            counts = [None if spec is None else spec.num_experts for spec in (theirs, ours)]
            flag = "--num-experts" if theirs is None else "--num-experts, in every layer,"
            raise _another(flag, counts[0], counts[1], config_json)
        return
    _compare(_EXPERTS, ours, theirs, config_json)


def _compare(flags: Mapping[str, str], ours: Any, theirs: Any, config_json: Path) -> None:
    """Refuses fields that are not the same, naming the flag."""
    for name, flag in flags.items():
        found, expected = getattr(ours, name), getattr(theirs, name)
        if found == expected:
            continue
        if name == "rope_scaling":
            _refuse_scaling(expected, found, config_json)
        if name in ("tied_embeddings", "normalizes"):  # their flags say the opposite
            found, expected = not found, not expected
        raise _another(flag, expected, found, config_json)


def check_transformer_config(config: Any, theirs: ModelSpec, config_json: Path) -> None:
    """Refuses a TransformerConfig of another model than a config.json describes.

    Logs a warning for fields that nobody has judged and that differ from their default.
    """
    for name, (value, flag) in ONE_VALUE.items():
        found = getattr(config, name, value)
        if found != value:
            raise _another(flag, value, found, config_json)
    _check_layer_of_experts(config, theirs, config_json)
    activation = getattr(config, "activation_func", None)
    if getattr(activation, "__name__", "silu") != "silu":
        raise _another("the activation of the MLP (--swiglu)", "silu", activation, config_json)
    scale, usual = getattr(config, "softmax_scale", None), theirs.head_dim**-0.5
    if scale is not None and abs(scale - usual) > 1e-6 * usual:
        raise _another("--softmax-scale", f"absent or {usual}", scale, config_json)
    for name, value in _unjudged(config).items():
        logger.warning(
            "nobody has judged whether %s=%r changes the model: this Megatron-LM is newer than "
            "what was compared with %s", name, value, config_json,
        )  # fmt: skip


def _check_layer_of_experts(config: Any, theirs: ModelSpec, config_json: Path) -> None:
    """Refuses another number of experts, and other routers, of arguments or of a built model."""
    experts = theirs.experts
    count = None if experts is None else experts.num_experts
    found = getattr(config, "num_moe_experts", count)
    if found != count:
        raise _another("--num-experts", count, found, config_json)
    if experts is None:
        return
    ours = replace(
        experts,
        top_k=config.moe_router_topk,
        ffn_size=config.moe_ffn_hidden_size or config.ffn_hidden_size,
        normalizes=not config.moe_router_pre_softmax,
    )
    _check_experts(ours, experts, config_json)
    gated, has_shared = config.moe_shared_expert_gate, theirs.shared_ffn_size is not None
    if has_shared and not gated:
        raise _another("--moe-shared-expert-gate", True, False, config_json)
    check_router(config, f"as in {config_json}")


@functools.cache
def is_judged(name: str) -> bool:
    """True if a field of TransformerConfig is compared, fixed, or known to have no effect."""
    fixed = {*COMPARED, *ONE_VALUE, *_OWN_RULES}
    fixed |= {rule.argument for rule in RULES} | {rule.argument for rule in ROUTER}
    patterns = (pattern for group in NO_EFFECT.values() for pattern in group)
    return name in fixed or any(fnmatch(name, pattern) for pattern in patterns)


def _unjudged(config: Any) -> dict[str, Any]:
    """Fields that differ from their default and that no table names."""
    if not dataclasses.is_dataclass(config):
        return {}
    found = {}
    for field in dataclasses.fields(config):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        value = getattr(config, field.name, default)
        if not is_judged(field.name) and value != default:
            found[field.name] = value
    return found


def _refuse_scaling(expected: Any, found: Any, config_json: Path) -> None:
    """Raises ValueError for llama3 rope scaling that one side lacks or that differs."""
    if expected is None or found is None:
        raise _another("--use-rope-scaling", expected is not None, found is not None, config_json)
    for name, value in expected.items():
        flag = "--rope-scaling-factor" if name == "factor" else f"{name} of --use-rope-scaling"
        if value != found[name]:
            raise _another(flag, value, found[name], config_json)


def _another(flag: str, expected: Any, found: Any, config_json: Path) -> ValueError:
    return ValueError(
        f"{flag} must be {_show(expected)} as in {config_json}, got {_show(found)}; these "
        f"arguments build another model"
    )


def _show(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return shown(getattr(value, "__name__", value))


_TRACKER = "latest_checkpointed_iteration.txt"


def checkpoint_of_convert(args: argparse.Namespace) -> Path | None:
    """Returns the folder that `tlora convert` wrote and Megatron is about to load; None = another.

    Training that goes on from such a folder may save into it: then its tracker names an iteration,
    whose weights are no longer those of the fingerprint.
    """
    from megatron.training.checkpointing import checkpoint_exists

    sources = (args.load, args.pretrained_checkpoint)
    folder = next((Path(source) for source in sources if checkpoint_exists(source)), None)
    if folder is None or getattr(args, "ckpt_step", None) is not None:
        return None
    tracker = folder / _TRACKER
    return folder if tracker.is_file() and tracker.read_text().strip() == "release" else None


def precision_of(args: argparse.Namespace) -> Precision:
    """Returns the precision of the base's weights."""
    if getattr(args, "fp8_param_gather", False) or getattr(args, "fp4_param_gather", False):
        return "fp8"
    return "bfloat16" if args.bf16 else "float32"


def without_quantization(chunks: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Runs the models in the precision of their weights: without the FP8 and FP4 of activations.

    What is asked is which model it is, and that shows the better the less is rounded. The scales
    of delayed scaling, which training begins with, stay as they are.
    """
    modules = (module for model in language_models(chunks) for module in model.modules())
    configs = {id(module.config): module.config for module in modules if hasattr(module, "config")}
    return cleared(configs.values(), "fp8", "fp4")
