"""The strict loader: defaults, overrides, paths, and every refusal with the path it names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tlora_megatron.config.documents import merge
from tlora_megatron.config.load import config_to_dict, ignored_settings, load_config
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.config.schema import RunConfig


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a base, two data files and an adapter."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    (tmp_path / "adapter").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    return tmp_path


def document(**sections: Any) -> dict[str, Any]:
    base = {
        "base_model": {"path": "base"},
        "run": {"output_dir": "out"},
        "jobs": [{"name": "one", "data": {"train": "a.jsonl"}, "max_steps": 5},
         {"name": "two", "data": {"train": "b.jsonl"}, "epochs": 1}],
    }  # fmt: skip
    return {**base, **sections}


def load(folder: Path, content: dict[str, Any] | str, *overrides: str, **options: Any) -> RunConfig:
    path = folder / "run.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return load_config(path, overrides, **options)


def test_a_job_s_portions_are_its_own_then_the_defaults_then_the_run_s(folder: Path) -> None:
    content = document(run={"output_dir": "out", "portion_tokens": 512})
    content["jobs"][0]["portion_tokens"] = 256
    assert [job.portion_tokens for job in load(folder, content).jobs] == [256, 512]
    content["defaults"] = {"portion_tokens": 128}
    assert [job.portion_tokens for job in load(folder, content).jobs] == [256, 128]
    fair = load(folder, content, "run.portion_tokens=null", "defaults.portion_tokens=null")
    assert [job.portion_tokens for job in fair.jobs] == [256, None]
    rule = r"jobs\[0\].portion_tokens must be at most run.micro_batch_tokens = 200, got 256"
    with pytest.raises(ConfigError, match=rule):
        load(folder, document(jobs=content["jobs"]), "run.micro_batch_tokens=200")


def test_defaults_section_is_merged_deep_under_each_job(folder: Path) -> None:
    content = document(defaults={"lora": {"rank": 4, "alpha": 8}, "batch_size": 3})
    content["jobs"][1]["lora"] = {"rank": 2}
    config = load(folder, content)
    assert [(job.lora.rank, job.lora.alpha) for job in config.jobs] == [(4, 8.0), (2, 8.0)]
    assert [job.batch_size for job in config.jobs] == [3, 3]


def test_merge_replaces_lists_and_leaves_its_arguments() -> None:
    base = {"a": {"b": [1, 2], "c": 1}}
    assert merge(base, {"a": {"b": [3]}}) == {"a": {"b": [3], "c": 1}}
    assert base == {"a": {"b": [1, 2], "c": 1}}


def test_paths_start_at_the_config_file_and_output_at_the_working_directory(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path_factory.mktemp("work")
    monkeypatch.chdir(work)
    content = document()
    content["jobs"][0]["init_from"] = "adapter"
    config = load(folder, content)
    assert config.jobs[0].data.train == str(folder / "a.jsonl")
    assert config.jobs[0].init_from == str(folder / "adapter")
    assert config.base_model.path == str(folder / "base")
    assert config.run.output_dir == str(work / "out")
    assert load(folder, content, output_dir="other").run.output_dir == str(work / "other")


def test_output_dir_argument_stands_in_for_a_missing_one(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^run.output_dir must be given"):
        load(folder, document(run={}))
    assert load(folder, document(run={}), output_dir="x").run.output_dir.endswith("/x")


def test_json_file_reads_like_yaml(folder: Path) -> None:
    (folder / "run.json").write_text(json.dumps(document()))
    assert load_config(folder / "run.json") == load(folder, document())


def test_config_to_dict_is_plain_and_reads_back(folder: Path) -> None:
    config = load(folder, document())
    (folder / "config.json").write_text(json.dumps(config_to_dict(config)))
    assert load_config(folder / "config.json") == config


def test_base_from_a_config_with_random_weights(folder: Path) -> None:
    base = {"config": "base/config.json", "random_init": True, "seed": 3, "dtype": "float32"}
    config = load(folder, document(base_model=base))
    assert config.base_model.config == str(folder / "base" / "config.json")
    assert config.base_model.path is None


@pytest.mark.parametrize("text", ["2e-4", "'2e-4'", "2.0e-4", "0.0002"])
def test_float_fields_accept_what_yaml_1_1_reads_as_a_string(folder: Path, text: str) -> None:
    config = load(folder, document(), f"jobs[0].optimizer.lr={text}")
    assert config.jobs[0].optimizer.lr == 2e-4


def test_overrides_by_index_by_name_and_into_sections_that_are_not_there(folder: Path) -> None:
    content = document()
    content["jobs"][1]["name"] = "v1.5"
    config = load(
        folder, content, "jobs[0].lora.rank=8", "jobs.v1.5.lora.rank=4",
        "jobs.v1.5.optimizer.betas=[0.9, 0.95]", "jobs.v1.5.optimizer.betas[0]=0.8",
        "parallel.tp_size=2", "defaults.seed=7", "run.output_dir=elsewhere", "run.wandb_project=",
    )  # fmt: skip
    assert [job.lora.rank for job in config.jobs] == [8, 4]
    assert config.jobs[1].optimizer.betas == (0.8, 0.95)
    assert config.parallel.tp_size == 2
    assert [job.seed for job in config.jobs] == [7, 7]
    assert config.run.output_dir.endswith("/elsewhere")
    assert config.run.wandb_project is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.seed", "^--set must be path=value, got 'run.seed'"),
        ("=3", "^--set must be path=value"),
        ("jobs[9].seed=1", r"--set jobs\[9\].seed must name one of 2 entries \(names one, two\)"),
        ("jobs.three.seed=1", "must name one of 2 entries .*got 'three'"),
        ("run.seed.x=1", None),
        ("jobs[0]..rank=1", "name a path like"),
        ("run.seed={", "must be given a YAML value"),
        ("run.sed=1", "run.sed is not a known key; did you mean seed"),
        ("jobs.one.lora.rnk=1", r"jobs\[0\].lora.rnk is not a known key; did you mean rank"),
        ("jobs.one.lora.lora_alpha=1", "lora.lora_alpha is not a known key; did you mean alpha"),
        ("jobs.one.optimizer.learning_rate=1", "learning_rate is not a known key; did you mean lr"),
        ("jobs.one.lr=1e-4", r"jobs\[0\].lr is not a known key; did you mean optimizer.lr\?"),
        ("defaults.rank=8", r"defaults.rank is not a known key; did you mean lora.rank\?"),
    ],
)
def test_overrides_that_lead_nowhere(folder: Path, override: str, message: str | None) -> None:
    content = document(run={"output_dir": "out", "seed": 0})
    with pytest.raises(ConfigError, match=message or "must lead through mappings and lists, got 0"):
        load(folder, content, override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("extra={}", "^extra is not a known key; valid keys are base_model, parallel, run"),
        ("jbos=[]", "^jbos is not a known key; did you mean jobs"),
        ("parallel.tpsize=1", "^parallel.tpsize is not a known key; did you mean tp_size"),
        ("parallel.tp_size=0", "^parallel.tp_size must be at least 1, got 0"),
        ("parallel.tp_size=true", "^parallel.tp_size must be an integer, got true"),
        ("parallel.tp_size=1.0", "^parallel.tp_size must be an integer, got 1.0"),
        ("parallel.sequence_parallel=1", "must be true or false, got 1"),
        ("parallel=null", "^parallel must be a mapping, got null"),
        ("run.recompute=ful", "one of none, selective, full, auto, got 'ful'; did you mean full"),
        ("run.seed=99999999999999999999", "^run.seed must fit in 64 bits"),
        ("run.output_dir=", "^run.output_dir must be a string, got null"),
        ("run.output_dir=''", "^run.output_dir must not be empty"),
        ('run.output_dir="a\\0b"', "must hold no null character"),
        ("jobs[1].lora.rank=x", r"^jobs\[1\].lora.rank must be an integer, got 'x' \(job two\)$"),
        ("jobs[0].lora.rank=0", "lora.rank must be at least 1, got 0"),
        ("jobs[0].lora.alpha=0", "lora.alpha must be above 0, got 0.0"),
        ("jobs[0].lora.dropout=1", "lora.dropout must be below 1, got 1.0"),
        ("jobs[0].lora.dropout=true", "lora.dropout must be a number, got true"),
        ("jobs[0].optimizer.lr=.nan", "optimizer.lr must be a finite number, got nan"),
        ("jobs[0].optimizer.lr=1e999", "optimizer.lr must be a finite number"),
        ("jobs[0].optimizer.lr=fast", "optimizer.lr must be a number, got 'fast'"),
        ("jobs[0].optimizer.betas=[0.9]", "betas must be a list of 2 values"),
        ("jobs[0].optimizer.betas=[0.9, 1]", r"betas\[1\] must be below 1, got 1.0"),
        ("jobs[0].optimizer.betas=0.9", "betas must be a list, got 0.9"),
        ("jobs[0].lora.target_modules=[]", "target_modules must not be empty"),
        ("jobs[0].lora.target_modules=[q_prj]",
         r"target_modules\[0\] must be one of q_proj, .*linear_fc2, got 'q_prj'; .*mean q_proj"),
        ("defaults.lora.rank=x", "^defaults.lora.rank must be an integer, got 'x'$"),
        ("defaults.name=x", "^defaults must not hold name"),
        ("defaults=null", "^defaults must be a mapping, got null"),
        ("jobs=[]", "^jobs must be a list of at least one job"),
        ("jobs={}", "^jobs must be a list of at least one job"),
        ("jobs[0]=3", r"^jobs\[0\] must be a mapping, got 3"),
        ("jobs[0].data=null", r"^jobs\[0\].data must be a mapping, got null"),
        ("jobs[0].data={}", r"^jobs\[0\].data.train must be given"),
        ("base_model=null", "^base_model must be given"),
        ("base_model=llama", "^base_model must be a mapping, got 'llama'; names of bases are for"),
        ("base_model.path=null",
         "^base_model must set exactly one of path and config, got neither"),
        ("base_model.config=x", "^base_model must set exactly one of path and config, got both"),
        ("base_model.path=nowhere",
         "^base_model.path must be an existing directory, got .*nowhere"),
        ("base_model.random_init=true", "random_init must be false with path, got true"),
        ("base_model={config: base/config.json}",
         "random_init must be true with config, got false"),
        ("base_model={config: no, random_init: true}",
         "base_model.config must be a string, got false"),
        ("base_model={config: x, random_init: true}", "base_model.config must be an existing file"),
        ("base_model.dtype=float16", "must be one of float32, bfloat16, got 'float16'"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_by_path(folder: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(folder, document(), override)


@pytest.mark.parametrize(
    "name", ["a/b", "..", ".", "-x", "", "a b", "a\n", "\x07", "é", "x" * 129, "a\\b"]
)
def test_names_that_cannot_be_a_folder_are_refused(folder: Path, name: str) -> None:
    content = document()
    content["jobs"][0]["name"] = name
    with pytest.raises(ConfigError, match=r"^jobs\[0\]\.name must "):
        load(folder, content)


@pytest.mark.parametrize("name", ["a", "A.b_c-1", ".hidden", "x" * 128])
def test_names_that_can_be_a_folder_are_kept(folder: Path, name: str) -> None:
    content = document()
    content["jobs"][0]["name"] = name
    assert load(folder, content).jobs[0].name == name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 1}, "exactly one of max_steps and epochs, got both; set the other to null"),
        ({"max_steps": None}, "exactly one of max_steps and epochs, got neither"),
        ({"schedule": {"warmup_steps": 5}}, "warmup_steps must be below max_steps = 5, got 5"),
        ({"schedule": {"min_lr": 1.0}}, "min_lr must be at most optimizer.lr = 0.0002, got 1.0"),
        ({"lora": {"target_modules": ["q_proj", "k_proj", "q_proj"]}},
         "must not repeat a target, got q_proj 2 times"),
        ({"lora": {"target_modules": ["linear_qkv", "v_proj"]}},
         "must name each base linear once, got v_proj and linear_qkv"),
        ({"lora": {"target_modules": ["down_proj", "linear_fc2"]}},
         "must name each base linear once, got down_proj and linear_fc2"),
        ({"data": {"train": "no.jsonl"}}, "data.train must be an existing file, got .*no.jsonl"),
        ({"data": {"train": "."}}, "data.train must be an existing file"),
        ({"data": {"train": ["a.jsonl", "b/c.jsonl"]}}, r"n\[1\] must be an .*/b/c.jsonl'(?!;)"),
        ({"data": {"train": []}}, "data.train must not be empty"),
        ({"preference": {}, "data": {"train": "a.jsonl", "learn": "last"}}, "data.learn must be a"),
        ({"data": {"train": "org/n"}}, "existing file, .*/org/n'; tlora data import fetches a da"),
        ({"data": {"train": "a.jsonl", "chat_template": "qwen9"}}, "; ours are gpt_oss, q"),
        ({"data": {"train": "empty.jsonl"}}, "data.train must be a file that is not empty"),
        ({"data": {"train": "a.jsonl", "eval": "no.jsonl"}}, "data.eval must be an existing file"),
        ({"init_from": "nowhere"}, "init_from must be an existing directory, got .*nowhere"),
    ],
)  # fmt: skip
def test_a_job_with_a_mistake_stops_the_run_or_is_left_out(
    folder: Path, change: dict[str, Any], message: str
) -> None:
    content = document()
    content["jobs"][0].update(change)
    with pytest.raises(ConfigError, match=rf"^jobs\[0\].*{message}.* \(job one\)$"):
        load(folder, content)
    config = load(folder, content, "run.on_job_error=skip")
    assert [job.name for job in config.jobs] == ["two"]
    (error,) = config.job_errors
    assert error.name == "one"
    assert re.search(message, error.message)


def test_fused_and_split_targets_of_different_linears_go_together(folder: Path) -> None:
    content = document()
    content["jobs"][0]["lora"] = {"target_modules": ["linear_qkv", "o_proj", "up_proj"]}
    assert len(load(folder, content).jobs[0].lora.target_modules) == 3


def test_skip_names_unusable_jobs_by_index_and_still_stops_without_any_job(folder: Path) -> None:
    content = document(run={"output_dir": "out", "on_job_error": "skip"})
    content["jobs"][0] = {"name": "../x"}
    config = load(folder, content)
    assert [error.name for error in config.job_errors] == ["jobs[0]"]
    content["jobs"][1] = "nothing"
    with pytest.raises(ConfigError, match=r"^jobs must hold at least one that can start, got jobs"):
        load(folder, content)


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_duplicate_names_always_stop(folder: Path, policy: str) -> None:
    content = document()
    content["jobs"][1]["name"] = "one"
    with pytest.raises(ConfigError, match=r"^jobs must have unique names, got 'one' 2 times"):
        load(folder, content, f"run.on_job_error={policy}")


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_what_is_outside_the_jobs_always_stops(folder: Path, policy: str) -> None:
    with pytest.raises(ConfigError, match=r"^model is not a known key"):
        load(folder, document(model={}), f"run.on_job_error={policy}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: {seed: 1, seed: 2}",
         "YAML, got line 1, column 16, .*: key 'seed' stands twice in one"),
        ("jobs: [\n", "YAML, got line 2, column 1, '': expected the node content, but found"),
        ("a: !!python/object:os.system {}", "well-formed YAML"),
        ("- 1\n- 2", "must hold a mapping of sections, got"),
        ("", "must hold a mapping of sections, got null"),
        ("a: 1\n---\nb: 2", "well-formed YAML"),
    ],
)  # fmt: skip
def test_malformed_yaml_is_refused(folder: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(folder, text)


@pytest.mark.parametrize("text", ['{"run": {}, "run": {}}', "{", "\xff"])
def test_malformed_json_is_refused(folder: Path, text: str) -> None:
    (folder / "run.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"run.json must be well-formed JSON"):
        load_config(folder / "run.json")


def test_half_a_surrogate_pair_is_refused(folder: Path) -> None:
    (folder / "run.json").write_text(r'{"run": {"output_dir": "\ud800"}}')
    with pytest.raises(ConfigError, match=r"run.output_dir must be Unicode text, got '\\ud800'"):
        load_config(folder / "run.json")


def test_bytes_that_are_no_text_and_files_that_are_not_there_are_refused(folder: Path) -> None:
    (folder / "run.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="must be well-formed YAML"):
        load_config(folder / "run.yaml")
    with pytest.raises(ConfigError, match=r"got .*/rum.yaml'; .*; did you mean run.yaml"):
        load_config(folder / "rum.yaml")
    with pytest.raises(ConfigError, match=r"must be a readable file, got .*; Is a"):
        load_config(folder)


def test_yaml_merge_keys_may_be_overridden(folder: Path) -> None:
    text = """
