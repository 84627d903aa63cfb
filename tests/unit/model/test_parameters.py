"""Parameters of base models against what is published of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tlora_megatron.model.spec import count_parameters, read_model_spec


@pytest.mark.parametrize(
    ("base", "total", "active"),
    [
        ("llama-3.1-8b", 8.03, 8.03),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235, 22),
        ("mixtral-8x7b", 46.7, 12.9),
        ("mixtral-8x22b", 141, 39),
        ("qwen1.5-moe-a2.7b", 14.3, 2.7),
    ],
)
def test_billions_of_parameters_as_published(
    repo: Path, base: str, total: float, active: float
) -> None:
    spec = read_model_spec(repo / f"configs/models/{base}.json")
    found = count_parameters(spec)
    assert found.total / 1e9 == pytest.approx(total, rel=0.003)
    assert found.active / 1e9 == pytest.approx(active, rel=0.02)
    assert (found.active == found.total) == (spec.experts is None)
