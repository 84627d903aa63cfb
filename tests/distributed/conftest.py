"""The outputs of tests of whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.scenario_worlds import World


@pytest.fixture
def output_dir(world_size: int, layout: str, run_world: World) -> Path:
    """What the layout that a test is parametrized with has written; its world runs if none has."""
    return run_world(world_size) / layout
