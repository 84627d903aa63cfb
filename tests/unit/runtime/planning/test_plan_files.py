"""`tlora plan`, `--plan auto`, and the files a plan is written to."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.commands import Tlora
from tests.helpers.fp8_folders import make_fp8_folder, set_quantization
from tests.helpers.launch import HANG_S, imported
from tests.unit.runtime.planning.conftest import ProfileFile
from tlora_megatron.cli.main import main
from tlora_megatron.cli.planner_options import planned_overrides
from tlora_megatron.config.load import load_config
from tlora_megatron.integrations.deepspeed.config import load_deepspeed_config
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.runtime.planning.plan_files import apply_plan, overrides_of
from tlora_megatron.runtime.planning.plan_inputs import base_shape


@pytest.mark.parametrize(
    ("kind", "target"), [("train", "run.jobs.yaml"), ("slurm", "run.sbatch"), ("megatron", "run")]
)
def test_a_plan_does_not_replace_the_configuration_it_is_of(
    tmp_path: Path, quickstart: str, kind: str, target: str, tlora: Tlora
) -> None:
    """Nor do the jobs that are written beside a script."""
    config = tmp_path / "run.jobs.yaml"
    config.write_text(Path(quickstart).read_text())
    before = config.read_bytes()
    argv = ["plan", str(config), "--gpus", "1", "--lengths", "64"]
    assert "--write must leave" in tlora(*argv, "--write", kind, tmp_path / target, code=2)
    assert config.read_bytes() == before


def test_a_plan_from_lengths_needs_no_data(quickstart: str, tmp_path: Path, tlora: Tlora) -> None:
    written = tmp_path / "run.yaml"
    argv = ["plan", quickstart, "--gpus", "1", "--set", "jobs.mirror.data.train=/far/away.jsonl"]
    assert "/far/away.jsonl must lie where the run starts" in tlora(
        *argv, "--lengths", "64", "--write", "train", written
    )
    assert yaml.safe_load(written.read_text())["jobs"][0]["data"]["train"] == "/far/away.jsonl"
    said = tlora(*argv, code=2)
    assert "data.train of job 'mirror' must be an existing file, got '/far/away.jsonl'" in said
    assert "--lengths plans without the data" in said


def test_plan_prints_ranked_plans_and_bars(quickstart: str, tlora: Tlora) -> None:
    out = tlora("plan", quickstart, "--gpus", "4", "--explain", "--lengths", "64")
    assert "4 jobs" in out
    assert "tokens/s" in out
    assert "num_kv_heads 2 is no multiple of TP 4" in out
    assert "█" in out
    assert "memory of stage 0" in out
    assert "mirror" in out


def test_plan_says_what_a_deterministic_run_costs_beside_its_times(
    quickstart: str, tlora: Tlora
) -> None:
    argv = ["plan", quickstart, "--gpus", "2", "--lengths", "64"]
    found = tlora.json(*argv, "--set", "run.deterministic=true")
    assert all(plan["cp_size"] == 1 for plan in found["plans"])
    assert "run.deterministic: plans keep a job's bits" in tlora.err


def test_plan_json_holds_every_term(quickstart: str, tlora: Tlora) -> None:
    found = tlora.json("plan", quickstart, "--gpus", "2", "--top", "3", "--lengths", "64")
    assert len(found["plans"]) == 3
    best = found["plans"][0]
    assert sum(best["time_s"].values()) == pytest.approx(best["step_time_s"])
    assert sum(best["memory"].values()) == pytest.approx(best["memory_bytes"])
    assert [job["name"] for job in best["jobs"]] == [job["name"] for job in found["jobs"]]
    assert found["hardware"]["name"] == "h200"


def test_plan_says_which_linears_are_fp8_and_counts_their_bytes(
    quickstart: str, tlora: Tlora
) -> None:
    argv = ["plan", quickstart, "--gpus", "1", "--lengths", "64"]
    left = ["embed_tokens", "lm_head", "down_proj", "layers.0.o_proj"]
    keys = ["--set=base_model.quantization=fp8", f"--set=base_model.unquantised={json.dumps(left)}"]
    out = tlora(*argv, *keys)
    assert (
        "base in FP8: linear_qkv, linear_proj of 3 layers, linear_fc1; the rest in float32" in out
    )
    weights = []
    for options in ([], keys):
        found = tlora.json(*argv, *options)
        weights.append(found["plans"][0]["memory"]["base_weights"])
    linears = {"linear_qkv": 4, "linear_proj": 3, "linear_fc1": 4}
    assert found["base"] == {"dtype": "float32", "fp8_linears": linears}
    assert found["plans"][0]["runs_in"] == ["train"]
    columns = 4 * 256 + 3 * 128 + 4 * 704
    assert weights[0] - weights[1] == 128 * columns * 3 - 4 * columns


@pytest.mark.parametrize(("kind", "scales"), [("channel", 2240), ("block", 40)])
def test_a_folder_published_in_fp8_is_seen_without_a_key(
    quickstart: str, tmp_path: Path, tlora: Tlora, kind: Any, scales: int
) -> None:
    base = make_fp8_folder(tmp_path, kind)
    argv = ["plan", quickstart, "--gpus", "1", "--lengths", "64", f"--set=base_model.path={base}"]
    codes = tlora.json(*argv, "--write", "train", tmp_path / "run.yaml")
    assert base_shape(load_config(tmp_path / "run.yaml").base_model).fp8_linears
    said = tlora(*argv, "--runs-in=any", "--write", "deepspeed", tmp_path / "ds.json", code=2)
    assert "weights that are not quantised under DeepSpeed" in said
    set_quantization(base, None)
    wide = tlora.json(*argv)
    found, plain = (document["plans"][0] for document in (codes, wide))
    linears = {"linear_qkv": 2, "linear_proj": 2, "linear_fc1": 2, "linear_fc2": 1}
    assert codes["base"] == {"dtype": "float32", "fp8_linears": linears}
    weights = 2 * (1024 * 192 + 192 * 512 + 1024 * 192) + 192 * 512
    numbers = 2 * scales + (192 if kind == "channel" else 8)
    saved = plain["memory"]["base_weights"] - found["memory"]["base_weights"]
    assert saved == 3 * weights - 4 * numbers
    assert found["time_s"]["gemm_s"] < plain["time_s"]["gemm_s"]


def test_plan_where_nothing_fits_says_what_would_and_returns_1(
    profile_file: ProfileFile, quickstart: str, tlora: Tlora
) -> None:
    path = profile_file(memory_bytes=5e6)
    argv = ["plan", quickstart, "--gpus", "1", "--hardware", str(path), "--lengths", "64"]
    out = tlora(*argv, code=1)
    assert "no plan fits" in out
    assert "dropped" in out
    assert tlora.json(*argv, code=1)["plans"] == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--gpus", "0"], "--gpus must be in [1, 4096], got 0"),
        (["--gpus", "1", "--hardware", "nope"], "--hardware must be a file or one of"),
        (["--gpus", "1", "--lengths", "x"], "--lengths must be like 512"),
        (["--gpus", "1", "--tokens", "8", "--lengths", "64"], "--tokens must be at least"),
        (["--gpus", "1", "--write", "train", "/dev/null/x"], "--write must be in a folder that"),
        (["--gpus", "1", "--setup", "x"], "--setup must come with --write slurm, got"),
        (["--gpus", "1", "--write", "k8s", "x"], "--write must name one of train, megatron"),
        (["--gpus", "1", "--write", "train", "/"], "--write must name a file, not a directory"),
        (["--gpus", "1", "--explain", "0"], "--explain must be at least 1, got 0"),
        (["--gpus", "1", "--explain", "999", "--lengths", "64"], "--explain must be in [1, "),
        (["--gpus", "1", "--top", "0"], "--top must be at least 1"),
        (["--gpus", "2", "--vpp", "2", "--runs-in", "train"], "--vpp must be 1 for train, got 2; "),
        (["--gpus", "2", "--vpp", "2", "--write", "slurm", "x"], "--vpp must be 1 for train"),
        (["--gpus", "1", "--tp", "0", "--lengths", "64"], "--tp must be at least 1, got 0"),
        (
            ["--gpus", "4", "--tp", "3", "--sp", "on", "--lengths", "64"],
            "what is fixed must allow some plan on --gpus 4, got '--tp 3, --sp on'",
        ),
        (
            ["--gpus", "0", "--replicas", "any", "--lengths", "64"],
            "--gpus must be at least 1, got 0",
        ),
        (
            ["--gpus", "1", "--write", "train", "not there/x.yaml"],
            "--write must be in a folder that exists, got 'not there/x.yaml'; mkdir -p 'not",
        ),
        (
            ["--gpus", "1", "--write", "slurm", "x.sbatch", "--sbatch", "time=8h"],
            "--sbatch time must be like 90 (minutes), 12:00:00 or 1-12:00",
        ),
        (
            ["--gpus", "1", "--replicas", "any", "--runs-in", "megatron"],
            "--runs-in must be train with --replicas any, got 'megatron'",
        ),
    ],
)
def test_bad_questions_are_told_and_return_2(
    quickstart: str, more: list[str], message: str, tlora: Tlora
) -> None:
    assert message in tlora("plan", quickstart, *more, code=2)
    assert not tlora.out  # a table before it would look like an answer
    assert not Path("not there").exists()


def _write(quickstart: str, kind: str, path: Path, *more: str) -> None:
    argv = ["plan", quickstart, "--gpus", "4", "--lengths", "64", "--write", kind, str(path)]
    assert main([*argv, *more]) == 0


def test_a_plan_for_train_is_a_configuration_that_loads(quickstart: str, tmp_path: Path) -> None:
    _write(quickstart, "train", tmp_path / "run.yaml", "--tp", "2", "--recompute", "full")
    written, original = load_config(tmp_path / "run.yaml"), load_config(quickstart)
    assert written.parallel.tp_size == 2
    assert written.run.recompute == "full"
    assert written.jobs == original.jobs
    assert written.base_model == original.base_model


def test_a_plan_for_megatron_is_a_script_with_its_flags(quickstart: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    _write(quickstart, "megatron", path, "--pp", "2", "--vpp", "2", "--recompute", "selective")
    subprocess.run(["bash", "-n", str(path)], check=True)
    words = shlex.split(path.read_text(), comments=True)
    for flag, value in (
        ("--pipeline-model-parallel-size", "2"),
        ("--num-layers-per-virtual-pipeline-stage", "1"),
        ("--recompute-granularity", "selective"),
        ("--tlora-config", str(tmp_path / "run.jobs.yaml")),
        ("--hidden-size", "128"),
    ):
        assert words[words.index(flag) + 1] == value
    batch, seq = (words[words.index(f) + 1] for f in ("--global-batch-size", "--seq-length"))
    assert int(batch) % (2 * 2) == 0  # two replicas, groups of two
    assert int(seq) >= 63
    jobs = yaml.safe_load((tmp_path / "run.jobs.yaml").read_text())
    assert [j["name"] for j in jobs["jobs"]] == ["mirror", "ordered", "sums", "records"]


def test_files_have_the_uneven_stages_of_a_plan(quickstart: str, tmp_path: Path) -> None:
    """Three stages of the quickstart's four layers: one, two and one."""
    argv = ["plan", quickstart, "--gpus", "3", "--pp", "3", "--lengths", "64", "--write"]
    assert main([*argv, "train", str(tmp_path / "run.yaml")]) == 0
    parallel = load_config(tmp_path / "run.yaml").parallel
    assert (parallel.pp_size, parallel.first_stage_layers, parallel.last_stage_layers) == (3, 1, 1)
    assert main([*argv, "megatron", str(tmp_path / "run.sh")]) == 0
    words = shlex.split((tmp_path / "run.sh").read_text(), comments=True)
    for end in ("first", "last"):
        assert words[words.index(f"--decoder-{end}-pipeline-num-layers") + 1] == "1"
    config = load_config(quickstart)
    plan = Plan(pp_size=3, first_stage_layers=1, last_stage_layers=1)
    uneven = ["parallel.first_stage_layers=1", "parallel.last_stage_layers=1"]
    assert overrides_of(config, plan)[:2] == uneven
    even = [f"{override.split('=')[0]}=null" for override in uneven]
    assert overrides_of(apply_plan(config, plan), Plan())[:2] == even


