"""Parts of the trainer's models that would not be built, or not as their arguments ask.

Megatron-LM's `--rope-scaling-factor` does not reach the model: `pretrain_gpt.py` builds every model
with the factor 8 (core_v0.16.1 to main), and HybridModel knows no scaling. Llama 3.2 has 32.

`ROUTER` lists arguments that make another router than Hugging Face's; `ADAPTERS` those under which
adapters on experts would be wrong or have not been tried.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import megatron.core
import torch
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models import backends
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import torch_norm, transformer_block
from torch import Tensor

from tlora_megatron.config.job import JobSpec
from tlora_megatron.config.parallel_rules import check_job_over_experts
from tlora_megatron.config.schema import JobError, RunConfig
from tlora_megatron.integrations.megatron.layer.core_attention import PackedCoreAttention
from tlora_megatron.integrations.megatron.layer.norm_and_rotary import RMSNorm
from tlora_megatron.integrations.megatron_lm.guard import (
    FLAG,
    NOT_TRIED,
    Rule,
    core_version,
    layer_pattern,
)
from tlora_megatron.model.backbone import over_base
from tlora_megatron.model.spec import ExpertsSpec, ModelSpec
from tlora_megatron.ops.frozen.rotary import inverse_frequencies

logger = logging.getLogger(__name__)

_MARK = "_tlora_local_parts"
_NORMS = ((backends, "LNImpl"), (gpt_layer_specs, "LNImpl"), (transformer_block, "LayerNormImpl"))
"""Where Megatron keeps the norm of its local spec."""


def install(*, context_parallel: bool, sequence_parallel: bool) -> None:
    """Replaces the parts that would refuse to be built; call it before the model is built.

    Without Transformer Engine, Megatron's attention refuses context parallelism and its norm
    sequence parallelism; with apex, its norm refuses RMSNorm. Attention becomes ours in any case,
    once the model stands.
    """
    if getattr(backends, _MARK, False):
        return
    setattr(backends, _MARK, True)
    _leave_apex_norm()
    if context_parallel:
        backends.LocalSpecProvider.core_attention = lambda self: PackedCoreAttention
    if sequence_parallel:
        torch_norm.WrappedTorchNorm.__new__ = staticmethod(_sharded_norm)


def _leave_apex_norm() -> None:
    """Puts torch's norm where Megatron found apex: FusedLayerNorm computes LayerNorm alone."""
    apex_s = [(module, name) for module, name in _NORMS if getattr(module, name) is FusedLayerNorm]
    for module, name in apex_s:
        setattr(module, name, torch_norm.WrappedTorchNorm)
    if apex_s:
        logger.info("the norm of the local layers is torch's: apex's computes no RMSNorm")


def _sharded_norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> RMSNorm:
    if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
        raise ValueError(
            f"normalization must be RMSNorm without --apply-layernorm-1p under sequence parallel "
            f"without Transformer Engine, got {config.normalization}"
        )
    return RMSNorm(config, hidden_size, eps)


_BUILT_FACTOR = 8.0
"""Default of GPTModel's `rope_scaling_factor`, which no script changes."""
_ROUNDING = 1e-5
"""Relative; devices raise to a power in their own way."""


def set_rotary_frequencies(model: Any, spec: ModelSpec) -> None:
    """Gives a built model the rope scaling that its script has left out.

    Raises:
        ValueError: if the model has frequencies that nobody asked for.
    """
    rotary = getattr(model, "rotary_pos_emb", None)
    if rotary is None or model.position_embedding_type != "rope":
        return
    expected = inverse_frequencies(spec)
    if _equal(rotary.inv_freq, expected):
        return
    if not any(_equal(rotary.inv_freq, built) for built in _left_out(spec)):
        raise ValueError(
            f"the model's rotary frequencies must be those of --rotary-base "
            f"{spec.rope_theta:.0f} and rope scaling {spec.rope_scaling}, got {rotary.inv_freq}"
        )
    logger.warning(
        "--rope-scaling-factor %g is set in the model: the script had left it out",
        spec.rope_scaling["factor"] if spec.rope_scaling else 1,
    )
    rotary.inv_freq = expected.to(rotary.inv_freq.device)


