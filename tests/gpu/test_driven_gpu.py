"""On a GPU, too, the answers to a client have the same bits whoever trains beside its job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.distributed.test_driven import drive
from tests.helpers.tiny_models import GPU_SHAPE, make_tiny_model

pytestmark = pytest.mark.gpu


def test_neighbours_and_errors_change_no_bit(tmp_path: Path) -> None:
    base = make_tiny_model(
        tmp_path / "base", "llama", vocab_size=264, dtype=torch.bfloat16, **GPU_SHAPE
    )
    more = {
        "base_model": {"path": str(base), "dtype": "bfloat16"},
        "run": {"micro_batch_tokens": 512, "deterministic": True},
    }
    found = drive("layout", tmp_path / "service", 1, "{}", json.dumps(more))
    assert found["beside"] == found["alone"]
    assert found["reloaded"] == found["later"]
    assert found["forward"] == found["later"][1 : 1 + len(found["forward"])]
    assert "gradient must be finite" in found["overflows"][1]
