"""The tlora section of a DeepSpeed JSON, those that people have too: what is taken, changed,
refused.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed")

from tests.helpers.deepspeed_files import FILES, REFUSED, load, section
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.config.schema import BaseModelSpec
from tlora_megatron.integrations.deepspeed.config import load_deepspeed_config
from tlora_megatron.integrations.deepspeed.known_keys import check_version


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_engine_has_nothing_to_train(folder: Path, stage: int) -> None:
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True}
    config = load(folder, {"zero_optimization": zero, "bf16": {"enabled": True}})
    assert (config.stage, config.tp_size, config.offload_optimizer) == (stage, 1, True)
    assert config.run.base_model.dtype == "bfloat16"
    if stage == 3:
        assert config.engine["zero_optimization"] == {"stage": 3, "overlap_comm": True}
        assert config.engine["bf16"] == {"enabled": True}
    else:
        assert config.engine["zero_optimization"] == {"stage": 0}
        assert "bf16" not in config.engine
    assert not {"tlora", "optimizer", "scheduler"} & config.engine.keys()


def test_owned_keys_become_defaults_of_the_jobs(folder: Path) -> None:
    document = {
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": 4,
        "train_batch_size": "auto",
        "flops_profiler": {"enabled": True},
        "gradient_predivide_factor": 4.0,
        "communication_data_type": "fp16",
        "zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.8, 0.9]}},
        "scheduler": {"type": "WarmupDecayLR",
         "params": {"warmup_num_steps": 3, "warmup_type": "linear", "total_num_steps": 50}},
        "tlora": section(optimizer={"lr": 5e-3}),
    }  # fmt: skip
    config = load(folder, document)
    (job,) = config.run.jobs
    assert job.optimizer.max_grad_norm == 0.5
    assert (job.optimizer.lr, job.optimizer.betas) == (5e-3, (0.8, 0.9))
    assert (job.schedule.name, job.schedule.warmup_steps) == ("linear", 3)
    told = "\n".join(config.changes)
    for key in ("gradient_clipping", "gradient_accumulation_steps", "optimizer", "scheduler"):
        assert key in told
    for key in ("flops_profiler", "gradient_predivide_factor", "communication_data_type"):
        assert f"{key} has no effect" in told
        assert key not in config.engine
    assert "zero_optimization.offload_param has no effect below stage 3" in told
    assert "train_batch_size" not in told


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({"zero_optimisation": {}}, "which would ignore it; did you mean zero_optimization?"),
        ({"sequence_parallel": {"size": 2}}, "did you mean sequence_parallel_size?"),
        ({"zero_optimization": {"stage": 3, "stage3_param_persistance_threshold": 1}},
         r"zero_optimization\.stage3_param_persistance_threshold is not .* did you mean "
         r"stage3_param_persistence_threshold\?"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"devise": "cpu"}}},
         r"zero_optimization\.offload_optimizer\.devise is not .* did you mean device\?"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"bufer_size": 1}}},
         "did you mean buffer_size?"),
        ({"bf16": {"enabled": False, "enable": True}}, r"bf16\.enable is .*mean enabled"),
        ({"optimizer": {"type": "AdamW", "parms": {}}}, r"optimizer\.parms is .*mean params"),
        ({"checkpoint": {"tag_validaton": "warn"}}, "did you mean tag_validation?"),
    ],
)  # fmt: skip
def test_a_key_that_it_would_ignore(folder: Path, document: dict[str, Any], told: str) -> None:
    """ZeRO 0 in the place of 3, and nobody would know."""
    with pytest.raises(ConfigError, match=told):
        load(folder, document)


def test_a_misspelt_section_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"exactly one .* got tlroa, did you mean tlora\?"):
        load_deepspeed_config({"tlroa": section()})


def test_what_deepspeed_reads_no_longer_is_told(folder: Path) -> None:
    (told,) = load(folder, {"aio": {"block_size": 262144, "thread_count": 1}}).changes
    assert told.startswith("aio.thread_count has no effect: DeepSpeed ")


def test_remarks_are_left_alone(folder: Path) -> None:
    document = {"_comment": "ours", "//": 1, "checkpoint": {"_why": "x", "load_universal": False}}
    assert load(folder, document).changes == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("comms_logger", {"enabled": True, "prof_ops": []}),
        ("steps_per_print", 2000),
        ("data_types", {}),
        ("aio", {"queue_depth": 8, "overlap_events": True}),
        ("timers", {"throughput": {"enabled": True, "synchronized": False}}),
        ("hybrid_engine", {"enabled": False, "max_out_tokens": 512}),
        ("torch_autocast", {"enabled": False, "dtype": "bfloat16"}),
        ("amp", {"enabled": False, "opt_level": "O1"}),
        ("sequence_parallel_size", 1),
    ],
)
def test_deepspeed_s_other_keys_are_its_own(folder: Path, key: str, value: Any) -> None:
    assert load(folder, {key: value}).changes == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fp16": {"enabled": True}}, r"fp16\.enabled must be left out.*loss scale"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, r"grad_accum_dtype .*BF16_Optimizer"),
        ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "zenflow"),
        ({"zero_optimization": {"offload_optimizer": {"super_offload": True}}},
         "super_offload must be left out"),
        ({"pipeline": {"stages": 2}}, "pipeline must be left out"),
        ({"tensor_parallel": {"autotp_size": 2, "tp_overlap_comm": True}}, "tp_overlap_comm"),
        ({"tensor_parallel": {"autotp_size": 0.5}}, "autotp_size must be an integer"),
        ({"zero_optimization": {"stage": 4}}, "stage must be 0, 1, 2 or 3, got 4"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "be none or cpu"),
        ({"bf16": True}, "bf16 must be a mapping, got true"),
        ({"bf16": {"enabled": "yes"}}, "bf16.enabled must be true or false"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_quantized_weights must be"),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine.enabled must be left out"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "mics_shard_size must be left"),
        ({"bfloat16": {"enabled": True}}, "bfloat16 must be left out.*its name is bf16"),
        ({"zero_optimization": {"stage": 3, "reduce_bucket_size": "big"}},
         "reduce_bucket_size must be what DeepSpeed takes, got 'big'"),
        ({"optimizer": "AdamW"}, "optimizer must be a mapping of type and params"),
        ({"optimizer": {"type": "AdamW", "params": [1]}}, r"optimizer\.params must be a mapping"),
        ({"scheduler": {"type": ["WarmupLR"]}}, r"scheduler\.type must be one of"),
        ({"tlora": section() | {"defaults": []}, "gradient_clipping": 1.0}, "defaults must be a"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size must be 1"),
        ({"optimizer": {"type": "Lamb"}}, r"optimizer\.type must be one of Adam, AdamW"),
        ({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, "got 'amsgrad'"),
        ({"scheduler": {"type": "OneCycle"}}, r"scheduler\.type .*tlora\.defaults\.schedule"),
        ({"scheduler": {"type": "WarmupLR"}}, "warmup_type must be linear"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear"}}},
         "warmup_num_steps must be given, got null; DeepSpeed's own default is 1000"),
        ({"tlora": section(optimizer={"lr": "auto"})}, r"jobs\.a\.optimizer\.lr .*Trainer alone"),
        ({"zero_optimization": {"stage": "auto"}}, r"stage must be a number, got 'auto'"),
        ({"tensor_parallel": {"autotp_size": "auto"}}, "autotp_size must be a number"),
        ({"tlora": section() | {"defaults": "auto"}}, r"defaults must be a value, got 'auto'"),
        ({"tlora_config": "jobs.yaml"}, "exactly one of tlora and tlora_config, got both"),
        ({"tlora": section() | {"parallel": {"tp_size": 2}}}, "must not hold parallel"),
        ({"tlora": section() | {"jbos": []}}, "jbos.*mean jobs"),
        ({"bf16": {"enabled": True}, "tlora": section() | {"base_model": {"dtype": "float32"}}},
         r"base_model\.dtype must be bfloat16 with bf16\.enabled"),
        ({"tlora": section() | {"run": {"output_dir": "o", "nano_batches": 2}}},
         r"run\.nano_batches must be 1 or auto under DeepSpeed, got 2"),
        ({"tlora": section() | {"run": {"output_dir": "o", "recompute": "selective"}}},
         r"run\.recompute must be none or full"),
        ({"tlora": section() | {"base_model": {"path": "base", "quantization": "fp8"}}},
         r"base_model\.quantization must be null under DeepSpeed, got 'fp8'"),
    ],
)  # fmt: skip
def test_refusals(folder: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(folder, change)


def test_a_file_of_jobs_starts_at_its_own_folder(folder: Path) -> None:
    (folder / "jobs.json").write_text(json.dumps(section()))
    (folder / "deep").mkdir()
    path = folder / "deep" / "ds.json"
    path.write_text(json.dumps({"tlora_config": "../jobs.json"}))
    (job,) = load_deepspeed_config(path, ["run.seed=3"]).run.jobs
    assert job.data.train == str(folder / "a.jsonl")


def test_portions_are_a_quarter_of_a_micro_batch_unless_said(folder: Path) -> None:
    assert load(folder, {}).run.run.portion_tokens == 1024
    short = section()
    del short["run"]["micro_batch_tokens"]
    assert load(folder, {"tlora": short}).run.run.portion_tokens == 1024
    del short["run"]
    assert load(folder, {"tlora": short}, output_dir="o").run.run.portion_tokens == 1024
    fair = load(folder, {}, overrides=["run.portion_tokens=null"])
    assert fair.run.run.portion_tokens is None


def test_a_deterministic_run_has_portions_of_its_own_and_no_zero_3_or_autotp(folder: Path) -> None:
    exact = load(folder, {}, overrides=["run.deterministic=true"])
    assert exact.run.run.portion_tokens is None
    assert all(job.portion_tokens for job in exact.run.jobs)
    with pytest.raises(ConfigError, match=r"zero_optimization.stage must be at most 2 with run.d"):
        load(folder, {"zero_optimization": {"stage": 3}}, overrides=["run.deterministic=true"])
    with pytest.raises(ConfigError, match=r"autotp_size must be 1 with run.d.*take parallel.tp_"):
        load(folder, {"tensor_parallel": {"autotp_size": 2}}, overrides=["run.deterministic=true"])


def test_a_built_model_has_its_own_dtype_and_the_section_s_tokenizer(folder: Path) -> None:
    built = BaseModelSpec(dtype="bfloat16")
    config = load(folder, {"zero_optimization": {"stage": 3}}, base_model=built)
    assert config.run.base_model == BaseModelSpec(path=str(folder / "base"), dtype="bfloat16")
    assert config.engine["bf16"] == {"enabled": True}
    with pytest.raises(ConfigError, match=r"bf16\.enabled must agree with the model's bfloat16"):
        load(folder, {"bf16": {"enabled": False}}, base_model=built)
    for stated, message in (
        ({"path": "base", "dtype": "float32"}, r"base_model\.dtype must agree with the model's"),
        ({"pth": "base"}, "pth.*mean path"),
        ("base", "base_model must be a mapping"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(folder, {"tlora": section() | {"base_model": stated}}, base_model=built)
    bare = section()
    del bare["base_model"]
    with pytest.raises(ConfigError, match="directory of the model's tokenizer, got none"):
        load(folder, {"tlora": bare}, base_model=built)


@pytest.mark.parametrize(
    ("version", "tp_size", "message"),
    [
        ("0.18.0", 1, None),
        ("0.19.9+cu128", 1, None),
        ("0.19.8", 2, None),
        ("0.17.6", 1, r"DeepSpeed must be >=0\.18\.0,<0\.20\.0, got 0\.17\.6"),
        ("0.20.0", 1, "got 0.20.0"),
        ("0.19.6", 2, r"under AutoTP must be >=0\.19\.8"),
    ],
)
def test_releases(version: str, tp_size: int, message: str | None) -> None:
    with pytest.raises(RuntimeError, match=message) if message else nullcontext():
        check_version(version, tp_size)


@pytest.mark.parametrize(("stage", "depth"), [(2, "auto"), (3, 1)])
def test_zero_3_has_rounds_of_one_micro_batch(folder: Path, stage: int, depth: object) -> None:
    run = {"output_dir": "out", "round_depth": "auto"}
    config = load(
        folder, {"zero_optimization": {"stage": stage}, "tlora": section() | {"run": run}}
    )
    assert config.run.run.round_depth == depth
    assert ("run.round_depth has no effect" in "\n".join(config.changes)) == (stage == 3)


def test_a_choice_of_nano_batches_is_one(folder: Path) -> None:
    run = {"output_dir": "out", "nano_batches": "auto"}
    config = load(folder, {"tlora": section() | {"run": run}})
    assert config.run.run.nano_batches == 1
    assert "run.nano_batches has no effect" in "\n".join(config.changes)


@pytest.mark.parametrize("name", FILES)
def test_it_is_taken_as_it_is(folder: Path, name: str) -> None:
    config = load(folder, FILES[name])
    (job,) = config.run.jobs
    assert job.schedule.name == ("linear" if "WarmupDecayLR" in name else "constant")
    assert (job.schedule.warmup_steps, job.optimizer.lr) == (0, 2e-4), "this package's own"
    assert config.stage == FILES[name]["zero_optimization"]["stage"]
    assert "'auto'" not in str(config.engine)


@pytest.mark.parametrize(("name", "document", "message"), REFUSED)
def test_refused_by_name(folder: Path, name: str, document: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(folder, document)


def test_keys_that_no_deepspeed_reads_are_told(folder: Path) -> None:
    told = "\n".join(load(folder, FILES["LLaMA-Factory, ds_z3_config.json"]).changes)
    assert "comms_config has no effect" in told
    assert "monitor_config has no effect" in told
