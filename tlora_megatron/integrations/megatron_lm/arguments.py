"""Joins Megatron-LM's arguments with the file of jobs into one configuration.

Parallel sizes, precision, recompute, seed, output folder and token budget come from the trainer's
own flags; `jobs` and `defaults` from the file of `--tlora-config`. What the file says beside that
must say the same.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tlora_megatron.config.documents import read_document
from tlora_megatron.config.load import ignored_settings, read_config
from tlora_megatron.config.parallel_rules import refuse_replicas
from tlora_megatron.config.reader import ConfigError, read_spec, show
from tlora_megatron.config.rules import resolve
from tlora_megatron.config.schema import BaseModelSpec, RunConfig, RunSpec
from tlora_megatron.config.sections import refuse_quantization
from tlora_megatron.integrations.megatron_lm.experts import (
    expert_sizes,
    experts_from_arguments,
    settle_expert_jobs,
)
from tlora_megatron.integrations.megatron_lm.guard import FLAG, layer_pattern
from tlora_megatron.integrations.megatron_lm.refusals import switch_off
from tlora_megatron.integrations.megatron_lm.same_model import (
    check_described,
    check_transformer_config,
)
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import ModelSpec, refuse_gpt_oss

logger = logging.getLogger(__name__)

_ORIGINAL_POSITIONS = 8192
_LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR = 1.0, 4.0
"""Constants of Megatron-core's `RotaryEmbedding._apply_scaling`; only the factor is an argument."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """One run under Megatron-LM's trainer."""

    config: RunConfig
    spec: ModelSpec
    layout: ParallelLayout
    config_json: Path | None
    """The Hugging Face file that the arguments agree with; None: none is known, or the weights are
    random."""
    adapts_experts: bool = False
    """Some job has adapters on routed experts."""


def add_flag(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds `--tlora-config` to Megatron's parser."""
    group = parser.add_argument_group("tlora", "Many LoRA jobs on one frozen base.")
    group.add_argument(
        FLAG,
        metavar="FILE",
        default=None,
        help="YAML or JSON with the jobs (jobs, defaults), as for `tlora train`; the layout, the "
        "precision and --save come from the other arguments",
    )
    return parser


def resolve_arguments(args: argparse.Namespace) -> None:
    """Sets arguments that follow from the flag, before Megatron validates them."""
    # The base starts every run as it is; the jobs' own checkpoints say how far they are.
    args.finetune = args.no_load_optim = args.no_load_rng = True
    switch_off(args)
    # The router's bias would follow the tokens of all jobs; it is the base's.
    args.moe_router_bias_update_rate = 0.0
    if args.transformer_impl == "local":
        # apex's kernel for LayerNorm, which torch's RMSNorm refuses to stand for.
        args.no_persist_layer_norm = True


def launch_settings(args: argparse.Namespace, *, tokenizer_size: int) -> LaunchSettings:
    """Reads the file of jobs and adds the values that Megatron's arguments decide.

    Args:
        tokenizer_size: entries of Megatron's tokenizer: the vocabulary where neither a Hugging Face
            config nor `--vocab-size` says another.
    """
    path = Path(args.tlora_config)
    document = read_document(path, "--tlora-config")
    given = document.get("base_model")
    is_named = isinstance(given, dict) and given.get("path") is not None
    refuse_replicas(document.get("parallel"), FLAG)
    _join(document, _decided(args))
    folder = path.resolve().parent
    base_model = _base_model(args, document.pop("base_model"), folder)
    config = read_config(document, folder, base_model=base_model)
    # Models may have more rows than their tokenizer has entries (Qwen): `tlora convert` says so.
    vocab_size = args.vocab_size or tokenizer_size
    spec = spec_from_arguments(args, vocab_size=min(args.padded_vocab_size, vocab_size))
    config_json, known = base_model.config_file, None
    if is_named or not base_model.random_init:
        known = _known_spec(config_json, must=is_named)
    if known is not None:
        check_described(spec, known, config_json, padded_vocab_size=args.padded_vocab_size)
        check_transformer_config(args, known, config_json)
    config, adapts_experts = settle_expert_jobs(config, known or spec, args)
    for sentence in (*_ignored(config), *ignored_settings(config)):
        logger.warning("%s", sentence)
    return LaunchSettings(
        config=config,
        spec=known or spec,
        layout=ParallelLayout(
            **expert_sizes(args),
            tp_size=args.tensor_model_parallel_size,
            pp_size=args.pipeline_model_parallel_size,
            cp_size=args.context_parallel_size,
            dp_size=args.data_parallel_size,
            sequence_parallel=bool(args.sequence_parallel),
        ),
        config_json=None if known is None else config_json,
        adapts_experts=adapts_experts,
    )


def _ignored(config: RunConfig) -> list[str]:
    """One sentence for each setting in whose place the trainer has a flag of its own."""
    base, run = config.base_model, config.run
    stages = config.parallel.first_stage_layers, config.parallel.last_stage_layers
    default = RunSpec(output_dir=run.output_dir)
    found = {
        "parallel.first_stage_layers": (stages[0], "--decoder-first-pipeline-num-layers"),
        "parallel.last_stage_layers": (stages[1], "--decoder-last-pipeline-num-layers"),
        "run.stop_timeout_s": (run.stop_timeout_s != default.stop_timeout_s, "torchrun"),
        "base_model.seed": (base.random_init and base.seed, "--seed"),
    }
    return [
        f"{name} has no effect with {FLAG}: {who} decides"
        for name, (given, who) in found.items()
        if given
    ]


