"""Models that a user's script built train as themselves: packed equals each document alone.

The reference is the untouched model (Megatron's attention and rotary embedding); see
`tests.helpers.built_model`.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from tests.helpers.built_model import ROPE
from tests.helpers.launch import python, torchrun

WORKER = Path(__file__).with_name("built_model_worker.py")
TWO_PROCESSES = (
    "rope=scaled,tp=2",
    "rope=interleaved,tp=2,sp=1,recompute=full",
    "rope=scaled,cp=2",
    "rope=interleaved,cp=2,recompute=core_attn",
    "rope=yarn,pp=2",
    "rope=scaled,pp=2,first=1,recompute=mlp",
    "rope=scaled,pp=2,vp=2,recompute=full",
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Losses and gradients of every kind of rotary embedding, documents alone."""
    file = tmp_path_factory.mktemp("built") / "reference.pt"
    python(WORKER, file, "reference=" + "+".join(ROPE))
    return file


def test_the_kinds_of_rotary_embedding_differ(reference: Path) -> None:
    losses = {kind: torch.cat(found[0]) for kind, found in torch.load(reference).items()}
    for one, other in itertools.combinations(losses, 2):
        assert (losses[one] - losses[other]).abs().max() > 1e-2, (one, other)


def test_one_process(reference: Path) -> None:
    variants = [f"rope={rope}" for rope in ROPE]
    assert "all equal" in python(WORKER, reference, *variants, "rope=yarn,recompute=full")


def test_two_processes(reference: Path) -> None:
    assert "all equal" in torchrun(WORKER, 2, reference, *TWO_PROCESSES, timeout=400)
