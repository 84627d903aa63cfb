"""`tlora plan` and `--plan auto` over bases with routed experts."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
import yaml

from tests.helpers.commands import Tlora
from tlora_megatron.cli.planner_options import planned_overrides
from tlora_megatron.config.load import load_config
from tlora_megatron.config.parallel_rules import check_run_over_experts
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.runtime.planning.plan_files import apply_plan, overrides_of
from tlora_megatron.runtime.planning.plan_inputs import plan_hardware

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