def test_a_plan_on_fewer_gpus_starts_on_these(
    quickstart: str, tmp_path: Path, tlora: Tlora
) -> None:
    path = tmp_path / "run.yaml"
    argv = ["plan", quickstart, "--gpus", "5", "--tp", "2", "--lengths", "64"]
    told = tlora(*argv, "--write", "train", path)
    assert "plan 1 uses 4 of 5 GPUs and leaves 1 idle" in told
    assert "--nproc-per-node 4 " in told
    (first, *_) = tlora.json(*argv)["plans"]
    assert (first["num_gpus"], first["idle_gpus"]) == (4, 1)


def test_files_have_the_sharded_optimizer_that_was_asked_for(
    quickstart: str, tmp_path: Path
) -> None:
    asked = ("--set", "parallel.shard_optimizer=true", "--tp", "2", "--cp", "1")
    _write(quickstart, "train", tmp_path / "run.yaml", *asked, "--pp", "1")
    assert load_config(tmp_path / "run.yaml").parallel.shard_optimizer
    for pp_size in (1, 2):  # of four GPUs: two replicas, and one that has nothing to divide
        _write(quickstart, "megatron", tmp_path / "run.sh", *asked, "--pp", str(pp_size))
        script = (tmp_path / "run.sh").read_text()
        assert ("--use-distributed-optimizer" in script) == (pp_size == 1)
    sharded = Plan(dp_size=2, shard_optimizer=True)
    assert "parallel.shard_optimizer=true" in overrides_of(load_config(quickstart), sharded)


