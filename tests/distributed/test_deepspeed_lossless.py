"""Under DeepSpeed, too, a job gets what transformers and PEFT give it alone, in every layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed")

from tests.helpers.block_jobs import BLOCK_JOBS
from tests.helpers.deepspeed_cases import run_cases, write_config, zero
from tests.helpers.scenario import JOBS, assert_run_equals_oracle, make_scenario, take_fingerprint
from tests.helpers.scenario_worlds import entry
from tests.helpers.session import further

NAMES = tuple(job["name"] for job in JOBS)
OVER_EXPERTS = {"attention": ["q_proj", "v_proj"], "outputs": ["k_proj", "o_proj"]}
"""Targets of the jobs over a base with routed experts."""
TP2: dict[str, Any] = {"tensor_parallel": {"autotp_size": 2}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
FULL = ("run.recompute=full",)
Case = tuple[dict[str, Any], tuple[str, ...]]
WORLDS: dict[str, tuple[int, dict[str, Case]]] = {
    "one process": (1, {"ZeRO-0": (zero(0), ()), "ZeRO-3 recompute": (zero(3), FULL)}),
    "DP2": (2,
     {"ZeRO-0": (zero(0), ()), **further({"ZeRO-0 offload": (zero(0, **OFFLOAD), ())}),
      "ZeRO-1": (zero(1), ()),
      "ZeRO-2 offload": (zero(2, **OFFLOAD), ()),
      "ZeRO-2 by time": (zero(2),
       ("run.portion_tokens=null", "run.round_depth=2", "run.micro_batch_tokens=104")),
      "ZeRO-3": (zero(3), ()), "ZeRO-3 recompute": (zero(3), FULL),
      "ZeRO-3 offload": (zero(3, offload_param={"device": "cpu"}, **OFFLOAD),
       ("run.micro_batch_tokens=104",)), "ZeRO-3 hpZ": (zero(3, zero_hpz_partition_size=2), ()),
      "ZeRO-3 fair": (zero(3), ("run.portion_tokens=null",))}),
    "TP2": (2,
     {"ZeRO-0": (zero(0) | TP2, ()), "ZeRO-1 recompute": (zero(1) | TP2, FULL),
      "ZeRO-3": (zero(3) | TP2, ())}),
    "DP2xTP2": (4, {"ZeRO-1": (zero(1) | TP2, ()), "ZeRO-3 recompute": (zero(3) | TP2, FULL)}),
}  # fmt: skip
EXPERTS: dict[str, Case] = {
    "experts, ZeRO-0": (zero(0), ()),
    "experts, ZeRO-1": (zero(1), ("run.portion_tokens=null",)),
    "experts, ZeRO-2 offload": (zero(2, **OFFLOAD), ("run.micro_batch_tokens=104",)),
    "experts, ZeRO-3 recompute": (zero(3), FULL),
    **further({"experts, ZeRO-3": (zero(3), ())}),
}
"""Beside those of DP2, in the same processes."""
CASES = [
    pytest.param(
        world,
        name,
        # Both ways to cut are compared one by one above.
        marks=[pytest.mark.four_processes] if size == 4 else [],
        id=f"{world}, {name}",
    )
    for world, (size, cases) in WORLDS.items()
    for name in cases
]


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_scenario(tmp_path_factory.mktemp("deepspeed"))
    take_fingerprint(path.parent / "base")  # every layout is held to it
    return path


@pytest.fixture(scope="module")
def experts(scenario: Path) -> Path:
    jobs = [dict(job) for job in JOBS if job["name"] in OVER_EXPERTS]
    for job in jobs:
        job["lora"] = {**job["lora"], "target_modules": OVER_EXPERTS[job["name"]]}
    path = make_scenario(scenario.parent / "experts", jobs, model_type="qwen3_moe")
    take_fingerprint(path.parent / "base")
    return path


@pytest.fixture(scope="module")
def run_world(scenario: Path, experts: Path) -> Callable[[str], Path]:
    def run(world: str) -> Path:
        root = scenario.parent / world
        if not root.exists():
            root.mkdir()
            size, cases = WORLDS[world]
            entries = _entries(scenario, cases, root)
            if world == "DP2":
                entries += _entries(experts, EXPERTS, root)
            run_cases(size, entries, root / "cases.json")
        return root

    return run


def _entries(scenario: Path, cases: dict[str, Case], root: Path) -> list[dict[str, Any]]:
    section, entries = json.loads(scenario.read_text()), []
    for name, (deepspeed, overrides) in cases.items():
        # Beside the scenario: its paths are relative.
        config = write_config(scenario.parent / f"{root.name} {name}.json", deepspeed, section)
        entries.append(entry(config, root / name, overrides))
    return entries


@pytest.mark.parametrize(("world", "case"), CASES)
def test_losses_and_weights_equal_the_oracle(
    world: str, case: str, run_world: Callable[[str], Path], scenario: Path
) -> None:
    assert_run_equals_oracle(run_world(world) / case, NAMES, scenario)


@pytest.mark.parametrize("case", EXPERTS)
def test_over_experts_too(case: str, run_world: Callable[[str], Path], experts: Path) -> None:
    assert_run_equals_oracle(run_world("DP2") / case, OVER_EXPERTS, experts)


BLOCK_WORLDS: dict[str, tuple[int, dict[str, Case]]] = {
    "one process": (1, {"ZeRO-3": (zero(3), ())}),
    "TP2": (2, {"ZeRO-1": (zero(1) | TP2, ()), "ZeRO-3": (zero(3) | TP2, ())}),
}


@pytest.mark.parametrize("world", BLOCK_WORLDS)
def test_block_diagonal_jobs_get_what_peft_gives_them(world: str, tmp_path: Path) -> None:
    scenario, root = make_scenario(tmp_path, BLOCK_JOBS), tmp_path / world
    root.mkdir()
    size, cases = BLOCK_WORLDS[world]
    run_cases(size, _entries(scenario, cases, root), root / "cases.json")
    for case in cases:
        names = [job["name"] for job in BLOCK_JOBS]
        assert_run_equals_oracle(root / case, names, scenario)
