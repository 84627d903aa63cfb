"""References of several tests of whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers.scenario_worlds import World

if TYPE_CHECKING:
    from tests.helpers.oracle import OracleResult


@pytest.fixture(scope="module")
def oracle(scenario: Path) -> dict[str, OracleResult]:
    """Each job of the module's `scenario` alone under transformers and PEFT."""
    # Here: the process that shares out the tests reads this file, too, and needs no PEFT.
    from tests.helpers.scenario import oracle_of

    return oracle_of(scenario)


@pytest.fixture
def output_dir(world_size: int, layout: str, run_world: World) -> Path:
    """What the layout that a test is parametrized with has written; its world runs if none has."""
    return run_world(world_size) / layout