def test_a_megatron_script_has_the_rounds_that_were_ranked(
    quickstart: str, tmp_path: Path, tlora: Tlora
) -> None:
    """Each program's plans come with its own times; a file is of a plan that its program runs."""
    argv = ["plan", quickstart, "--gpus", "4", "--lengths", "64", "--json"]

    def first(*more: str) -> dict[str, Any]:
        return dict(json.loads(tlora(*argv, *more))["plans"][0])

    path = tmp_path / "run.sh"
    found = first("--write", "megatron", str(path))
    assert found["runs_in"] == ["megatron"]
    words = shlex.split(path.read_text(), comments=True)
    flags = {f: int(words[words.index(f) + 1]) for f in ("--global-batch-size", "--seq-length")}
    assert flags == {
        "--global-batch-size": found["num_micro_batches"] * found["dp_size"],
        "--seq-length": found["micro_batch_tokens"],
    }
    assert (first()["num_micro_batches"], "train" in first()["runs_in"]) == (None, True)
    assert first("--pp", "2", "--vpp", "2")["num_micro_batches"] % 2 == 0
    every = [
        plan["runs_in"]
        for plan in json.loads(tlora(*argv, "--runs-in", "any", "--top", "9999"))["plans"]
    ]
    assert {*map(tuple, every)} == {("train",), ("train", "deepspeed"), ("megatron",)}
    for asked, kind in (("train", "megatron"), ("megatron", "train")):
        refused = f"--runs-in must be absent or any with --write {kind}, got '{asked}'"
        assert refused in tlora(*argv, "--runs-in", asked, "--write", kind, path, code=2)


