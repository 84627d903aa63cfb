"""Worker: one multi-adapter linear of every making in one layout against its fp64 definition.

Arguments: variants `tp=1`, `tp=2`, `tp=2,sp=1`, all over this world. Every rank holds its part of
the same whole tensors; what comes back is joined and compared by name.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from tests.helpers.built_model import fill_bank, whole_gradients
from tests.helpers.te_stand_in import (
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TERowParallelLinear,
)
from tests.helpers.tiny_models import random_factors
from tests.helpers.user_models import SPEC, user_config
from tests.helpers.variants import end_world, layout_of, options_of
from tlora_megatron.config.job import LoraSpec
from tlora_megatron.integrations.megatron.process_groups import current_groups, initialize_parallel
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.multi_adapter import attach
from tlora_megatron.layers.sites import fc1_row_order, make_site, qkv_row_order
from tlora_megatron.model.layout import LoraSharding, ParallelLayout
from tlora_megatron.ops.dropout import dropout_reference, mix_ints
from tlora_megatron.ops.routing import Document, MicroBatchView, pack_micro_batch, use_micro_batch
from tlora_megatron.parallel.groups import ParallelGroups

LORAS = (
    LoraSpec(rank=4, alpha=8, target_modules=("q_proj", "v_proj", "o_proj", "up_proj")),
    LoraSpec(rank=7, alpha=3, dropout=0.3, target_modules=("linear_qkv", "linear_fc1", "o_proj")),
    LoraSpec(rank=3, alpha=3, use_rslora=True, target_modules=("k_proj", "gate_proj", "down_proj")),
    LoraSpec(rank=5, alpha=5),
)
LENGTHS = (9, 4, 5, 3)
"""Rows of each slot among `NUM_ROWS`; the rest is padding. The middle lies inside slot 1."""
NUM_ROWS = 24
TOLERANCE = 3e-6
_PARTS = {"q_proj": 0, "k_proj": 1, "v_proj": 2, "gate_proj": 0, "up_proj": 1}


class Making(NamedTuple):
    kind: str
    linear: str
    norm: str = "none"
    zero_centered: bool = False
    bias: bool = False


MAKINGS = (
    *(Making(kind, linear) for kind in ("fused", "around", "te") for linear in ("linear_qkv",)),
    *(Making(kind, linear) for kind in ("fused", "around", "te") for linear in ("linear_fc2",)),
    Making("around", "linear_proj", bias=True),
    Making("te", "linear_proj", bias=True),
    Making("te", "linear_fc1", bias=True),
    Making("te", "linear_fc1", norm="RMSNorm"),
    Making("te", "linear_qkv", norm="RMSNorm", zero_centered=True),
    Making("te", "linear_fc1", norm="LayerNorm", bias=True),
    Making("te", "linear_qkv", norm="LayerNorm", zero_centered=True),
)


class Case(NamedTuple):
    x: Tensor
    dy: Tensor
    weight: Tensor
    bias: Tensor
    gamma: Tensor
    beta: Tensor


def draw(linear: str) -> Case:
    rows, columns = SPEC.target_shape(linear)
    generator = torch.Generator().manual_seed(rows + columns)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    return Case(
        x=normal(NUM_ROWS, columns), dy=normal(NUM_ROWS, rows),
        weight=normal(rows, columns, scale=columns**-0.5), bias=normal(rows),
        gamma=1 + normal(columns, scale=0.2), beta=normal(columns, scale=0.2),
    )  # fmt: skip


def view_of() -> MicroBatchView:
    documents = [Document(slot=s, length=n, first_token=3 * s) for s, n in enumerate(LENGTHS)]
    keys = [mix_ints(s, 5) for s in range(len(LENGTHS))]
    return pack_micro_batch(
        documents, num_slots=len(LENGTHS), num_tokens=NUM_ROWS, dropout_keys=keys
    )


def definition(making: Making, case: Case, view: MicroBatchView) -> dict[str, Tensor]:
    x = case.x.double().requires_grad_()
    inputs = x
    if making.norm == "RMSNorm":
        inputs = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * case.gamma.double()
    elif making.norm == "LayerNorm":
        size = case.gamma.shape
        inputs = F.layer_norm(x, size, case.gamma.double(), case.beta.double(), 1e-5)
    bias = case.bias.double() if making.bias else None
    parts = [F.linear(inputs, case.weight.double(), bias)]
    slots = view.rows.row_slots(x.device)
    p = torch.tensor([*(lora.dropout for lora in LORAS), 0.0])
    site = make_site(SPEC, 0, making.linear, 0, 1)
    ones = torch.ones(case.x.shape)
    keep = dropout_reference(
        ones, view.rows.row_keys(x.device), p[slots], mix_ints(site.index), 0
    ).double()
    leaves: dict[str, Tensor] = {}
    for slot, lora in enumerate(LORAS):
        factors = random_factors(SPEC, lora, seed=slot)
        dropped = inputs * keep * (slots == slot)[:, None]
        for target in (t.target for t in site.targets if t.target in lora.target_modules):
            name = f"layers.0.{target}"
            a, b = (factors[f"{name}.lora_{w}"].double().requires_grad_() for w in "ab")
            leaves |= {f"{slot}:{name}.lora_a": a, f"{slot}:{name}.lora_b": b}
            delta = lora.scaling * (dropped @ a.t() @ b.t())
            parts.append(_in_place(making.linear, target, delta))
    y = torch.stack(parts).sum(0)
    y.backward(case.dy.double())
    found = {name: leaf.grad for name, leaf in leaves.items()}
    return {"y": y.detach(), "dx": x.grad, **found}  # type: ignore[dict-item]


def _in_place(linear: str, target: str, delta: Tensor) -> Tensor:
    """A target's output among the whole fused output `[q; k; v]` or `[gate; up]`."""
    if target not in _PARTS:
        return delta
    names = ("q_proj", "k_proj", "v_proj") if linear == "linear_qkv" else ("gate_proj", "up_proj")
    before = sum(SPEC.target_shape(name)[0] for name in names[: _PARTS[target]])
    whole = SPEC.target_shape(linear)[0]
    return F.pad(delta, (before, whole - before - delta.shape[1]))


