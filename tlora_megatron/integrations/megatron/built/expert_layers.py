"""Routed experts of a built model that carry adapters: Megatron's own modules, in place.

The layer's router says whose rows go where (`expert_call`), and each of the experts' two linears
adds the adapters' part to what it has computed: around Transformer Engine's grouped GEMM of all
experts (`TEGroupedMLP`), around each expert's own linear in `SequentialMLP`. What computes the
base, its dispatcher and its collectives stay Megatron's. Between dispatch and combine there is no
collective inside the linears, also where tensor parallelism cuts experts.

Kept for backward are each linear's input of all rows that arrived, and the rank-sized s.

Shapes: Q rows of this rank's experts, K features in, N features out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from tlora_megatron.integrations.megatron.built.expert_call import (
    ExpertCall,
    Sources,
    begin_call,
    bind_call,
    current_call,
    running,
    take_call,
)
from tlora_megatron.integrations.megatron.layer.mixing import built_class, mix
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.multi_adapter import MultiAdapter
from tlora_megatron.layers.sites import EXPERT_LINEARS, Site
from tlora_megatron.ops.experts.branch import (
    ExpertFactors,
    ExpertRuns,
    ExpertTarget,
    PlacedRows,
    TorchExpertOps,
)
from tlora_megatron.ops.experts.choice import ExpertOps, expert_ops
from tlora_megatron.ops.routing.segments import current_micro_batch

_GROUPED, _SEQUENTIAL = "TEGroupedMLP", "SequentialMLP"
_TORCH = TorchExpertOps()


def adapt_experts(layer: Any) -> nn.Module:
    """Makes the routed experts of a Megatron MoE layer able to carry adapters, in place.

    A second call changes nothing.

    Returns:
        The experts' module, which is bound to the sites of both linears.

    Raises:
        ValueError: for experts of another class than those named above.
    """
    experts = layer.experts
    kind = built_class(experts).__name__
    if kind not in (_GROUPED, _SEQUENTIAL):
        raise ValueError(
            f"layer {layer.layer_number - 1} must have experts of {_GROUPED} or {_SEQUENTIAL} to "
            f"carry adapters on them (Transformer Engine's --moe-grouped-gemm, or none), got {kind}"
        )
    mix(RoutesByAdapter, layer)
    mix(AdaptedExperts, experts)
    modules: list[tuple[int | None, Any]] = [(None, experts)]
    if kind == _SEQUENTIAL:
        modules = [*enumerate(experts.local_experts)]
    for number, module in modules:
        for name in EXPERT_LINEARS:
            linear = getattr(module, name.replace("experts_", "linear_"))
            mix(ExpertLinear, linear)
            # No attribute that torch would register.
            object.__setattr__(linear, "tlora_place", (name, number))
    return experts


def expert_weight(experts: Any, linear: str) -> Tensor:
    """Returns the weight of a rank's first expert at a linear, by the name that sites give it."""
    name = linear.replace("experts_", "linear_")
    if hasattr(experts, "local_experts"):
        return getattr(experts.local_experts[0], name).weight
    return getattr(experts, name).weight0


