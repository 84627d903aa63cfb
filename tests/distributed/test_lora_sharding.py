"""Every LoRA sharding gives what fold and PEFT give: layer by layer, and through whole runs.

Runs of one world size share one set of processes; each is a whole `train_run` of standard jobs with
a block-diagonal one beside them, checked by the files it leaves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.scenario import JOBS as STANDARD
from tests.helpers.scenario import (
    assert_run_equals_oracle,
    assert_unharmed,
    gone_wrong,
    make_scenario,
    summary_of,
)
from tests.helpers.scenario_worlds import Case, Life, World, cases_of, layout_params, live, worlds
from tests.helpers.session import further
from tests.helpers.standing_world import world
from tests.helpers.train_worker import starts

LINEARS = Path(__file__).with_name("lora_sharding_worker.py")
JOBS: tuple[dict[str, Any], ...] = (
    *STANDARD,
    {"name": "blocks",
     "lora": {"rank": 8, "alpha": 16, "parametrization": "block_diagonal", "num_blocks": 4},
     "batch_size": 3, "optimizer": {"lr": 2e-3, "max_grad_norm": 0.3}},
    {"name": "thin",
     "lora": {"rank": 1, "alpha": 2, "target_modules": ["q_proj", "o_proj", "up_proj"]},
     "batch_size": 2, "optimizer": {"lr": 4e-3}},
)  # fmt: skip
"""`thin` has fewer rank rows than TP ranks, `mlp` has 6, which 4 do not divide."""
NAMES = tuple(job["name"] for job in JOBS)
TP2, TP4 = ("parallel.tp_size=2",), ("parallel.tp_size=4",)
SP, PP2 = ("parallel.sequence_parallel=true",), ("parallel.pp_size=2",)


def _by(sharding: str) -> tuple[str, ...]:
    return (f"parallel.lora_sharding={sharding}",)


LAYOUTS: dict[int, dict[str, tuple[str, ...]]] = {
    2: {
        "TP2 fold": TP2 + _by("fold"),
        "TP2 rank_exchange": TP2 + _by("rank_exchange"),
        "TP2 s_lora": TP2 + _by("s_lora"),
        "TP2+SP rank_exchange": TP2 + SP + _by("rank_exchange"),
        "TP2+SP s_lora full recompute": (*TP2, *SP, *_by("s_lora"), "run.recompute=full"),
        **further({"TP2+SP s_lora": TP2 + SP + _by("s_lora")}),
    },
    4: {
        "TP4 s_lora": TP4 + _by("s_lora"),
        "TP4+SP s_lora": TP4 + SP + _by("s_lora"),
        "TP2xPP2 s_lora": TP2 + PP2 + _by("s_lora"),
        "TP2xPP2+SP rank_exchange": TP2 + PP2 + SP + _by("rank_exchange"),
    },
}
EXCHANGED = ("TP2 rank_exchange", "TP2 s_lora")
ILL = "everything"


def test_linears_under_tensor_and_sequence_parallelism() -> None:
    """Outputs and gradients by name against fp64, with block-diagonal jobs beside, NaN in one job,
    and in bf16."""
    assert "all equal" in world(LINEARS, 2, "tp=2", "tp=2,sp=1")


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scenario(tmp_path_factory.mktemp("sharding"), JOBS)


@pytest.fixture(scope="module")
def run_world(scenario: Path) -> World:
    return worlds(scenario.parent, lambda size: _cases(scenario, size))


def _cases(scenario: Path, world_size: int) -> dict[str, Case]:
    layouts = LAYOUTS[world_size]
    cases = cases_of(scenario, layouts)
    if world_size == 2:
        for name in EXCHANGED:
            cases[f"{name} ill"] = Case(scenario, (*layouts[name], *gone_wrong(ILL)))
    return cases


@pytest.mark.parametrize(("world_size", "layout"), layout_params(LAYOUTS))
def test_losses_and_weights_equal_peft_s(layout: str, output_dir: Path, scenario: Path) -> None:
    assert_run_equals_oracle(output_dir, NAMES, scenario)
    summary = summary_of(output_dir)
    asked = next((part for part in ("rank_exchange", "s_lora") if part in layout), "fold")
    assert summary["run"]["layout"]["lora_sharding"] == asked


@pytest.mark.parametrize("layout", EXCHANGED)
def test_jobs_beside_one_gone_wrong_get_the_same_bits(layout: str, run_world: World) -> None:
    root = run_world(2)
    assert_unharmed(root / f"{layout} ill", root / layout, ILL, NAMES)


def test_resumes_under_another_sharding(scenario: Path, tmp_path: Path) -> None:
    """Fold, then S-LoRA, then rank exchange with sequence parallelism."""
    lives = (
        Life(2, TP2 + _by("fold"), (ILL, 3)),
        Life(2, TP2 + _by("s_lora"), (ILL, 5)),
        Life(2, TP2 + SP + _by("rank_exchange"), None),
    )
    out = live(scenario, tmp_path, lives)
    assert [steps[ILL] for steps in starts(out)] == [0, 2, 4]
    assert_run_equals_oracle(out, NAMES, scenario)