class Cut(NamedTuple):
    x: tuple[Any, Any]
    y: tuple[Any, Any]
    weight: tuple[Any, Any]


def cut_of(linear: str, groups: ParallelGroups) -> Cut:
    rank, size = groups.tp_rank, groups.layout.tp_size
    everything = slice(None)
    rows = everything
    if groups.layout.sequence_parallel:
        rows = slice(rank * NUM_ROWS // size, (rank + 1) * NUM_ROWS // size)
    if linear in ("linear_qkv", "linear_fc1"):
        order = qkv_row_order if linear == "linear_qkv" else fc1_row_order
        features = order(SPEC, rank, size)
        return Cut((rows, everything), (everything, features), (features, everything))
    width = SPEC.target_shape(linear)[1] // size
    columns = slice(rank * width, (rank + 1) * width)
    return Cut((everything, columns), (rows, everything), (everything, columns))


def make_module(making: Making, case: Case, cut: Cut, layout: ParallelLayout) -> nn.Module:
    config = user_config(
        normalization="LayerNorm" if making.norm == "LayerNorm" else "RMSNorm",
        layernorm_zero_centered_gamma=making.zero_centered,
        add_bias_linear=making.bias,
        tensor_model_parallel_size=layout.tp_size,
        sequence_parallel=layout.sequence_parallel,
    )
    out_size, in_size = SPEC.target_shape(making.linear)
    is_column = making.linear in ("linear_qkv", "linear_fc1")
    options: dict[str, Any] = {
        "config": config,
        "init_method": config.init_method,
        "bias": making.bias,
        "is_expert": False,
    }
    if is_column:
        own, te = ColumnParallelLinear, TEColumnParallelLinear
        if making.norm != "none":
            te = TELayerNormColumnParallelLinear  # type: ignore[assignment]
        options |= {"gather_output": False, "skip_bias_add": False}
    else:
        own, te = RowParallelLinear, TERowParallelLinear
        options |= {"input_is_parallel": True, "skip_bias_add": True}
    module: Any = (te if making.kind == "te" else own)(in_size, out_size, **options)
    module.weight.data.copy_(case.weight[cut.weight[0]][:, cut.weight[1]])
    if making.bias:
        module.bias.data.copy_(case.bias[cut.weight[0]])
    if making.norm != "none":
        module.layer_norm_weight.data.copy_(case.gamma - int(making.zero_centered))
        if module.layer_norm_bias is not None:
            module.layer_norm_bias.data.copy_(case.beta)
    return module.requires_grad_(False)


class Linear:
    """A linear on this rank, what runs through it, and the parts of its definition held here."""

    def __init__(
        self, making: Making, groups: ParallelGroups, dtype: torch.dtype = torch.float32
    ) -> None:
        self.making, self.groups, self.dtype = making, groups, dtype
        self.case, self.view = draw(making.linear), view_of()
        self.cut = cut_of(making.linear, groups)
        self.module: Any = make_module(making, self.case, self.cut, groups.layout).to(dtype)
        # Several comparisons need the same run.
        self.well = functools.cache(self.run)
        self.definition = functools.cache(self._definition)

    def _definition(self) -> dict[str, Tensor]:
        expected = definition(self.making, self.case, self.view)
        expected["y"] = expected["y"][self.cut.y[0]][:, self.cut.y[1]]
        expected["dx"] = expected["dx"][self.cut.x[0]][:, self.cut.x[1]]
        return expected

    def run(
        self,
        loras: Sequence[LoraSpec] = LORAS,
        sharding: LoraSharding = "fold",
        case: Case | None = None,
    ) -> dict[str, Tensor]:
        """Output and every gradient by name; of the factors the whole ones, on every rank."""
        groups, cut, case = self.groups, self.cut, case or self.case
        name, layout = self.making.linear, groups.layout
        site = make_site(SPEC, 0, name, groups.tp_rank, layout.tp_size, sharding)
        bank = AdapterBank([site], loras, dtype=self.dtype, device=groups.device)
        # The same module time and again: a branch of another kind takes the last one's place.
        attach([(site, self.module)], bank, black_box=self.making.kind == "around")
        fill_bank(bank, loras=loras)
        x = case.x[cut.x[0]][:, cut.x[1]][:, None].to(self.dtype, copy=True).requires_grad_()
        with use_micro_batch(self.view):
            y, bias = self.module(x)
        # dy as an expanded or strided tensor is what autograd may hand over.
        dy = case.dy[cut.y[0]][:, cut.y[1]].to(self.dtype)
        y.backward(dy.t().contiguous().t()[:, None])
        y = y.detach()[:, 0] if bias is None else y.detach()[:, 0] + bias
        assert x.grad is not None
        joined = replace(layout, stage_linears=(((0, name),),), lora_sharding=sharding)
        wholes = whole_gradients(bank, replace(groups, layout=joined))
        grads = {f"{s}:{name}": g for s, whole in enumerate(wholes) for name, g in whole.items()}
        return {"y": y, "dx": x.grad[:, 0], **grads}


def relative(got: Tensor, expected: Tensor) -> float:
    """Relative error in the Frobenius norm; the worst of all ranks."""
    error = (got.double() - expected).norm() / expected.norm()
    dist.all_reduce(error, op=dist.ReduceOp.MAX)
    return float(error)


def in_each_layout(check: Callable[[str, ParallelGroups], None]) -> None:
    """Runs a check in every layout that the command line names, over all of this world."""
    for variant in sys.argv[1:]:
        layout = layout_of(options_of(variant))
        initialize_parallel(layout)
        check(variant, current_groups(layout))
    end_world("all equal")


def check(variant: str, groups: ParallelGroups) -> None:
    for making in MAKINGS:
        linear = Linear(making, groups)
        found, expected = linear.run(), linear.definition()
        assert found.keys() == expected.keys()
        errors = {name: relative(found[name], expected[name]) for name in found}
        worst = max(errors, key=errors.__getitem__)
        if dist.get_rank() == 0:
            print(f"{variant} {making}: {worst} is off by {errors[worst]:.1e}")
        assert errors[worst] < TOLERANCE, f"{variant} {making}: {errors}"


if __name__ == "__main__":
    in_each_layout(check)
