"""Routed experts of a built model that carry adapters: Megatron's own modules, in place.

The layer's router says whose rows go where (`expert_call`), and each of the experts' two linears
adds the adapters' part to what it has computed: around Transformer Engine's grouped GEMM of all
experts (`TEGroupedMLP`), around each expert's own linear in `SequentialMLP`. Base, dispatcher and
collectives stay Megatron's; inside the linears there is no collective. Kept for backward are each
linear's input (around the grouped GEMM, where no row comes from another rank, the first one's is
taken from the layer's again) and the rank-sized s.

Shapes: Q rows of this rank's experts, K features in, N features out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tlora_megatron.integrations.megatron.built.expert_call import (
    ExpertCall,
    RankColumns,
    SentRows,
    Sources,
    begin_call,
    bind_call,
    current_call,
    take_call,
)
from tlora_megatron.integrations.megatron.layer.expert_parts import own_window
from tlora_megatron.integrations.megatron.layer.modules import built_class, mix
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.multi_adapter import MultiAdapter
from tlora_megatron.layers.sites import Site
from tlora_megatron.model.spec import EXPERT_LINEARS
from tlora_megatron.ops.experts.branch import (
    ExpertFactors,
    ExpertOps,
    ExpertRuns,
    ExpertTarget,
    OuterFactors,
    PlacedRows,
    TorchExpertOps,
)
from tlora_megatron.ops.experts.choice import expert_ops, token_runs
from tlora_megatron.ops.routing import current_micro_batch

_GROUPED, _SEQUENTIAL = "TEGroupedMLP", "SequentialMLP"
_FIRST, _SECOND = EXPERT_LINEARS
_TORCH = TorchExpertOps()


def adapt_experts(layer: Any) -> nn.Module:
    """Makes the routed experts of a Megatron MoE layer able to carry adapters, in place.

    Returns:
        The experts' module, which is bound to the sites of both linears.
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

    Relies on `route(hidden_states, ...)`, which returns weights and the bool map `[T, E]`, and on
    `preprocess(hidden_states, ...)` and `postprocess(output, shared_expert_output)`, which are
    called one after another with no other layer between; on a dispatcher that carries rows of any
    width; and on its `tp_ep_group` and `tp_size`: in megatron-core 0.16 to 0.20.
    """

    def route(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Routes as Megatron's layer does."""
        layer: Any = self
        found = super().route(hidden_states, *args, **kwargs)  # type: ignore[misc]
        sent = SentRows(hidden_states.detach().flatten(0, -2), found[1])
        bind_call(_call_of(layer, sent))
        return found

    def preprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Prepares what the dispatcher sends: rows, with rank columns behind them if jobs ask."""
        call = current_call()
        if call is not None and call.columns is not None:
            hidden_states = call.columns.widen(hidden_states)
        return super().preprocess(hidden_states, *args, **kwargs)  # type: ignore[misc]

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """Completes the layer's output `[..., H]` from what the dispatcher has brought back."""
        layer: Any = super()
        call = take_call()
        if call is None or call.columns is None:
            return layer.postprocess(output, shared_expert_output)
        routed = call.columns.narrow(layer.postprocess(output, None))
        return routed if shared_expert_output is None else routed + shared_expert_output


def _call_of(layer: Any, sent: SentRows) -> ExpertCall | None:
    view = current_micro_batch()
    factors, outer = layer.experts.expert_factors, layer.experts.outer_factors
    if view is None or not any((*factors.values(), *outer.values())):
        return None
    dispatcher = layer.token_dispatcher
    first, count = layer.local_expert_indices[0], layer.num_local_experts
    sources = Sources(
        group=dispatcher.tp_ep_group,
        expert_tp=dispatcher.tp_size,
        is_by_part=layer.config.moe_token_dispatcher_type == "alltoall",
        experts=range(first, first + count),
    )
    window = own_window(view, len(sent.x_TH))
    columns = None
    if any(outer.values()):
        tokens = token_runs(view.rows.ends, window)
        columns = RankColumns(first=outer[_FIRST], second=outer[_SECOND], tokens=tokens)
    return begin_call(sent, view, sources, window, factors, columns)


