"""`--replicas any`, and plans over bases with routed experts: from the planner to a run's keys."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
import yaml

from tests.helpers.commands import Tlora
from tests.unit.runtime.planning.conftest import ProfileFile
from tlora_megatron.cli import planner_options
from tlora_megatron.cli.plan import deployments_document
from tlora_megatron.cli.planner_options import planned_overrides
from tlora_megatron.config.load import load_config
from tlora_megatron.config.parallel_rules import check_run_over_experts
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.layout import Deployment, ReplicaLayout
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.deploy import DeploymentResult, RankedDeployment, deploy
from tlora_megatron.planner.deploy_sampled import Replicas
from tlora_megatron.planner.layouts import SearchSpace
from tlora_megatron.planner.workload import JobLoad
from tlora_megatron.runtime.planning.plan_files import (
    apply_plan,
    deployment_overrides,
    overrides_of,
    write_deployment,
)
from tlora_megatron.runtime.planning.plan_inputs import (
    best_deployment,
    check_deployable,
    parse_lengths,
    plan_hardware,
)

ANY = ["--replicas", "any", "--lengths", "64:3,256:1"]


def ranked(*replicas: ReplicaLayout) -> RankedDeployment:
    return RankedDeployment(
        deployment=Deployment.of(replicas),
        replicas=Replicas(kinds=(), counts=()),
        fluid_s=1.0,
        gap=0.0,
        sampled=None,
    )


UNLIKE = ranked(
    ReplicaLayout(
        tp_size=2, sequence_parallel=True, micro_batch_tokens=2048, recompute="selective"
    ),
    ReplicaLayout(micro_batch_tokens=512, recompute="none"),
    ReplicaLayout(micro_batch_tokens=512, recompute="none"),
)


def test_plan_prints_deployments_with_their_distance_to_the_bound(
    quickstart: str, tlora: Tlora
) -> None:
    shown = tlora("plan", quickstart, "--gpus", "2", *ANY)
    assert "bound of all deployments:" in shown
    assert "to take: " in shown
    assert "unlike ones must win by 3%" in shown


def test_json_and_the_written_configuration_say_the_same(
    quickstart: str, tmp_path: Path, tlora: Tlora
) -> None:
    path = tmp_path / "planned.yaml"
    found = tlora.json("plan", quickstart, "--gpus", "2", *ANY, "--write", "train", path)
    first = found["deployments"][0]
    assert first["undivided_gpu_s"] >= found["bound_gpu_s"]
    assert "--nproc-per-node 2" in tlora.err.replace("\n", " ")
    written = load_config(str(path), [], str(tmp_path / "out"))
    assert written.parallel.replicas is not None
    assert str(Deployment.from_specs(written.parallel.replicas)) == first["replicas"]


def test_unlike_replicas_become_keys_and_a_file_that_a_run_reads(
    quickstart: str, tmp_path: Path
) -> None:
    config, path = load_config(quickstart), tmp_path / "unlike.yaml"
    overrides = deployment_overrides(config, UNLIKE)
    assert "run.nano_batches=1" in overrides
    line = write_deployment(path, config, UNLIKE, plan_hardware("h200"))
    assert "--nproc-per-node 4" in line
    written = load_config(str(path), [], str(tmp_path / "out"))
    for planned in (load_config(quickstart, overrides), written):
        assert planned.parallel.replicas is not None
        assert Deployment.from_specs(planned.parallel.replicas) == UNLIKE.deployment
        assert planned.parallel.tp_size == 1


def test_recompute_by_rows_becomes_plain_keys(quickstart: str, repo: Path, tmp_path: Path) -> None:
    spec = read_model_spec(repo / "configs/models/llama-3.1-8b.json")
    mix = [JobLoad(name="a", rank=8, batch_size=8, lengths=parse_lengths("500:9,16000:1"))]
    space = SearchSpace(tp_size=1, cp_size=1, pp_size=1)
    ranked = deploy(spec, mix, plan_hardware("l40s"), 2, space).ranked
    best = next(entry for entry in ranked if entry.has_recompute_by_rows)
    config = load_config(quickstart)
    planned = load_config(quickstart, deployment_overrides(config, best))
    path = tmp_path / "auto.yaml"
    write_deployment(path, config, best, plan_hardware("h200"))
    for read in (planned, load_config(str(path), [], str(tmp_path / "out"))):
        assert (read.run.recompute, read.run.micro_batch_tokens) == ("auto", 16384)
        assert (read.parallel.replicas, read.parallel.tp_size) == (None, 1)


def test_auto_takes_the_best_deployment(
    quickstart: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def best(config: RunConfig, num_gpus: int, *_: object) -> RankedDeployment:
        asked.append(num_gpus)
        return UNLIKE

    monkeypatch.setattr(planner_options, "best_deployment", best)
    args = argparse.Namespace(
        nproc=4, plan="auto", hardware=None, lengths=None, replicas="any", json=False
    )
    config = load_config(quickstart)
    assert planned_overrides(args, config) == deployment_overrides(config, UNLIKE)
    assert asked == [4]
    assert "plan: 1xTP2+SP@2048/selective + 2xTP1@512/none" in capsys.readouterr().err


def test_nothing_fits_a_machine_without_memory(
    quickstart: str, profile_file: ProfileFile, tlora: Tlora
) -> None:
    path = profile_file(memory_bytes=5e6)
    assert "no replica holds the longest sequence" in tlora(
        "plan", quickstart, "--gpus", "2", "--hardware", path, *ANY, code=1
    )
    with pytest.raises(ValueError, match="must find replicas for sequences of 63 tokens on 2 x"):
        best_deployment(load_config(quickstart), 2, plan_hardware(str(path)), parse_lengths("64"))


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("run.deterministic=true", "run.deterministic must be false with --replicas any"),
        ("parallel.shard_optimizer=true", "parallel.shard_optimizer must be false with --replicas"),
        ("parallel.lora_sharding=s_lora", "lora_sharding must be auto or fold with --replicas any"),
        ("jobs[0].portion_tokens=64", "portion_tokens of job mirror must be null with --replicas"),
    ],
)
def test_what_unlike_replicas_cannot_keep_is_refused(
    quickstart: str, override: str, match: str
) -> None:
    config = load_config(quickstart, [override], settle=False)
    with pytest.raises(ConfigError, match=match):
        check_deployable(config)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--explain"], "--explain must be absent with --replicas any"),
        (["--write", "megatron", "x.sh"], "--write must be train with --replicas any"),
    ],
)
def test_options_that_are_for_ranked_plans_are_refused(
    quickstart: str, options: list[str], match: str, tlora: Tlora
) -> None:
    assert match in tlora("plan", quickstart, "--gpus", "2", *ANY, *options, code=2)


def test_a_document_without_deployments_has_no_bound() -> None:
    empty = DeploymentResult(
        ranked=(), bound_s=float("inf"), tokens=1.0, num_kinds=0, num_undominated=0
    )
    assert deployments_document(empty, 1, 3)["bound_gpu_s"] is None


ATTENTION = "[q_proj, k_proj, v_proj, o_proj]"

FIXED = ("--tp", "2", "--cp", "1", "--tokens", "8192", "--recompute", "selective")


@pytest.fixture
def experts(repo: Path) -> list[str]:
    """The words of `tlora plan` for two jobs over Qwen3-30B-A3B."""
    base = repo / "configs/models/qwen3-30b-a3b.json"
    sets = (f"base_model.config={base}", f"defaults.lora.target_modules={ATTENTION}")
    given = [word for value in sets for word in ("--set", value)]
    jobs = str(repo / "configs/planning/four-jobs.yaml")
    return ["plan", jobs, *given, "--lengths", "512", "--hardware", "h200"]


@pytest.mark.parametrize(
    "base",
    ["qwen3-30b-a3b", "qwen3-235b-a22b", "mixtral-8x7b", "mixtral-8x22b", "qwen1.5-moe-a2.7b"],
)
def test_published_bases_are_planned(
    base: str, experts: list[str], repo: Path, tlora: Tlora
) -> None:
    other = ["--set", f"base_model.config={repo}/configs/models/{base}.json"]
    document = tlora.json(*experts, *other, "--gpus", "8", *FIXED)
    best = document["plans"][0]
    assert best["runs_in"] == ["train"]
    assert best["num_nano_batches"] == 1
    assert best["memory_bytes"] < plan_hardware("h200").memory_bytes
    assert best["ep_size"] > 1 or best["time_s"]["ep_comm_s"] == 0.0


def test_the_table_shows_what_shares_experts(
    experts: list[str], tlora: Tlora, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shared = tlora(*experts, "--gpus", "4", *FIXED, "--ep", "2")
    assert "30.5 billion parameters, 3.35 billion of them for a row, which meets 8 of 128" in shared
    assert "   EP   expert TP   " in shared
    assert "Megatron-LM" not in shared
    cut = tlora(*experts, "--gpus", "4", *FIXED, "--ep", "1", "--expert-tp", "2")
    assert "   EP" not in cut
    assert "expert TP" not in cut


def test_a_written_plan_is_one_that_tlora_train_takes(
    experts: list[str], tmp_path: Path, tlora: Tlora
) -> None:
    path = tmp_path / "run.yaml"
    fixed = (*FIXED, "--sp", "on", "--expert-tp", "1", "--ep", "4")
    assert "--nproc-per-node 4" in tlora(*experts, "--gpus", "4", *fixed, "--write", "train", path)
    written = yaml.safe_load(path.read_text())["parallel"]
    assert (written["ep_size"], written["expert_tp_size"]) == (4, 1)
    config = load_config(path, files_may_be_missing=True)
    check_run_over_experts(config)
    assert config.run.nano_batches == 1


def test_overrides_name_what_shares_experts(repo: Path) -> None:
    config = load_config(repo / "configs/planning/four-jobs.yaml", files_may_be_missing=True)
    plan = Plan(tp_size=2, sequence_parallel=True, dp_size=2, ep_size=4, expert_tp_size=1)
    overrides = overrides_of(config, plan, has_experts=True)
    assert overrides[:2] == ["parallel.ep_size=4", "parallel.expert_tp_size=1"]
    assert "run.nano_batches=1" in overrides
    shared = apply_plan(config, plan, has_experts=True)
    whole = overrides_of(shared, Plan(tp_size=2), has_experts=True)
    assert whole[:2] == ["parallel.ep_size=1", "parallel.expert_tp_size=null"]


def test_the_best_plan_of_a_run_over_experts(repo: Path) -> None:
    sets = (
        f"base_model.config={repo / 'configs/models/mixtral-8x22b.json'}",
        f"defaults.lora.target_modules={ATTENTION}",
    )
    jobs = repo / "configs/planning/four-jobs.yaml"
    config = load_config(jobs, sets, files_may_be_missing=True)
    args = argparse.Namespace(nproc=4, hardware="h200", lengths="512", replicas=None)
    found = load_config(jobs, [*sets, *planned_overrides(args, config)], files_may_be_missing=True)
    check_run_over_experts(found)
    assert found.run.nano_batches == 1
    parallel = found.parallel
    # 281 GB of weights are not on one GPU.
    assert parallel.tp_size * parallel.pp_size * parallel.ep_size > 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--runs-in", "megatron"], "the base of a plan for Megatron-LM's flag must have no"),
        (["--runs-in", "deepspeed"], "the base of a plan for DeepSpeed must have no routed"),
        (["--replicas", "any"], "the base of replicas of any kinds must have no routed experts"),
        (
            ["--set", "defaults.lora.target_modules=[up_proj]"],
            "lora.target_modules of job 'rank8' must name gate_proj, up_proj and down_proj of",
        ),
        (["--ep", "3"], "must allow some plan on --gpus 8, got '--ep 3'"),
        (["--ep", "0"], "--ep must be at least 1, got 0"),
    ],
)
def test_refusals(words: list[str], message: str, experts: list[str], tlora: Tlora) -> None:
    said = " ".join(tlora(*experts, "--gpus", "8", *words, code=2).split())
    assert re.search(message, said), said


def test_a_dense_base_shares_no_experts(repo: Path, tlora: Tlora) -> None:
    jobs = str(repo / "configs/planning/four-jobs.yaml")
    said = tlora("plan", jobs, "--gpus", "2", "--lengths", "512", "--expert-tp", "1", code=2)
    assert "--expert-tp must be absent for a base without routed experts, got 1" in said
