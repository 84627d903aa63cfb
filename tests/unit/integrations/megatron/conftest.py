"""Megatron's groups of one process, for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.one_process import one_process_groups
from tlora_megatron.parallel.groups import ParallelGroups


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    with one_process_groups() as groups:
        yield groups
