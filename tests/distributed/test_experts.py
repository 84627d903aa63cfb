"""Bases with routed experts: in every layout a job gets what PEFT gives it alone."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.expert_jobs import ATTENTION, LORA, SHARED, expert_jobs
from tests.helpers.oracle import CLEAR_CHOICE
from tests.helpers.scenario import (
    assert_run_equals_oracle,
    make_scenario,
    only_job,
    oracle_of,
    records,
    summary_of,
    take_fingerprint,
)
from tests.helpers.scenario_worlds import Case, Life, World, cases_of, layout_params, live, worlds
from tests.helpers.session import further

_TP = ("parallel.tp_size=2",)
_SP = (*_TP, "parallel.sequence_parallel=true")
_EP = ("parallel.ep_size=2",)
LAYOUTS: dict[int, dict[str, tuple[str, ...]]] = {
    1: {
        "one process": (),
        "full recompute": ("run.recompute=full",),
        "selective recompute": ("run.recompute=selective", "run.micro_batch_tokens=104"),
    },
    2: {
        "EP2": _EP,
        "EP2 selective recompute": (*_EP, "run.recompute=selective"),
        "TP2": _TP,
        "TP2+SP": (*_SP, "run.recompute=selective"),
        "TP2+SPxEP2": (*_SP, *_EP, "parallel.expert_tp_size=1"),
        "PP2": ("parallel.pp_size=2", "run.recompute=full"),
        "DP2": (),
        **further(
            {
                "EP2 full recompute": (*_EP, "run.recompute=full"),
                "CP2xEP2": (*_EP, "parallel.cp_size=2"),
                "TP2+SP, experts whole": (*_SP, "parallel.expert_tp_size=1"),
            }
        ),
    },
    4: {"TP2+SPxEP2": (*_SP, *_EP), "PP2xEP2": (*_EP, "parallel.pp_size=2")},
}
BY_ROWS = ("run.recompute=auto", "run.gpu_memory_gb=0.0016")
"""For the job on attention alone."""
ALL_BY_ROWS = ("run.recompute=auto", "run.gpu_memory_gb=0.0024")

_ALL_RECOMPUTES = r"none to \d\d rows, selective to \d\d, full beyond"
SHARED_BY_ROWS = ("run.recompute=auto", "run.gpu_memory_gb=0.0018")

BESIDE_SHARED = {name: SHARED[name] for name in ("attention", "everything", "outputs")}
SHARED_LAYOUTS: dict[int, dict[str, tuple[str, ...]]] = {
    1: {"shared, one process": (), "shared, full recompute": ("run.recompute=full",)},
    2: {"shared, EP2": (*_EP, "run.recompute=selective"),
     "shared, TP2+SP": (*_SP, "run.recompute=selective"),
     **further({"shared, TP2": _TP,
      "shared, TP2+SPxEP2": (*_SP, *_EP, "parallel.expert_tp_size=1")})},
}  # fmt: skip

OF_GPT_OSS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "everything": {"target_modules": ATTENTION},
    "outputs": {"target_modules": ["k_proj", "o_proj"]},
}
GPT_OSS_LAYOUTS: dict[int, dict[str, tuple[str, ...]]] = {
    1: {
        "gpt-oss, one process": (),
        "gpt-oss, full recompute": ("run.recompute=full",),
        "gpt-oss, selective recompute": ("run.recompute=selective", "run.micro_batch_tokens=104"),
    },
    2: {
        "gpt-oss, EP2": _EP,
        "gpt-oss, CP2xEP2": (*_EP, "parallel.cp_size=2", "run.recompute=full"),
        "gpt-oss, TP2+SP": (*_SP, "run.recompute=selective"),
        "gpt-oss, PP2": ("parallel.pp_size=2",),
        **further(
            {
                "gpt-oss, TP2": (*_TP, "run.recompute=full"),
                "gpt-oss, TP2+SPxEP2": (*_SP, *_EP, "parallel.expert_tp_size=1"),
            }
        ),
    },
    4: {"gpt-oss, TP2+SPxEP2, experts cut": (*_SP, *_EP)},
}


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_scenario(tmp_path_factory.mktemp("experts"), expert_jobs(), model_type="qwen3_moe")
    take_fingerprint(path.parent / "base")  # every layout is held to it
    return path


@pytest.fixture(scope="module")
def shared(scenario: Path) -> Path:
    """The config file of a scenario over Qwen2-MoE, with adapters on its shared experts."""
    root = scenario.parent / "shared"
    path = make_scenario(root, expert_jobs(BESIDE_SHARED), model_type="qwen2_moe")
    take_fingerprint(path.parent / "base")
    return path


@pytest.fixture(scope="module")
def gpt_oss(scenario: Path) -> Path:
    path = make_scenario(scenario.parent / "gpt_oss", expert_jobs(OF_GPT_OSS), model_type="gpt_oss")
    take_fingerprint(path.parent / "base")
    return path


@pytest.fixture(scope="module")
def run_world(scenario: Path, shared: Path, gpt_oss: Path) -> World:
    def cases(size: int) -> dict[str, Case]:
        found = cases_of(scenario, LAYOUTS[size])
        found |= cases_of(shared, SHARED_LAYOUTS.get(size, {}))
        found |= cases_of(gpt_oss, GPT_OSS_LAYOUTS.get(size, {}))
        if size == 1:
            found["recompute by rows"] = Case(only_job(scenario, "attention"), BY_ROWS)
            found["all by rows"] = Case(scenario, ALL_BY_ROWS)
            found["shared, by rows"] = Case(shared, SHARED_BY_ROWS)
        return found

    return worlds(scenario.parent, cases)


@pytest.mark.parametrize(("world_size", "layout"), layout_params(LAYOUTS))
def test_equals_oracle(output_dir: Path, scenario: Path) -> None:
    assert_run_equals_oracle(output_dir, LORA, scenario)
    for name, expected in oracle_of(scenario).items():
        # A sum over the wrong ranks, or a part that is counted twice, shows here at once.
        norms = [r["grad_norm"] for r in records(output_dir, name) if "loss" in r]
        assert norms == pytest.approx(expected.grad_norms, rel=1e-5), name


@pytest.mark.parametrize(
    ("case", "jobs", "table"),
    [
        ("recompute by rows", ("attention",), r"none to \d\d rows, full beyond"),
        ("all by rows", tuple(LORA), _ALL_RECOMPUTES),
        ("shared, by rows", tuple(BESIDE_SHARED), _ALL_RECOMPUTES),
    ],
)
def test_recompute_by_rows(
    case: str, jobs: tuple[str, ...], table: str, run_world: World, scenario: Path, shared: Path
) -> None:
    out, own = run_world(1) / case, shared if "shared" in case else scenario
    assert_run_equals_oracle(out, jobs, own)
    summary = summary_of(out)
    assert re.fullmatch(table, summary["run"]["recompute"])


def test_no_choice_of_an_expert_hangs_on_rounding(scenario: Path) -> None:
    for name, result in oracle_of(scenario).items():
        assert CLEAR_CHOICE < result.router_gap < math.inf, name  # every comparison asks for it too


@pytest.mark.parametrize(("world_size", "layout"), layout_params(SHARED_LAYOUTS))
def test_beside_a_shared_expert_too(output_dir: Path, shared: Path) -> None:
    assert_run_equals_oracle(output_dir, BESIDE_SHARED, shared)


@pytest.mark.parametrize(("world_size", "layout"), layout_params(GPT_OSS_LAYOUTS))
def test_over_gpt_oss_too(output_dir: Path, gpt_oss: Path) -> None:
    assert_run_equals_oracle(output_dir, OF_GPT_OSS, gpt_oss)


def test_in_other_layouts(scenario: Path, tmp_path: Path) -> None:
    """Experts divided over two processes, then cut by them, then all in one."""
    lives = (
        Life(2, _EP, ("everything", 3)),
        Life(2, (*_SP, "run.recompute=full"), ("everything", 5)),
        Life(1, (), None),
    )
    out = live(scenario, tmp_path, lives)
    assert_run_equals_oracle(out, LORA, scenario)


def test_mixtral_and_scores_that_are_not_normalised(tmp_path: Path) -> None:
    jobs = [job for job in expert_jobs() if job["name"] == "everything"]
    bases: dict[str, dict[str, Any]] = {
        "mixtral": {"model_type": "mixtral"},
        "qwen": {"model_type": "qwen3_moe", "norm_topk_prob": False},
    }
    configs = {name: make_scenario(tmp_path / name, jobs, **base) for name, base in bases.items()}
    out = worlds(tmp_path, lambda _: {name: Case(path) for name, path in configs.items()})(1)
    for name, path in configs.items():
        assert_run_equals_oracle(out / name, ["everything"], path)