def test_a_megatron_script_has_what_every_run_needs_and_starts_anywhere(
    quickstart: str, tmp_path: Path, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _write(quickstart, "megatron", Path("run.sh"), "--tokens", "8192")
    words = shlex.split(Path("run.sh").read_text(), comments=True)
    ours = (repo / "scripts" / "megatron" / "finetune.sh").read_text()
    for flag in ("--train-iters", "--save-interval", "--transformer-impl", "--no-rope-fusion"):
        assert flag in ours
        assert flag in words
    assert "$MEGATRON_LM/pretrain_gpt.py" in words
    assert words[words.index("--tlora-config") + 1] == str(tmp_path / "run.jobs.yaml")
    # The base has fewer positions than the micro-batch rows; Megatron counts it as one sequence.
    assert words[len(words) - words[::-1].index("--max-position-embeddings")] == "8192"


@pytest.mark.parametrize(
    ("more", "written"),
    [
        (["--tp", "2"], None),
        (["--tp", "2", "--lora-sharding", "fold"], "fold"),
        (["--tp", "2", "--lora-sharding", "s_lora"], "s_lora"),
        (["--tp", "2", "--set", "parallel.lora_sharding=fold"], "fold"),
        (["--tp", "2", "--set", "parallel.lora_sharding=rank_exchange"], "rank_exchange"),
        (["--tp", "1", "--lora-sharding", "fold"], None),
    ],
)
def test_a_megatron_file_has_the_sharding_that_was_asked_for(
    quickstart: str, tmp_path: Path, more: list[str], written: str | None
) -> None:
    """None: the run chooses, as around Transformer Engine's linears it must."""
    _write(quickstart, "megatron", tmp_path / "run.sh", *more)
    jobs = yaml.safe_load((tmp_path / "run.jobs.yaml").read_text())
    assert jobs.get("parallel", {}).get("lora_sharding") == written


@pytest.mark.megatron_lm
def test_megatron_lm_parses_what_the_planner_writes(quickstart: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    _write(quickstart, "megatron", path, "--pp", "2", "--vpp", "2", "--recompute", "full")
    words = shlex.split(path.read_text().replace('"$CHECKPOINT"', str(tmp_path)), comments=True)
    begin, helpers = words.index("$MEGATRON_LM/pretrain_gpt.py") + 1, Path(__file__).parents[3]
    scripts = [helpers / "helpers" / f"megatron_{name}.py" for name in ("lm_cpu", "parse")]
    found = subprocess.run(
        [sys.executable, *map(str, scripts), *(w for w in words[begin:] if w not in ("$@", "\n"))],
        env=os.environ | {"RANK": "0", "WORLD_SIZE": "4", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        cwd=helpers.parent,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    assert json.loads(found.stdout.splitlines()[-1])["num_layers"] == 4


def test_a_plan_for_deepspeed_is_a_json_that_its_reader_takes(
    quickstart: str, tmp_path: Path
) -> None:
    path = tmp_path / "ds.json"
    _write(quickstart, "deepspeed", path, "--tp", "2")
    found = load_deepspeed_config(path)
    assert found.tp_size == 2
    assert [job.name for job in found.run.jobs] == ["mirror", "ordered", "sums", "records"]


def test_a_plan_for_slurm_asks_for_its_gpus(quickstart: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sbatch"
    argv = ["plan", quickstart, "--gpus", "16", "--hardware", "h100-infiniband"]
    layout = ["--tp", "2", "--pp", "4", "--cp", "2"]  # all 16: the jobs alone would use one
    assert main([*argv, *layout, "--lengths", "64", "--write", "slurm", str(path)]) == 0
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    assert "#SBATCH --nodes=2\n" in text
    assert "#SBATCH --gpus-per-node=8\n" in text
    assert "tokens/s predicted" in text
    assert load_config(tmp_path / "run.jobs.yaml").jobs


def test_a_plan_that_deepspeed_does_not_have_is_refused(
    quickstart: str, tmp_path: Path, tlora: Tlora
) -> None:
    argv = ["plan", quickstart, "--gpus", "4", "--lengths", "64", "--pp", "2", "--runs-in", "any"]
    assert "pp_size must be 1 for a DeepSpeed plan, got 2" in tlora(
        *argv, "--write", "deepspeed", tmp_path / "ds.json", code=2
    )


DETERMINISTIC = (
    *("--tokens=1024", "--set=run.deterministic=true"),
    *("--set=parallel.tp_size=2", "--set=run.micro_batch_tokens=65536"),
)
"""A plan beside a layout and a budget that would have another sharding and other portions."""


def test_cp_by_micro_batch_stays_where_a_plan_has_ranks_that_divide(quickstart: str) -> None:
    config = load_config(quickstart, ["parallel.cp_by_micro_batch=true", "parallel.cp_size=2"])
    for plan, on in (
        (Plan(cp_size=4), True),
        (Plan(cp_size=3), False),
        (Plan(cp_size=2, pp_size=2), False),
        (Plan(), False),
    ):
        overrides = overrides_of(config, plan)
        assert f"parallel.cp_by_micro_batch={json.dumps(on)}" in overrides
        assert load_config(quickstart, overrides).parallel.cp_by_micro_batch == on
    assert not any("cp_by" in x for x in overrides_of(load_config(quickstart), Plan(cp_size=4)))


def test_what_a_deterministic_run_needs_follows_from_its_plan(
    quickstart: str, tmp_path: Path
) -> None:
    run, deepspeed = tmp_path / "run.yaml", tmp_path / "ds.json"
    _write(quickstart, "train", run, "--tp=2", "--sp=on", *DETERMINISTIC)
    _write(quickstart, "deepspeed", deepspeed, *DETERMINISTIC)
    config = load_config(run)
    assert config.parallel.lora_sharding == "s_lora"
    assert "tensor_parallel" not in json.loads(deepspeed.read_text()), "it would be refused"
    for found in (config, load_deepspeed_config(deepspeed).run):
        assert found.run.deterministic
        assert {job.portion_tokens for job in found.jobs} == {512}


def test_the_jobs_of_a_script_for_megatron_lm_are_deterministic_where_asked(
    quickstart: str, tmp_path: Path
) -> None:
    _write(quickstart, "megatron", tmp_path / "run.sh", *DETERMINISTIC)
    document = yaml.safe_load((tmp_path / "run.jobs.yaml").read_text())
    assert document["run"] == {"deterministic": True}
    assert {job["portion_tokens"] for job in document["jobs"]} == {None}, "they follow --seq-length"


@pytest.mark.parametrize("kind", ["deepspeed", "megatron"])
def test_an_fp8_base_is_refused_for_other_trainers(
    quickstart: str, tmp_path: Path, tlora: Tlora, kind: str
) -> None:
    argv = ["plan", quickstart, "--gpus=1", "--lengths=64", "--set=base_model.quantization=fp8"]
    written = ["--runs-in", "any", "--write", kind, str(tmp_path / "plan")]
    for options in (["--runs-in", kind], written):
        assert "base_model.quantization must be null under" in tlora(*argv, *options, code=2)
    assert not list(tmp_path.iterdir())


def _train_arguments(**values: Any) -> argparse.Namespace:
    given = {"nproc": 2, "hardware": "h200", "lengths": "64", "replicas": None}
    return argparse.Namespace(**given | values)


def test_auto_sets_layout_budget_and_recompute_the_same_on_every_rank(
    quickstart: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(quickstart)
    overrides = planned_overrides(_train_arguments(), config)
    assert "predicted (profile h200" in capsys.readouterr().err
    planned = load_config(quickstart, overrides)
    parallel = planned.parallel
    assert 2 % (parallel.tp_size * parallel.pp_size * parallel.cp_size) == 0
    assert planned.run.micro_batch_tokens >= 63
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert planned_overrides(_train_arguments(nproc=None), config) == overrides
    assert "predicted (profile" not in capsys.readouterr().err


def test_auto_without_a_plan_says_what_would_fit(
    profile_file: ProfileFile, quickstart: str
) -> None:
    path = profile_file(memory_bytes=5e6)
    with pytest.raises(ValueError, match=r"--plan auto must find a plan that fits 2 x .*got none"):
        planned_overrides(_train_arguments(hardware=str(path)), load_config(quickstart))


def test_plan_and_profile_start_without_torch(quickstart: str) -> None:
    code = (
        "from tlora_megatron.cli.main import main\n"
        f"assert main(['plan', {quickstart!r}, '--gpus', '2', '--lengths', '64', '--json']) == 0"
    )
    assert not imported(code, "torch", "numpy", "transformers", speaks=True)
