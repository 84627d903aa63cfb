"""Adapters on routed experts around Transformer Engine's grouped GEMM, on a GPU, in bf16.

Megatron's layer as `--moe-grouped-gemm` builds it, with both dispatchers and with fused and unfused
permutation, against our own layer in fp32, which is held to PEFT on CPUs.
"""

from __future__ import annotations

import pytest
import torch

from tests.helpers.built_experts import SPEC, errors, frozen, make_bank, megatrons, run_packed
from tests.helpers.te_models import NEEDS_TE
from tlora_megatron.parallel.groups import ParallelGroups

pytestmark = [pytest.mark.gpu, NEEDS_TE]
ROWS = (34, 17, 10, 21, 26, 16)
"""Of each job: the gradient of a job with one row has few numbers, so its rounding is a matter of
chance. CPUs hold such a job to fp32."""
NUM_ROWS = 128


def clear_rows(weight_EH: torch.Tensor) -> torch.Tensor:
    """Rows whose choice of two experts no rounding to bf16 changes."""
    x = torch.randn(1024, SPEC.hidden_size, device=weight_EH.device).bfloat16()
    logits = (x.float() @ weight_EH.float().t()).topk(3, dim=-1).values
    clear = x[logits[:, 1] - logits[:, 2] > 0.1]
    assert len(clear) >= NUM_ROWS
    return clear[:NUM_ROWS, None]


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused permute"])
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_grouped_gemm_has_the_gradients_of_our_layer(
    dispatcher: str, fused: bool, groups: ParallelGroups
) -> None:
    half = make_bank(torch.bfloat16, groups.device)
    rounded = frozen(half)  # weights that bf16 holds
    exact, base = make_bank(torch.float32, groups.device), make_bank(torch.bfloat16, groups.device)
    kind = f"TEGroupedMLP {dispatcher}"
    layer = megatrons(kind, rounded, base, moe_permute_fusion=fused)
    x = clear_rows(rounded.router.weight)
    dy = torch.randn(NUM_ROWS, 1, SPEC.hidden_size, device=groups.device).bfloat16()
    expected = run_packed(frozen(exact, rounded), x.float(), dy.float(), ROWS)
    ours = errors(run_packed(rounded, x, dy, ROWS), expected, half, exact)
    found = errors(run_packed(layer, x, dy, ROWS), expected, base, exact)
    for name, error in found.items():
        assert error < 1.5 * ours[name] + 5e-3, f"{name}: {error}, ours {ours[name]}"


def test_fused_permute_keeps_the_order_of_rows(groups: ParallelGroups) -> None:
    """Inside an expert rows ascend: what tells whose they are goes by that."""
    from megatron.core.transformer.moe.moe_utils import permute

    routing_map = torch.rand(250, 8, device=groups.device) < 0.3
    numbers = torch.arange(250, device=groups.device).bfloat16()  # which it holds up to 256
    rows = numbers[:, None].expand(-1, 64).contiguous()
    probs = torch.rand(250, 8, device=groups.device) * routing_map
    count = int(routing_map.sum())
    for given in (None, probs):
        plain, fused = (
            permute(rows, routing_map, probs=given, num_out_tokens=count, fused=fused)[0]
            for fused in (False, True)
        )
        assert torch.equal(plain, fused)
    expected = [row for expert in routing_map.t() for row in expert.nonzero().flatten().tolist()]
    assert plain[:, 0].long().tolist() == expected
