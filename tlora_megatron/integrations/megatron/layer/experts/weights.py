"""The weights of a layer's routed experts, under Megatron's names, and their products.

Shapes: E experts, L of them here, Q rows that meet these, K features in, N features out, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.multi_adapter import MultiAdapter
from tlora_megatron.layers.sites import Site
from tlora_megatron.ops.experts.branch import ExpertFactors, ExpertRuns, PlacedRows, add_biases
from tlora_megatron.ops.experts.choice import InputSums, expert_linear, expert_linear_dgrad
from tlora_megatron.ops.experts.factors import OuterFactors


class Router(nn.Module):
    """The router's weight `[E, H]`, and gpt-oss' bias `[E]`."""

    bias: nn.Parameter | None

    def __init__(self, shape: tuple[int, int], place: dict[str, Any], *, biased: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, **place))
        bias = nn.Parameter(torch.empty(shape[:1], **place)) if biased else None
        self.register_parameter("bias", bias)


class LocalExperts(nn.Module):
    """The two linears of this rank's experts."""

    def __init__(
        self, count: int, hidden: int, inner: int, place: dict[str, Any], *, biased: bool
    ) -> None:
        super().__init__()
        self.linear_fc1 = StackedWeights((count, 2 * inner, hidden), place, biased=biased)
        self.linear_fc2 = StackedWeights((count, hidden, inner), place, biased=biased)


class StackedWeights(nn.Module, MultiAdapter):
    """One linear of all local experts: parameters of each, side by side in one tensor."""

    stacked: Tensor
    biases_LN: Tensor | None = None
    """Where experts are cut, the second linears' are those of the first rank, zeros on others."""
    tlora_bank: tuple[AdapterBank, Site] | None = None

    def __init__(self, shape: tuple[int, int, int], place: dict[str, Any], *, biased: bool) -> None:
        super().__init__()
        self._hold("stacked", "weight", torch.empty(shape, **place))
        if biased:
            self._hold("biases_LN", "bias", torch.empty(shape[:2], **place))

    def _hold(self, attribute: str, name: str, values: Tensor) -> None:
        object.__setattr__(self, attribute, values)
        for number, value in enumerate(values.unbind()):
            self.register_parameter(f"{name}{number}", nn.Parameter(value, requires_grad=False))

    def bind_adapters(self, bank: AdapterBank, site: Site) -> None:
        """Makes a bank's adapters at a site this linear's, in the place of those before."""
        object.__setattr__(self, "tlora_bank", (bank, site))

    @property
    def factors(self) -> ExpertFactors | None:
        """The factors of the present adapters; None if none is on this linear."""
        if self.tlora_bank is None:
            return None
        bank, site = self.tlora_bank
        return bank.expert_factors.get(site.index)

    @property
    def outer(self) -> OuterFactors | None:
        """Those of adapters whose outer factor all experts share."""
        if self.tlora_bank is None:
            return None
        bank, site = self.tlora_bank
        return bank.outer_factors.get(site.index)

    def product(
        self,
        x_QK: Tensor,
        runs: ExpertRuns,
        source: PlacedRows | None = None,
        weights_Q: Tensor | None = None,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Returns the linear's output with the adapters', and what their backward needs.

        Args:
            source: what x was spread from.
            weights_Q: have multiplied x, and multiply a bias; None = nothing has.
        """
        y_QN, saved = expert_linear(x_QK, self.stacked, runs, self.factors, source)
        if self.biases_LN is not None:
            add_biases(y_QN, self.biases_LN, runs, weights_Q)
        return y_QN, saved

    def dgrad(
        self,
        dy_QN: Tensor,
        saved: Sequence[Tensor],
        runs: ExpertRuns,
        source: PlacedRows | None = None,
    ) -> tuple[Tensor, InputSums | None]:
        """Returns dx, and what is still to be given `product`'s input: None without adapters.

        Args:
            saved: from `product`.
            source: what dy was spread from.
        """
        return expert_linear_dgrad(dy_QN, self.stacked, saved, runs, self.factors, source)
