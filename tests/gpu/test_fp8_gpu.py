"""Transformer Engine's FP8 linears around our kernels: bits, losses, launches and isolation.

Gradients against fp32 are in `test_transformer_engine_gpu.py` (`te-fp8-own` and the like).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.te_models import (
    MODES,
    NEEDS_TE,
    build,
    install_adapters,
    make_batch,
    run,
    small_spec,
    take_gradients,
)
from tlora_megatron.layers.transformer_engine import RECIPES, why_not_fp8
from tlora_megatron.parallel.groups import ParallelGroups

pytestmark = [pytest.mark.gpu, NEEDS_TE]
SPEC = small_spec(num_layers=2, hidden_size=1024)
TOKENS = 2048


@pytest.fixture(scope="module")
def weights(groups: ParallelGroups) -> Any:
    """A model whose weights all modes take."""
    return build(MODES["local"], SPEC, groups).model


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_products_have_the_bits_of_the_module(recipe: str) -> None:
    assert why_not_fp8(recipe) is None


def test_other_recipes_stay_with_the_modules() -> None:
    assert "fp8_recipe is mxfp8" in (why_not_fp8("mxfp8") or "")


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_a_loud_neighbour(recipe: str, weights: Any, groups: ParallelGroups) -> None:
    """Blockwise scales leave a job its bits; those of a whole tensor do not."""
    mode = MODES["te-fp8-own" if recipe == "tensorwise" else f"te-fp8-{recipe}-own"]
    subject = build(mode, SPEC, groups, weights)
    batch = make_batch(0, TOKENS, SPEC, groups.device)
    found = []
    for loudness in (1.0, 100.0):
        install_adapters(subject, b_std=0.02, loudness=(1.0, 1.0, loudness))
        losses = run(subject, [batch], targets_alone=True)
        gradients = take_gradients(subject)
        found.append((float(losses[0]), gradients[0]))
    (quiet, quiet_gradients), (beside, beside_gradients) = found
    # Attention's dq is not the same twice; nothing of it is in the last layer's MLP.
    linears = ("gate_proj", "up_proj", "down_proj")
    last = [
        name
        for name in quiet_gradients
        if name.startswith(f"layers.{SPEC.num_layers - 1}.") and name.split(".")[2] in linears
    ]
    assert last, sorted(quiet_gradients)
    equal = quiet == beside and all(
        torch.equal(quiet_gradients[name], beside_gradients[name]) for name in last
    )
    assert equal == (recipe == "blockwise"), (quiet, beside)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_a_neighbour_that_overflows(recipe: str, weights: Any, groups: ParallelGroups) -> None:
    """Activations of one job near bf16's end leave another's losses and gradients finite."""
    mode = MODES["te-fp8-own" if recipe == "tensorwise" else f"te-fp8-{recipe}-own"]
    subject = build(mode, SPEC, groups, weights)
    install_adapters(subject, b_std=0.02, loudness=(1.0, 1.0, 1e36))
    batch = make_batch(0, TOKENS, SPEC, groups.device)
    losses = run(subject, [batch], targets_alone=True)
    assert torch.isfinite(losses[0])
    for name, gradient in take_gradients(subject)[0].items():
        assert torch.isfinite(gradient).all(), name
