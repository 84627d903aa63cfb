"""References of several tests of whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.oracle import OracleResult
from tests.helpers.scenario import load_scenario, oracle_results


@pytest.fixture(scope="module")
def oracle(scenario: Path) -> dict[str, OracleResult]:
    """Each job of the module's `scenario` alone under transformers and PEFT."""
    return oracle_results(load_scenario(scenario, output_dir=scenario.parent / "unused"))
