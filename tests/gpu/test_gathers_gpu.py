"""Several tensors gathered by one launch of NCCL's."""

from __future__ import annotations

import pytest

from tests.helpers import gathers_worker
from tests.helpers.launch import torchrun

pytestmark = pytest.mark.multigpu


def test_together_as_each_by_itself() -> None:
    found = torchrun(gathers_worker.__file__, 2)
    assert "rank 0: all equal" in found
    assert "rank 1: all equal" in found