class RoutesByAdapter:
    """A MoE layer whose routing is counted by adapter while jobs adapt its experts.

    Relies on `route(hidden_states, ...)`, which returns weights and the bool map `[T, E]` and is
    called right before the experts, and on `token_dispatcher.tp_ep_group`, `.tp_size`, in
    megatron-core 0.16 to 0.20.
    """

    def route(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Routes as Megatron's layer does."""
        layer: Any = self
        found = super().route(hidden_states, *args, **kwargs)  # type: ignore[misc]
        bind_call(_call_of(layer, found[1]))
        return found


def _call_of(layer: Any, routing_map_TE: Tensor) -> ExpertCall | None:
    view = current_micro_batch()
    factors = layer.experts.expert_factors
    if view is None or all(found is None for found in factors.values()):
        return None
    dispatcher = layer.token_dispatcher
    first, count = layer.local_expert_indices[0], layer.num_local_experts
    sources = Sources(
        group=dispatcher.tp_ep_group,
        expert_tp=dispatcher.tp_size,
        is_by_part=layer.config.moe_token_dispatcher_type == "alltoall",
        experts=range(first, first + count),
    )
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    return begin_call(routing_map_TE, view, sources, tp_rank, factors)


class AdaptedExperts(MultiAdapter):
    """Experts whose rows lie adapter by adapter in them, if jobs adapt them.

    Relies on `forward(hidden_states, tokens_per_expert, probs, ...)`, which returns the output and
    a bias, in megatron-core 0.16 to 0.20.
    """

    tlora_banks: dict[str, tuple[AdapterBank, Site]]

    def bind_adapters(self, bank: AdapterBank, site: Site) -> None:
        """Makes a bank's adapters at a site those of one linear, in the place of those before."""
        banks = {**getattr(self, "tlora_banks", {}), site.linear: (bank, site)}
        object.__setattr__(self, "tlora_banks", banks)

    @property
    def expert_factors(self) -> dict[str, ExpertFactors | None]:
        """The factors of the present adapters at each linear; None where there are none."""
        banks = getattr(self, "tlora_banks", {})
        return {name: bank.expert_factors.get(site.index) for name, (bank, site) in banks.items()}

    def forward(
        self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """Computes what Megatron's experts do, with the adapters of each row."""
        experts: Any = super()
        call = take_call()
        if call is None:
            return experts.forward(hidden, tokens_per_expert, probs, *args, **kwargs)
        order = call.order(len(hidden))
        if order is not None:
            back = torch.empty_like(order)
            back[order] = torch.arange(len(order), device=order.device)
            hidden, probs = (_Reorder.apply(x, order, back) for x in (hidden, probs))
        with running(call):
            out, bias = experts.forward(hidden, tokens_per_expert, probs, *args, **kwargs)
        return out if order is None else _Reorder.apply(out, back, order), bias


class _Reorder(torch.autograd.Function):
    """Takes rows to another order; backward gathers, where autograd's own would add."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x[order]

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return dx[back], None, None


class ExpertLinear:
    """A linear of one expert, or of all, that adds its adapters' part to what it has computed.

    Relies on `forward(x, ...)`, which returns the product, a tensor that nobody else holds or keeps
    for backward, and a bias.
    """

    tlora_place: tuple[str, int | None]
    """The name that sites give the linear, and its expert; None = it is of all."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Returns `[Q, N]` of x `[Q, K]`, and what Megatron's linear returns beside it."""
        y, bias = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        call, (name, expert) = current_call(), self.tlora_place
        factors = None if call is None else call.factors.get(name)
        if call is None or factors is None or not len(x):
            return y, bias
        if expert is None:
            return _AddBranch.apply(x, y, call.runs, factors, expert_ops(x)), bias
        runs = call.of_experts[expert]
        if not runs.of_adapters:
            return y, bias
        # Numbers of rows are on the host: kernels that read them on the device gain nothing.
        return _AddBranch.apply(x, y, runs, _of_expert(factors, expert), _TORCH), bias


def _of_expert(factors: ExpertFactors, expert: int) -> ExpertFactors:
    """Returns the factors of one expert as those of a rank that holds it alone."""
    own = slice(expert, expert + 1)

    def pick(target: ExpertTarget) -> ExpertTarget:
        return target._replace(
            lora_a=target.lora_a[own],
            lora_b=target.lora_b[own],
            grad_a=target.grad_a[own],
            grad_b=target.grad_b[own],
        )

    targets = tuple(tuple(pick(target) for target in held) for held in factors.targets)
    return replace(factors, targets=targets)


class _AddBranch(torch.autograd.Function):
    """Adds the adapters' part to a product, in its memory."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, runs: ExpertRuns, factors: ExpertFactors, ops: ExpertOps
    ) -> Tensor:
        saved = ops.forward(PlacedRows(x.contiguous()), y, runs, factors)
        ctx.save_for_backward(x, *saved)
        ctx.runs, ctx.factors, ctx.ops = runs, factors, ops
        return y.view(y.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        x, dy_rows = PlacedRows(x.contiguous()), PlacedRows(dy.contiguous())
        dx = torch.zeros_like(x.values_TK)
        ctx.ops.backward(dy_rows, dx, x, saved, ctx.runs, ctx.factors)
        return dx, dy, None, None, None
