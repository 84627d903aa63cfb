"""Nano-batches on GPUs, with streams and copy engines, give the losses and gradients of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.test_overlap import check, scenario

__all__ = ["scenario"]  # a fixture

VARIANTS = (
    "tp=2,dtype=bfloat16,dropout=1",
    "tp=2,sp=1,dtype=bfloat16",
    "tp=2,sp=1,recompute=full,dtype=bfloat16,dropout=1",
    "tp=2,recompute=selective,dtype=bfloat16",
)


@pytest.mark.multigpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_and_gradients_are_those_of_one(scenario: Path, variant: str) -> None:
    check(scenario, 2, (variant,))