def _left_out(spec: ModelSpec) -> list[Tensor]:
    """Frequencies of scripts that ignore the factor, or all scaling."""
    if spec.rope_scaling is None:
        return []
    scaling = spec.rope_scaling | {"factor": _BUILT_FACTOR}
    return [inverse_frequencies(replace(spec, rope_scaling=s)) for s in (scaling, None)]


def _equal(found: Tensor, expected: Tensor) -> bool:
    found = found.detach().float().cpu()
    return found.shape == expected.shape and torch.allclose(
        found, expected, rtol=_ROUNDING, atol=0.0
    )


_EXACT_PRE_SOFTMAX = (0, 18)
"""The first megatron-core whose `--moe-router-pre-softmax` chooses by fp32 scores in bf16."""


_OTHER_ROUTER = "routers of Qwen and Mixtral are a softmax over all experts, of which the top count"
_OTHER_LAYER = "experts of Qwen and Mixtral are whole MLPs, weighted behind their activation"
_TIES = "its top-k may take the other one of two equal logits"
_PADDING = "padding rows would be taken for rows of jobs"

ROUTER: tuple[Rule, ...] = (
    Rule("moe_router_score_function", ("softmax",), _OTHER_ROUTER),
    Rule("moe_router_enable_expert_bias", (False,), _OTHER_ROUTER),
    Rule("moe_router_num_groups", (None,), _OTHER_ROUTER),
    Rule("moe_router_group_topk", (None,), _OTHER_ROUTER),
    Rule("moe_router_topk_limited_devices", (None,), _OTHER_ROUTER),
    Rule("moe_router_topk_scaling_factor", (None, 1.0), _OTHER_ROUTER),
    Rule("moe_router_force_biased", (None,), _OTHER_ROUTER),
    Rule("moe_enable_routing_replay", (False,), _OTHER_ROUTER),
    Rule("moe_router_fusion", (False,), _TIES),
    Rule("moe_apply_probs_on_input", (False,), _OTHER_LAYER),
    Rule("moe_latent_size", (None,), _OTHER_LAYER),
    Rule("moe_mlp_glu_interleave_size", (None,), _OTHER_LAYER),
    Rule("moe_shared_expert_glu_interleave_size", (None,), _OTHER_LAYER),
)
"""Arguments, and fields of TransformerConfig, that change what a layer of experts computes."""

ADAPTERS: tuple[Rule, ...] = (
    Rule("moe_use_legacy_grouped_gemm", (False,), "its weights are of another shape"),
    Rule("moe_router_padding_for_quantization", (False, None), _PADDING),
    Rule("moe_router_padding_for_fp8", (False, None), _PADDING),
    Rule("fp8", (None, False), _PADDING),
    Rule("fp4", (None, False), _PADDING),
    Rule("moe_shared_expert_overlap", (False,), NOT_TRIED),
    Rule("use_transformer_engine_op_fuser", (False,), "it calls no linear of the experts"),
    Rule("fine_grained_activation_offloading", (False,), "it frees inputs that adapters keep"),
    Rule("moe_paged_stash", (False,), "it frees inputs that adapters keep"),
    Rule("overlap_dispatch_backward_with_experts_wgrad", (False,), NOT_TRIED),
    Rule("moe_single_grouped_weight", (False,), NOT_TRIED),
    Rule("moe_use_grouped_tensor", (False,), NOT_TRIED),
    Rule("moe_dispatch_fwd_dtype", ("bf16",), NOT_TRIED),
    Rule("moe_combine_bwd_dtype", ("bf16",), NOT_TRIED),
    Rule("use_tp_pp_dp_mapping", (False,), "adapters are gathered in the other order of ranks"),
)
"""Arguments that exclude adapters on routed experts."""


