"""Products of factors that experts share, on a GPU, against autograd in fp64."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.expert_branch import check_close
from tests.helpers.outer_case import definition, outer_case, results

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_rows", [1, 63, 257])
def test_outputs_and_gradients_are_the_definition(num_rows: int) -> None:
    found = results(outer_case(num_rows, torch.bfloat16, "cuda"))
    check_close(found, definition(outer_case(num_rows, torch.float64)), 1e-2)