def spec_from_arguments(args: argparse.Namespace, *, vocab_size: int) -> ModelSpec:
    """Returns the backbone's shape that Megatron's arguments describe."""
    qkv_bias, qk_norm = bool(args.add_qkv_bias), bool(args.qk_layernorm)
    pattern, norm_eps = layer_pattern(args), getattr(args, "layernorm_epsilon", None)
    kind = "qwen3" if qk_norm else "qwen2" if qkv_bias else "llama"
    experts = experts_from_arguments(args)
    if experts is not None:
        kind = "qwen3_moe"
    return ModelSpec(
        model_type=kind,
        # HybridModel counts an attention and its MLP as two.
        num_layers=pattern.split("/")[0].count("*") if pattern else int(args.num_layers),
        hidden_size=args.hidden_size,
        num_heads=args.num_attention_heads,
        num_kv_heads=args.num_query_groups
        if args.group_query_attention
        else args.num_attention_heads,
        head_dim=args.kv_channels,
        ffn_size=args.ffn_hidden_size if experts is None else experts.ffn_size,
        vocab_size=vocab_size,
        max_positions=args.max_position_embeddings,
        norm_eps=float(args.norm_epsilon if norm_eps is None else norm_eps),
        rope_theta=float(args.rotary_base),
        rope_scaling=_rope_scaling(args),
        tied_embeddings=not args.untie_embeddings_and_output_weights,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        shared_ffn_size=getattr(args, "moe_shared_expert_intermediate_size", None),
        experts=experts,
    )


def _rope_scaling(args: argparse.Namespace) -> dict[str, Any] | None:
    if not args.use_rope_scaling:
        return None
    return {
        "factor": float(args.rope_scaling_factor),
        "low_freq_factor": _LOW_FREQ_FACTOR,
        "high_freq_factor": _HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": _ORIGINAL_POSITIONS,
    }


def _decided(args: argparse.Namespace) -> dict[str, dict[str, tuple[Any, str]]]:
    """Returns section -> key -> the value that arguments decide, and its flag."""
    dtype = "bfloat16" if args.params_dtype == torch.bfloat16 else "float32"
    experts = {}
    if getattr(args, "num_experts", None):
        sizes = expert_sizes(args)
        experts["ep_size"] = sizes["ep_size"], "--expert-model-parallel-size"
        if sizes["expert_tp_size"] in (1, args.tensor_model_parallel_size):
            experts["expert_tp_size"] = sizes["expert_tp_size"], "--expert-tensor-parallel-size"
    return {
        "base_model": {"dtype": (dtype, "--bf16")},
        "parallel": {
            "tp_size": (args.tensor_model_parallel_size, "--tensor-model-parallel-size"),
            "pp_size": (args.pipeline_model_parallel_size, "--pipeline-model-parallel-size"),
            "cp_size": (args.context_parallel_size, "--context-parallel-size"),
            "sequence_parallel": (bool(args.sequence_parallel), "--sequence-parallel"),
            "shard_optimizer": (
                bool(args.use_distributed_optimizer),
                "--use-distributed-optimizer",
            ),
            **experts,
        },
        "run": {
            "output_dir": (resolve(args.save, Path.cwd()), "--save"),
            "micro_batch_tokens": (args.seq_length, "--seq-length"),
            "recompute": (args.recompute_granularity or "none", "--recompute-granularity"),
            # Between jobs' ends, all are saved together: every so many iterations.
            "checkpoint_every_steps": (0, "--save-interval"),
            "seed": (args.seed, "--seed"),
        },
    }


def _join(document: dict[str, Any], decided: Mapping[str, Mapping[str, tuple[Any, str]]]) -> None:
    """Adds the values that arguments decide to the document's sections, in place."""
    for section, values in decided.items():
        raw = document.get(section)
        raw = {} if raw is None else raw
        if not isinstance(raw, dict):
            continue  # the reader refuses it
        for key, (value, flag) in values.items():
            given = raw.get(key, value)
            if key == "output_dir" and isinstance(given, str):
                given = resolve(given, Path.cwd())
            if given != value:
                raise ConfigError(
                    f"{section}.{key} must agree with {flag}, which makes it {show(value)}, got "
                    f"{show(raw[key])}; leave it out of the file of {FLAG}"
                )
        document[section] = raw | {key: value for key, (value, _) in values.items()}


def _base_model(args: argparse.Namespace, raw: Any, folder: Path) -> BaseModelSpec:
    """Returns the section with its path filled in, the folder of the tokenizer."""
    base = read_spec(BaseModelSpec, raw, "base_model")
    refuse_quantization(base, FLAG)
    if base.config is not None:
        raise ConfigError(
            f"base_model.config must be absent with {FLAG}: Megatron's arguments describe the base"
        )
    if base.path is not None:
        directory = Path(resolve(base.path, folder))
        name = "base_model.path"
    elif args.tokenizer_type == "HuggingFaceTokenizer" and args.tokenizer_model:
        directory = Path(args.tokenizer_model).resolve()
        name = "--tokenizer-model"
    else:
        raise ConfigError(
            f"base_model.path, or --tokenizer-type HuggingFaceTokenizer with --tokenizer-model, "
            f"must name the base's Hugging Face folder for the tokenizer, got --tokenizer-type "
            f"{args.tokenizer_type}"
        )
    if not directory.is_dir():
        raise ConfigError(f"{name} must be an existing directory, got {directory}")
    return replace(base, path=str(directory))


def _known_spec(config_json: Path, *, must: bool) -> ModelSpec | None:
    """Reads the file that describes the base; None if there is none, or for another architecture.

    Args:
        must: a file that cannot be read is an error.
    """
    try:
        spec = read_model_spec(config_json)
        refuse_gpt_oss(spec.model_type, f"the base of a Megatron-LM script, {config_json.parent},")
        return spec
    except ValueError as error:
        if must:
            raise
        if config_json.is_file():
            logger.warning("the arguments alone describe the base: %s", error)
        return None