def experts_from_arguments(args: argparse.Namespace) -> ExpertsSpec | None:
    """Returns the experts that Megatron's arguments describe; None unless every layer has some."""
    count = getattr(args, "num_experts", None)
    if not count or not _in_every_layer(args):
        return None
    return ExpertsSpec(
        num_experts=count,
        top_k=args.moe_router_topk,
        ffn_size=args.moe_ffn_hidden_size or args.ffn_hidden_size,
        normalizes=not args.moe_router_pre_softmax,
    )


def _in_every_layer(args: argparse.Namespace) -> bool:
    pattern = layer_pattern(args)
    if pattern is not None:
        return set(pattern.split("/")[0].replace("|", "")) == {"*", "E"}
    frequency = getattr(args, "moe_layer_freq", 1)
    return frequency == 1 or (isinstance(frequency, Sequence) and set(frequency) == {1})


def expert_sizes(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the sizes of expert parallelism by the names of `parallel`; 1 and 1 without."""
    tp_size = args.tensor_model_parallel_size
    return {
        "ep_size": getattr(args, "expert_model_parallel_size", None) or 1,
        "expert_tp_size": getattr(args, "expert_tensor_parallel_size", None) or tp_size,
    }


def check_router(values: Any, where: str) -> None:
    """Refuses routers and experts that are not Hugging Face's of Qwen and Mixtral.

    Args:
        values: Megatron's arguments, or a TransformerConfig.
        where: ends the rule: what asks for it.
    """
    for rule in ROUTER:
        rule.check(values, where)
    in_bf16 = values.params_dtype == torch.bfloat16
    why = "logits in another precision give 3 % of the tokens other experts"
    dtypes = (None,) if in_bf16 else (None, "fp32")
    Rule("moe_router_dtype", dtypes, why).check(values, where)
    if in_bf16 and core_version(megatron.core.__version__) < _EXACT_PRE_SOFTMAX:
        why = (
            "Megatron-core rounds the scores before it chooses by them, up to 0.17; use 0.18 or "
            "newer"
        )
        Rule("moe_router_pre_softmax", (False,), why).check(values, f"{where} in bf16")


def settle_expert_jobs(
    config: RunConfig, spec: ModelSpec, args: argparse.Namespace
) -> tuple[RunConfig, bool]:
    """Leaves out jobs whose adapters on routed experts cannot be right, or refuses the run.

    Returns:
        The configuration, and whether any job of it adapts routed experts.

    Raises:
        ValueError: with `run.on_job_error: stop`, naming the first such job and the flag; for
            settings of the run that no base with routed experts can keep; and if no job is left.
    """
    if spec.experts is None:
        return config, False
    if config.run.deterministic:
        raise ValueError(
            f"run.deterministic must be off with {FLAG} over a base with routed experts, whose "
            "rows come in any number, which moves the last bits; got on"
        )
    able, errors = [], list(config.job_errors)
    for job in config.jobs:
        try:
            _check_job(job, config, spec, args)
            able.append(job)
        except ValueError as error:
            if config.run.on_job_error == "stop":
                raise
            errors.append(JobError(name=job.name, message=str(error)))
    if not able:
        reasons = "; ".join(error.message for error in errors)
        raise ValueError(f"jobs must hold at least one that can start, got {reasons}")
    left = replace(config, jobs=tuple(able), job_errors=tuple(errors))
    return left, any(over_base(job, spec).lora.expert_targets for job in able)


def _check_job(job: JobSpec, config: RunConfig, spec: ModelSpec, args: argparse.Namespace) -> None:
    targets = over_base(job, spec).lora.expert_targets
    where = f"for job {job.name!r}, which adapts routed experts"
    sizes = expert_sizes(args)
    if targets and sizes["ep_size"] > 1:
        why = "replicas of experts are other ranks"
        Rule("use_distributed_optimizer", (False,), why).check(args, where)
    check_job_over_experts(job, config)
    if not targets:
        return
    for rule in ADAPTERS:
        rule.check(args, where)
    check_router(args, where)
    part, tp_size = sizes["expert_tp_size"], args.tensor_model_parallel_size
    if part not in (1, tp_size):
        raise ValueError(
            f"--expert-tensor-parallel-size must be 1 or {tp_size} {where}, got {part}; {NOT_TRIED}"
        )
