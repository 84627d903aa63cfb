"""Block-diagonal jobs under DeepSpeed: whole linears, ZeRO-3's and AutoTP's, against PEFT's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed")

from tests.helpers.block_jobs import BLOCK_JOBS
from tests.helpers.deepspeed_cases import run_cases, write_config, zero
from tests.helpers.oracle import OracleResult
from tests.helpers.scenario import assert_equals_oracle, make_scenario

TP2: dict[str, Any] = {"tensor_parallel": {"autotp_size": 2}}
WORLDS: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "one process": (1, {"ZeRO-3": zero(3)}),
    "TP2": (2, {"ZeRO-1": zero(1) | TP2, "ZeRO-3": zero(3) | TP2}),
}


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config file of the scenario."""
    return make_scenario(tmp_path_factory.mktemp("deepspeed"), BLOCK_JOBS)


@pytest.mark.parametrize("world", WORLDS)
def test_losses_and_weights_equal_peft_s_own(
    world: str, oracle: dict[str, OracleResult], scenario: Path
) -> None:
    root, section = scenario.parent / world, json.loads(scenario.read_text())
    root.mkdir()
    size, cases = WORLDS[world]
    entries = []
    for name, deepspeed in cases.items():
        # Beside the scenario: its paths are relative.
        config = write_config(scenario.parent / f"{world} {name}.json", deepspeed, section)
        entries.append({"config": str(config), "output_dir": str(root / name), "set": ()})
    run_cases(size, entries, root / "cases.json")
    for case in cases:
        for name, expected in oracle.items():
            assert_equals_oracle(root / case, name, expected, scenario.parent / "base")
