"""Decisions of Megatron-LM's arguments, files that contradict them, and flags that jobs ignore."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.tiny_models import TINY_MODEL_TYPES, tiny_config
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.integrations.megatron_lm.arguments import (
    add_flag,
    launch_settings,
    resolve_arguments,
    spec_from_arguments,
)
from tlora_megatron.integrations.megatron_lm.refusals import describe_unused
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.training.formats.megatron_flags import megatron_arguments

TRAINER = {
    "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "context_parallel_size": 1,
    "data_parallel_size": 4, "sequence_parallel": True, "use_distributed_optimizer": False,
    "params_dtype": torch.bfloat16, "save": "out", "seq_length": 512, "recompute_granularity": None,
    "seed": 7, "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": None,
}  # fmt: skip


def spec_of(folder: Path, kind: str = "llama", **fields: Any) -> ModelSpec:
    folder.mkdir(exist_ok=True)
    tiny_config(kind, **fields).save_pretrained(folder)  # type: ignore[arg-type]
    return read_model_spec(folder / "config.json")


def arguments(spec: ModelSpec, **fields: Any) -> argparse.Namespace:
    return argparse.Namespace(**(megatron_arguments(spec) | TRAINER | fields))


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return spec_of(tmp_path / "base")


def write_config(folder: Path, **sections: Any) -> str:
    (folder / "data.jsonl").write_text('{"text": "a b c"}\n')
    job = {"name": "a", "data": {"train": "data.jsonl"}, "max_steps": 3}
    document = {"base_model": {"path": "base"}, "jobs": [job], **sections}
    path = folder / "jobs.json"
    path.write_text(json.dumps({k: v for k, v in document.items() if v is not None}))
    return str(path)


@pytest.mark.parametrize("kind", [kind for kind in TINY_MODEL_TYPES if kind != "llama3"])
@pytest.mark.parametrize("tied", [False, True])
def test_arguments_of_a_model_describe_it(tmp_path: Path, kind: str, tied: bool) -> None:
    spec = spec_of(tmp_path / kind, kind, tied=tied)
    found = spec_from_arguments(arguments(spec), vocab_size=spec.vocab_size)
    assert replace(found, model_type=spec.model_type) == spec


@pytest.mark.parametrize(
    ("fields", "name", "expected"),
    [
        ({"group_query_attention": False, "num_query_groups": 1}, "num_kv_heads", 8),
        ({"num_layers": 6, "hybrid_layer_pattern": "*-*-*-"}, "num_layers", 3),
        # Older versions name it so.
        ({"layernorm_epsilon": None, "norm_epsilon": 1e-3}, "norm_eps", 1e-3),
    ],
)
def test_what_arguments_mean(
    spec: ModelSpec, fields: dict[str, Any], name: str, expected: object
) -> None:
    found = spec_from_arguments(arguments(spec, **fields), vocab_size=8)
    assert getattr(found, name) == expected


@pytest.mark.parametrize(("given", "expected"), [(120, 120), (None, 100), (200, 128)])
def test_the_vocabulary_is_that_of_the_arguments_before_the_tokenizer_s(
    tmp_path: Path, spec: ModelSpec, given: int | None, expected: int
) -> None:
    (tmp_path / "base/config.json").unlink()
    fields = {"vocab_size": given, "padded_vocab_size": 128, "tokenizer_model": tmp_path / "base"}
    path = write_config(tmp_path, base_model=None)
    settings = launch_settings(arguments(spec, tlora_config=path, **fields), tokenizer_size=100)
    assert settings.spec.vocab_size == expected


def test_settings_join_file_and_arguments(tmp_path: Path, spec: ModelSpec) -> None:
    path = write_config(tmp_path, run={"on_job_error": "skip", "tensorboard": False})
    args = arguments(spec, tlora_config=path, recompute_granularity="full")
    settings = launch_settings(args, tokenizer_size=100)
    run = settings.config.run
    assert run.output_dir == str(Path.cwd() / "out")
    assert (run.micro_batch_tokens, run.recompute, run.seed) == (512, "full", 7)
    assert (run.checkpoint_every_steps, run.on_job_error, run.tensorboard) == (0, "skip", False)
    parallel, layout = settings.config.parallel, settings.layout
    assert (parallel.tp_size, parallel.sequence_parallel, layout.dp_size) == (2, True, 4)
    assert not parallel.shard_optimizer
    args.use_distributed_optimizer = True
    sharded = launch_settings(args, tokenizer_size=100).config.parallel
    assert sharded == replace(parallel, shard_optimizer=True)
    assert settings.config.base_model.dtype == "bfloat16"
    assert settings.spec == spec
    assert settings.config.base_model.folder == tmp_path / "base"


@pytest.mark.parametrize("section", [None, {}, {"path": None}])
def test_without_a_base_model_the_tokenizer_s_folder_stands_for_it(
    tmp_path: Path, spec: ModelSpec, section: dict[str, Any] | None
) -> None:
    path, base = write_config(tmp_path, base_model=section), tmp_path / "base"
    args = arguments(spec, tlora_config=path, tokenizer_model=str(base))
    settings = launch_settings(args, tokenizer_size=100)
    assert settings.config.base_model.name == str(base)
    assert settings.config_json == base / "config.json"


@pytest.mark.parametrize("folder", ["tokenizer alone", "another architecture", "random weights"])
def test_arguments_alone_describe_a_base_without_a_file(
    tmp_path: Path, spec: ModelSpec, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    section = {"random_init": True} if folder == "random weights" else None
    path, base = write_config(tmp_path, base_model=section), tmp_path / "base"
    if folder == "tokenizer alone":
        (base / "config.json").unlink()
    if folder == "another architecture":
        (base / "config.json").write_text('{"model_type": "gpt_oss"}')
    args = arguments(replace(spec, norm_eps=0.5), tlora_config=path, tokenizer_model=str(base))
    settings = launch_settings(args, tokenizer_size=100)
    assert settings.spec.norm_eps == 0.5
    assert settings.config_json is None
    is_told = "the arguments alone describe the base: " in caplog.text
    assert is_told == (folder == "another architecture")


def test_without_effect(tmp_path: Path, spec: ModelSpec, caplog: pytest.LogCaptureFixture) -> None:
    quiet = write_config(tmp_path)
    launch_settings(arguments(spec, tlora_config=quiet), tokenizer_size=100)
    assert not caplog.records
    path = write_config(
        tmp_path,
        base_model={"path": "base", "seed": 3},
        parallel={"pp_size": 2, "first_stage_layers": 3},
        run={"stop_timeout_s": 3.0, "gpu_memory_gb": 4.0, "correct_speeds": True},
        defaults={"eval_every_steps": 2, "service": {"gpus": 2}},
    )
    pipeline = {"pipeline_model_parallel_size": 2, "data_parallel_size": 2}
    launch_settings(arguments(spec, tlora_config=path, **pipeline), tokenizer_size=100)
    for key in (
        *("base_model.seed", "parallel.first_stage_layers"),
        *("run.stop_timeout_s", "run.gpu_memory_gb", "run.correct_speeds"),
        *("eval_every_steps of job a", "service of job a"),
    ):
        assert any(record.getMessage().startswith(key) for record in caplog.records), key


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"tp_size": 1}}, "parallel.tp_size must agree with --tensor-model-parallel"),
        ({"parallel": {"sequence_parallel": False}}, "agree with --sequence-parallel"),
        ({"parallel": {"shard_optimizer": True}}, "agree with --use-distributed-optimizer"),
        ({"run": {"output_dir": "elsewhere"}}, "run.output_dir must agree with --save"),
        ({"run": {"micro_batch_tokens": 4096}}, "agree with --seq-length, which makes it 512"),
        ({"run": {"recompute": "full"}}, "agree with --recompute-granularity"),
        ({"run": {"recompute": "auto"}}, "which makes it 'none', got 'auto'; leave it out"),
        ({"run": {"seed": 0}}, "run.seed must agree with --seed, which makes it 7, got 0"),
        ({"run": {"checkpoint_every_steps": 50}}, "agree with --save-interval"),
        ({"base_model": {"path": "base", "dtype": "float32"}}, "dtype must agree with --bf16"),
        ({"base_model": {"path": "base", "quantization": "fp8"}},
         "base_model.quantization must be null under --tlora-config, got 'fp8'"),
        ({"base_model": {"config": "c.json"}}, "base_model.config must be absent"),
        ({"base_model": {"path": "none"}}, "base_model.path must be an existing directory"),
        ({"base_model": None}, "base_model.path, or --tokenizer-type HuggingFaceTokenizer"),
        ({"run": {"unknown": 1}}, "run.unknown is not a known key"),
        ({"parallel": 3}, "parallel must be a mapping"),
        ({"more": {}}, "more is not a known key"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_by_both_names(
    tmp_path: Path, spec: ModelSpec, sections: dict[str, Any], message: str
) -> None:
    args = arguments(spec, tlora_config=write_config(tmp_path, **sections))
    with pytest.raises(ConfigError, match=message):
        launch_settings(args, tokenizer_size=100)


def test_a_named_base_of_gpt_oss_is_refused(tmp_path: Path, spec: ModelSpec) -> None:
    path = write_config(tmp_path, base_model={"path": "base"})
    tiny_config("gpt_oss").save_pretrained(tmp_path / "base")
    message = r"the base of a Megatron-LM script, .*base, must not be of model_type gpt_oss yet"
    with pytest.raises(ValueError, match=message):
        launch_settings(arguments(spec, tlora_config=path), tokenizer_size=100)


def test_what_agrees_may_be_said_twice(tmp_path: Path, spec: ModelSpec) -> None:
    sections: dict[str, Any] = {
        "parallel": {"tp_size": 2, "sequence_parallel": True},
        "run": {"output_dir": "out", "seed": 7},
        "base_model": {"path": "base", "dtype": "bfloat16"},
    }
    args = arguments(spec, tlora_config=write_config(tmp_path, **sections))
    assert launch_settings(args, tokenizer_size=100).config.run.seed == 7


ANOTHER_MODEL = {
    "--num-layers must be 4": {"num_layers": 3},
    "--kv-channels must be 8": {"kv_channels": 4},
    "--num-query-groups must be 4": {"num_query_groups": 2},
    "--ffn-hidden-size must be 96": {"ffn_hidden_size": 8},
    "--norm-epsilon must be 1e-05": {"layernorm_epsilon": 1e-3},
    "--rotary-base must be 10000": {"rotary_base": 1000000},
    "--use-rope-scaling must be off": {"use_rope_scaling": True, "rope_scaling_factor": 8.0},
    "--untie-embeddings-and-output-weights must be on": {
        "untie_embeddings_and_output_weights": False
    },
    "--add-qkv-bias must be off": {"add_qkv_bias": True},
    "--qk-layernorm must be off": {"qk_layernorm": True},
    "--apply-layernorm-1p must be off": {"layernorm_zero_centered_gamma": True},
    "--glu-linear-offset must be 0": {"glu_linear_offset": 1.0},
    "--use-mup must be off": {"use_mup": True},
    "--softmax-scale must be absent or": {"softmax_scale": 0.5},
    "--activation-func-clamp-value must be absent": {"activation_func_clamp_value": 7.0},
}


@pytest.mark.parametrize("message", ANOTHER_MODEL)
@pytest.mark.parametrize("named", [True, False])
def test_another_model_refused(tmp_path: Path, spec: ModelSpec, message: str, named: bool) -> None:
    path = write_config(tmp_path, base_model={"path": "base"} if named else None)
    fields = ANOTHER_MODEL[message] | {"tokenizer_model": str(tmp_path / "base")}
    args = arguments(spec, tlora_config=path, **fields)
    with pytest.raises(ValueError, match=rf"{message}.* as in .*config.json, got "):
        launch_settings(args, tokenizer_size=100)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_rope_scaling": False}, "--use-rope-scaling must be on as in"),
        ({"rope_scaling_factor": 32.0}, "--rope-scaling-factor must be 8 as in .* got 32"),
    ],
)
def test_another_rope_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "original_max_position_embeddings": 8192}
    rope |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    spec = spec_of(tmp_path / "base", rope_parameters=rope)
    args = arguments(spec, tlora_config=write_config(tmp_path))
    assert launch_settings(args, tokenizer_size=100).spec == spec
    with pytest.raises(ValueError, match=message):
        launch_settings(argparse.Namespace(**(vars(args) | fields)), tokenizer_size=100)


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path: Path, spec: ModelSpec) -> None:
    args = arguments(spec, tlora_config=write_config(tmp_path), padded_vocab_size=64)
    with pytest.raises(ValueError, match=r"must hold the 128 entries .* got 64"):
        launch_settings(args, tokenizer_size=100)


def test_the_flag_sets_what_follows_from_it() -> None:
    parser = add_flag(argparse.ArgumentParser())
    args = parser.parse_args(["--tlora-config", "jobs.yaml"])
    assert args.tlora_config == "jobs.yaml"
    assert parser.parse_args([]).tlora_config is None
    for name in ("finetune", "no_load_optim", "no_load_rng"):
        setattr(args, name, False)
    args.eval_iters, args.full_validation, args.lr, args.min_lr = 10, True, None, 1e-3
    args.moe_router_bias_update_rate = 1e-3
    args.transformer_impl, args.no_persist_layer_norm = "local", False
    resolve_arguments(args)
    assert args.finetune
    assert args.no_load_optim
    assert args.no_load_rng
    assert args.moe_router_bias_update_rate == 0.0
    assert args.no_persist_layer_norm
    assert (args.eval_iters, args.full_validation, args.lr, args.min_lr) == (0, False, 0.0, 0.0)
    assert not hasattr(args, "sft"), "a version may lack it"


def test_given_flags_are_named_once_with_a_reason() -> None:
    words = (
        "x.py --lr 1e-4 --bf16 --data-path=a --lr 2e-4 --async-save --sft --optimizer-cpu-offload"
    )
    assert describe_unused(words.split()) == (
        "--lr, --optimizer-cpu-offload (each job has its own optimizer and schedule); "
        "--data-path, --sft (each job names its own data); "
        "--async-save (jobs are saved by this package, and the base never)"
    )


@pytest.mark.parametrize(
    "words", ["", "--bf16 --save out --seq-length 64", "--eval-iters=5 --eval-iters=0", "lr 1"]
)
def test_nothing_is_said_of_flags_that_work_or_were_not_given(words: str) -> None:
    assert describe_unused(words.split()) is None
    assert describe_unused([*words.split(), "--eval-iters", "5"]) is not None, "the last counts"
