"""Fixtures of tests that build models in one process on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.one_process import one_process_groups
from tlora_megatron.parallel.groups import ParallelGroups


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    """The groups of a world of one process."""
    with one_process_groups() as groups:
        yield groups