base_model: {path: base}
run: {output_dir: out}
jobs:
  - &one {name: one, data: {train: a.jsonl}, max_steps: 5}
  - {<<: *one, name: two}
"""
    assert [job.name for job in load(folder, text).jobs] == ["one", "two"]


def test_settings_without_effect_are_named(folder: Path) -> None:
    content = document(parallel={"sequence_parallel": True})
    content["base_model"]["seed"] = 1
    content["jobs"][0].update(eval_every_steps=5, schedule={"min_lr": 1e-5})
    found = " ".join(ignored_settings(load(folder, content)))
    for name in ("sequence_parallel", "base_model.seed", "eval_every_steps of job one", "min_lr"):
        assert name in found
    assert ignored_settings(load(folder, document())) == ()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "must be at least 1, got 0"),
        ("atuo", "must be a number or auto, got 'atuo'; did you mean auto?"),
        ("2", "must be a number or auto, got '2'"),
        (1.5, "must be an integer, got 1.5"),
        (True, "must be an integer, got true"),
        (None, "must be an integer, got null"),
    ],
)
def test_refuses_other_nano_batches(folder: Path, value: Any, message: str) -> None:
    content = document(run={"output_dir": "out", "nano_batches": value})
    with pytest.raises(ConfigError, match=re.escape(f"run.nano_batches {message}")):
        load(folder, content)


def test_a_budget_of_memory_needs_someone_who_asks(folder: Path) -> None:
    content = document(run={"output_dir": "out", "gpu_memory_gb": 40.0})
    assert ignored_settings(load(folder, content)) == (
        "run.gpu_memory_gb has no effect with recompute none",
    )
    assert ignored_settings(load(folder, content, "run.recompute=auto")) == ()


def test_names_overlap_settings_without_effect(folder: Path) -> None:
    content = document(run={"output_dir": "out", "nano_batches": 2, "nano_controller": "aimd"})
    assert ignored_settings(load(folder, content)) == (
        "run.nano_batches has no effect with tp_size 1",
        "run.nano_controller has no effect with tp_size 1",
    )
    content["parallel"] = {"tp_size": 2}
    assert ignored_settings(load(folder, content)) == (
        "run.nano_controller has no effect without nano_batches: auto",
    )
    assert ignored_settings(load(folder, content, "run.nano_batches=auto")) == ()
    content["run"] = {"output_dir": "out", "tensor_collectives": "nccl"}
    assert ignored_settings(load(folder, content)) == (
        "run.tensor_collectives has no effect with nano_batches 1",
    )