class AdaptedExperts(MultiAdapter):
    """Experts whose rows lie adapter by adapter in them, if jobs adapt them.

    Relies on `forward(hidden_states, tokens_per_expert, probs, ...)`, which returns the output and
    a bias, in megatron-core 0.16 to 0.20.
    """

    tlora_banks: dict[str, tuple[AdapterBank, Site]]

    def bind_adapters(self, bank: AdapterBank, site: Site) -> None:
        banks = {**getattr(self, "tlora_banks", {}), site.linear: (bank, site)}
        object.__setattr__(self, "tlora_banks", banks)

    @property
    def expert_factors(self) -> dict[str, ExpertFactors | None]:
        """The present adapters' factors of every expert at each linear; None without any."""
        banks = getattr(self, "tlora_banks", {})
        return {name: bank.expert_factors.get(site.index) for name, (bank, site) in banks.items()}

    @property
    def outer_factors(self) -> dict[str, OuterFactors | None]:
        """The factors of those whose experts share the outer ones, likewise."""
        banks = getattr(self, "tlora_banks", {})
        return {name: bank.outer_factors.get(site.index) for name, (bank, site) in banks.items()}

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
        bind_call(call)  # for the linears
        try:
            out, bias = experts.forward(hidden, tokens_per_expert, probs, *args, **kwargs)
        finally:
            bind_call(None)
        if call.columns is not None:
            bind_call(call)  # for `postprocess`
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
        """Returns `[Q, N]` of x `[Q, K]`, and what Megatron's linear returns beside it.

        Rank columns of shared factors arrive behind the first linear's x and leave behind the
        second one's result.
        """
        linear: Any = super()
        call, (name, expert) = current_call(), self.tlora_place
        if call is None:
            return linear.forward(x, *args, **kwargs)
        columns, is_first = call.columns, name == _FIRST
        if columns is not None and is_first:
            x, u_QC = columns.split(x)
        y, bias = linear.forward(x, *args, **kwargs)
        factors = call.factors.get(name)
        if factors is not None and len(x):
            y = _with_branch(x, y, call, factors, self.tlora_place)
        if columns is None:
            return y, bias
        runs = call.runs if expert is None else call.of_experts[expert]
        if is_first:
            return columns.add_to_first(u_QC, y, runs, expert), bias
        return columns.widen_result(x, y, runs, expert), bias


def _with_branch(
    x: Tensor, y: Tensor, call: ExpertCall, factors: ExpertFactors, place: tuple[str, int | None]
) -> Tensor:
    name, expert = place
    if expert is None:
        sent = call.sent if name == _FIRST else None
        return _AddBranch.apply(x, y, call.runs, factors, expert_ops(x), sent)
    runs = call.of_experts[expert]
    if not runs.of_adapters:
        return y
    # Numbers of rows are on the host: kernels that read them on the device gain nothing.
    return _AddBranch.apply(x, y, runs, _of_expert(factors, expert), _TORCH, None)


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
        ctx: Any,
        x: Tensor,
        y: Tensor,
        runs: ExpertRuns,
        factors: ExpertFactors,
        ops: ExpertOps,
        sent: SentRows | None,
    ) -> Tensor:
        saved = ops.forward(PlacedRows(x.contiguous()), y, runs, factors)
        kept = (x,) if sent is None else sent
        ctx.save_for_backward(*kept, *saved)
        ctx.num_kept = len(kept)
        ctx.runs, ctx.factors, ctx.ops = runs, factors, ops
        return y.view(y.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        kept, saved = ctx.saved_tensors[: ctx.num_kept], ctx.saved_tensors[ctx.num_kept :]
        dy = dy.contiguous()
        x = PlacedRows(kept[0].contiguous()) if len(kept) == 1 else SentRows(*kept).placed(len(dy))
        dx = dy.new_zeros(len(dy), x.values_TK.shape[1])
        ds = ctx.ops.input_backward(PlacedRows(dy), dx, saved, ctx.runs, ctx.factors)
        ctx.ops.input_sums(ds, x, ctx.runs, ctx.factors)
        return dx, dy, None, None, None, None
