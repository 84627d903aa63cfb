"""Models that a user's script built train as themselves: packed equals each document alone.

The reference is the untouched model (Megatron's attention and rotary embedding); see
`tests.helpers.built_model`.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from tests.helpers.session import ALL_TESTS
from tests.helpers.standing_world import forked, world
from tests.helpers.user_models import KINDS, ROPE

WORKER = Path(__file__).with_name("built_model_worker.py")
TWO_PROCESSES = (
    "rope=interleaved,tp=2,sp=1,recompute=full", "rope=scaled,cp=2", "rope=yarn,pp=2",
    "rope=scaled,pp=2,first=1,recompute=mlp", "rope=scaled,pp=2,vp=2,recompute=full",
    "rope=hybrid,tp=2,sp=1", "rope=hybrid,pp=2,first=3,recompute=full",
    "rope=moe,tp=2,sp=1,ep=2,etp=1,rows=alltoall,linears=te",
    "rope=moe,pp=2,rows=alltoall,linears=te,recompute=moe", "rope=moe,ep=2,rows=alltoall",
    "rope=interleaved,tp=2,recompute=mlp,nano=3", "rope=yarn,tp=2,sp=1,recompute=full,nano=2",
    "rope=scaled,pp=2,vp=2,nano=2", "rope=moe,tp=2,sp=1,nano=2,whole=1",
    "rope=scaled,linears=te,tp=2,sp=1,recompute=full", "rope=scaled,linears=te,cp=2",
    "rope=scaled,linears=around,tp=2,sp=1",
)  # fmt: skip
FURTHER = (
    "rope=scaled,tp=2", "rope=interleaved,cp=2,recompute=core_attn",
    "rope=moe,tp=2,sp=1,linears=te", "rope=moe,ep=2,linears=te,recompute=moe",
    "rope=scaled,tp=2,sp=1,nano=2", "rope=interleaved,tp=2,sp=1,recompute=core_attn,nano=2",
    "rope=hybrid,tp=2,sp=1,nano=2,whole=1", "rope=scaled,linears=te,tp=2",
    "rope=scaled,linears=te,pp=2,vp=2",
)  # fmt: skip
FOUR_PROCESSES = (
    "rope=moe,tp=2,sp=1,ep=2",
    "rope=moe,tp=2,sp=1,ep=2,rows=alltoall",
    "rope=moe,cp=2,ep=2,rows=alltoall,linears=te",
)
OWN = (
    "rope=scaled,tp=2,sp=1,own=4,recompute=full", "rope=scaled,pp=2,first=1,own=4,recompute=mlp",
    "rope=scaled,pp=2,vp=2,own=4,recompute=full",
    "rope=scaled,tp=2,sp=1,own=4,linears=te,share=rank_exchange,recompute=full",
    "rope=scaled,tp=2,own=4,nano=3,recompute=mlp", "rope=scaled,pp=2,vp=2,own=4,nano=2",
    "rope=scaled,tp=2,sp=1,own=4,late=output_layer",
    "rope=scaled,tp=2,own=4,linears=te,nano=2,recompute=full,late=decoder.layers.1.mlp.linear_fc1",
    "rope=scaled,pp=2,own=4,linears=te,nano=2,late=decoder.layers.1.mlp.linear_fc1",
    "rope=yarn,pp=2,own=4", "rope=partial,cp=2,own=4", "rope=qwen,tp=2,own=4",
    "rope=scaled,tp=2,sp=1,own=4,ddp=1", "rope=interleaved,tp=2,sp=1,own=0,halves=4,recompute=mlp",
    "rope=moe,tp=2,sp=1,own=0,halves=4", "rope=hybrid,tp=2,own=8,late=output_layer",
    "rope=hybrid,pp=2,first=3,own=8,recompute=full", "rope=scaled,pp=2,own=4,recompute=layernorm",
)  # fmt: skip
FURTHER_OWN = (
    "rope=scaled,tp=2,sp=1,own=4,nano=2",
    "rope=scaled,tp=2,sp=1,own=4,linears=te,nano=2,recompute=full",
    "rope=scaled,tp=2,own=4,linears=te,late=decoder.layers.1.mlp.linear_fc1",
    "rope=scaled,tp=2,sp=1,own=4,nano=2,late=decoder.layers.1.mlp.linear_fc1",
)
"""`first=3` of HybridModel cuts between a layer's attention and its MLP. `whole=1`: the model
runs whole although nano-batches are asked for. `FURTHER`: of `./scripts/test.sh all`."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("built") / "reference.pt"
    forked(WORKER, file, "reference=" + "+".join((*KINDS, "hybrid", "moe")))
    return file


def test_the_kinds_of_rotary_embedding_differ(reference: Path) -> None:
    losses = {kind: torch.cat(found[0]) for kind, found in torch.load(reference).items()}
    for one, other in itertools.combinations(ROPE, 2):
        assert (losses[one] - losses[other]).abs().max() > 1e-2, (one, other)


def test_one_process(reference: Path) -> None:
    variants = [f"rope={rope}" for rope in (*KINDS, "hybrid", "moe")]
    variants += [f"rope=scaled,linears={kind}" for kind in ("te", "around")]
    assert "all equal" in forked(WORKER, reference, *variants, "rope=yarn,recompute=full")


def test_two_processes(reference: Path) -> None:
    assert "all equal" in world(
        WORKER, 2, reference, *TWO_PROCESSES, *(FURTHER if ALL_TESTS else ())
    )


@pytest.mark.four_processes
def test_experts_cut_and_divided(reference: Path) -> None:
    assert "all equal" in world(WORKER, 4, reference, *FOUR_PROCESSES)


def test_our_kernels_in_two_processes(reference: Path) -> None:
    assert "all equal" in world(WORKER, 2, reference, *OWN, *(FURTHER_OWN if ALL_TESTS else ()))
