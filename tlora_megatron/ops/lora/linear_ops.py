"""The interface of the multi-adapter linear, which torch, Triton and CUDA implement.

Semantics, for a row t of slot i with drop(x) recomputed wherever it is named:

    s[t]  = scaling_i * drop(x[t]) A_i^T
    y[t]  = x[t] W^T + b + s[t] B_i^T
    dS[t] = scaling_i * dy[t] B_i
    dB_i += sum over rows t of i: dy[t]^T s[t]
    dA_i += sum over rows t of i: dS[t]^T drop(x[t])
    dx[t] = dy[t] W + drop(dS[t] A_i)

Rows of the null slot have no adapter: y = x W^T + b. Sums are in fp32, in a fixed order that
depends on the slot's own rows alone. `s` and `dS` are opaque tensors, linear in x and dy: only the
same implementation reads them, and a sum of dS over ranks is a sum of tensors. Nothing here waits
for the device.

A base that quantises (`ops.quantised`) multiplies rounded rows in place of x and dy in the base's
two products, and nothing else changes: s, dS, dA and dB are made of x and dy as they are.

Shapes: K features in, N features out, T rows, x, dy and W are contiguous.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from tlora_megatron.ops.lora.rank_places import RankPlaces
from tlora_megatron.ops.lora.tiling import (
    RANK_CHUNK,
    PlanTensors,
    RankLayout,
    plan_tensors,
    rank_chunks,
)
from tlora_megatron.ops.routing import RowGroups


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputColumns:
    """Columns of a fused output `[T, groups * stride]` that one target writes.

    In every group of `stride` columns the target owns `begin:begin + width`. Its *compact* column j
    is column `j // width * stride + begin + j % width` of the output.
    """

    groups: int
    stride: int
    begin: int
    width: int

    @property
    def size(self) -> int:
        """Number of columns."""
        return self.groups * self.width

    @property
    def is_whole(self) -> bool:
        """True if these are all columns, in order."""
        return self.width == self.stride

    def view(self, y_TN: Tensor) -> Tensor:
        """A view `[T, groups, width]` of the target's columns."""
        grouped = y_TN.unflatten(1, (self.groups, self.stride))
        return grouped[:, :, self.begin : self.begin + self.width]

    def read(self, y_TN: Tensor) -> Tensor:
        """The target's columns as `[T, size]`, a copy only where they are scattered."""
        return self.view(y_TN).flatten(1)

    def add(self, y_TN: Tensor, delta_TN: Tensor) -> None:
        """Adds `[T, size]` to the target's columns, in place."""
        self.view(y_TN).add_(delta_TN.unflatten(1, (self.groups, self.width)))


T = TypeVar("T")
Gradients = tuple[tuple[Tensor | None, ...], ...]
"""`[slot][target]`: fp32 views of gradient slabs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SiteFactors:
    """Arenas of one linear's factors in the compute dtype, and views of the jobs' gradients."""

    layout: RankLayout
    columns: tuple[OutputColumns, ...]
    """A target: its columns of the linear's output."""
    lora_a: Tensor
    """`[layout.a_rows, K]`; rows beyond a rank are zero."""
    lora_b: tuple[Tensor, ...]
    """A target: `[layout.b_rows[p], N of the target]`, transposed; rows beyond a rank are zero."""
    grad_a: Gradients
    """`[slot][target]`: fp32 view `[rank, K]` of the job's gradient slab; None where absent."""
    grad_b: Gradients
    """`[slot][target]`: fp32 view `[rank, N of the target]`; None where absent."""
    is_aligned: bool
    """True if all gradients of the linear lie at 16 bytes. Under s_lora one `SiteFactors` has the
    linear's A and another its B. Both say the same, because the same kernels must compute both:
    others lay s and dS out differently, and scale dS differently."""
    scaling: Tensor
    """fp32 `[slots]`."""
    dropout: Tensor
    """fp32 `[slots]`: probability of zeroing an input feature."""
    has_dropout: bool
    """True if any slot's probability is above 0."""
    dropout_key: int
    """Key of this linear (`ops.dropout`)."""
    first_column: int
    """Global index of the first local input feature: a row-parallel linear holds a part."""
    _cache: dict[Callable[[SiteFactors], Any], Any] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def size_in(self) -> int:
        """Local input features K."""
        return self.lora_a.shape[1]

    @property
    def size_out(self) -> int:
        """Local output features N of the fused linear."""
        return self.columns[0].groups * self.columns[0].stride

    def uses_dropout(self, rows: RowGroups) -> bool:
        """True if any element of these rows may be dropped; evaluation has no keys."""
        return self.has_dropout and bool(rows.dropout_keys)

    def cached(self, build: Callable[[SiteFactors], T]) -> T:
        """Returns what `build` makes of these factors, made once.

        What it makes must not hold the factors: a cycle would keep both, and their device memory,
        until Python looks for cycles.
        """
        if build not in self._cache:
            self._cache[build] = build(self)
        return self._cache[build]


def are_aligned(grads: Gradients) -> bool:
    """True if every row of the gradients lies at 16 bytes."""
    given = [grad for slot in grads for grad in slot if grad is not None]
    return not any(g.data_ptr() % 16 or g.stride(0) * g.element_size() % 16 for g in given)


class LinearOps(Protocol):
    """One way to compute the multi-adapter linear."""

    name: str

    def bind(self, factors: SiteFactors, rows: RowGroups) -> BoundLinear:
        """Returns the linear of these factors over these rows; costs next to nothing.

        A forward and its backward should share one: what both need is looked up once.
        """
        ...


class FrozenBase(Protocol):
    """A frozen linear without bias whose products another library computes."""

    @property
    def num_columns(self) -> int:
        """N."""
        ...

    def forward(self, x_TK: Tensor, onto_TN: Tensor | None) -> Tensor:
        """Returns `x W^T` `[T, N]`; added to `onto_TN`, in place, where there is one."""
        ...

    def dgrad(self, dy_TN: Tensor, onto_TK: Tensor | None) -> Tensor:
        """Returns `dy W` `[T, K]`; added to `onto_TK`, in place, where there is one."""
        ...


Base = Tensor | FrozenBase
"""The base of a linear: its weight `[N, K]`, or what computes with it."""


def base_product(base: Base, x_TK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Returns `x W^T + b` `[T, N]`, without adapters."""
    y_TN = x_TK.matmul(base.t()) if isinstance(base, Tensor) else base.forward(x_TK, None)
    return y_TN if bias_N is None else y_TN + bias_N


def base_dgrad(base: Base, dy_TN: Tensor) -> Tensor:
    """Returns `dy W` `[T, K]`, without adapters."""
    return dy_TN.matmul(base) if isinstance(base, Tensor) else base.dgrad(dy_TN, None)


class BoundLinear(ABC):
    """One multi-adapter linear over the rows of one micro-batch.

    It holds the rows, so nothing that the rows cache may hold it.
    """

    __slots__ = ("factors", "rows")

    def __init__(self, factors: SiteFactors, rows: RowGroups) -> None:
        self.factors = factors
        self.rows = rows

    def forward(self, x_TK: Tensor, base: Base, bias_N: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns y `[T, N]` and s."""
        s = self.down(x_TK)
        return self.product(x_TK, base, bias_N, s), s

    def product(self, x_TK: Tensor, base: Base, bias_N: Tensor | None, s: Tensor) -> Tensor:
        """Returns y `[T, N]` from s, of any base."""
        if isinstance(base, Tensor):
            return self.linear(x_TK, base, bias_N, s)
        if not s.numel():
            return base_product(base, x_TK, bias_N)
        return base.forward(x_TK, self.rank_part(s, bias_N, base.num_columns))

    def product_dgrad(self, dy_TN: Tensor, ds: Tensor, base: Base) -> Tensor:
        """Returns dx `[T, K]`, of any base."""
        if isinstance(base, Tensor):
            return self.dgrad(dy_TN, ds, base)
        onto_TK = self.branch_dgrad(ds, (0, len(dy_TN))) if ds.numel() else None
        return base.dgrad(dy_TN, onto_TK)

    @abstractmethod
    def down(self, x_TK: Tensor, window: tuple[int, int] | None = None) -> Tensor:
        """Returns s alone, where ranks exchange it before `linear` or `up`.

        Args:
            window: x holds the rows `window[0]:window[1]` alone, and s is 0 in the others: sums of
                s over windows are s, to the bit. None = x holds all rows.
        """

    @abstractmethod
    def linear(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, s: Tensor) -> Tensor:
        """Returns y `[T, N]` from s: what `forward` does after `down`, of a base's weight."""

    @abstractmethod
    def rank_part(self, s: Tensor, bias_N: Tensor | None, num_columns: int) -> Tensor:
        """Returns `b + s B^T` `[T, N]`, for a base that adds its product to it."""

    @abstractmethod
    def up(self, s: Tensor, base_WN: Tensor, window: tuple[int, int]) -> Tensor:
        """Returns `base + s B^T` of the rows `window[0]:window[1]`, in the dtype of the base.

        For a base that is computed elsewhere (`layers.shardings`); so is `branch_dgrad`.
        """

    @abstractmethod
    def branch_dgrad(self, ds: Tensor, window: tuple[int, int]) -> Tensor:
        """Returns `drop(dS A)` of the rows `window[0]:window[1]`, 0 in those without an adapter."""

    @abstractmethod
    def rank_places(self, parts: int = 1) -> RankPlaces:
        """Returns where the s of `down`, and the dS of `backward_up`, hold their values.

        Args:
            parts: ranks that share the rank rows of every adapter.
        """

    @abstractmethod
    def backward_up(self, dy_TN: Tensor, s: Tensor) -> Tensor:
        """Returns dS, and may accumulate dB: otherwise `backward_down` does."""

    @abstractmethod
    def dgrad(self, dy_TN: Tensor, ds: Tensor, weight_NK: Tensor) -> Tensor:
        """Returns dx `[T, K]`."""

    @abstractmethod
    def backward_down(
        self,
        x_TK: Tensor,
        dy_TN: Tensor,
        s: Tensor,
        ds: Tensor,
        window: tuple[int, int],
        up: BoundLinear | None = None,
    ) -> None:
        """Accumulates dA over the rows `window[0]:window[1]`, which are all that x holds.

        It also accumulates dB over all rows if `backward_up` did not. Both methods must be called
        once, in this order.

        Args:
            up: the value whose `backward_up` returned dS, if it was another than this one.
        """


class SiteTables:
    """Addresses of one linear's weights and gradients, in tables on the device.

    They hold as long as the factors stay where they are: `factors.cached(SiteTables)`.
    """

    def __init__(self, factors: SiteFactors) -> None:
        device = factors.lora_a.device
        addresses = [b.data_ptr() for b in factors.lora_b]
        self.lora_b = torch.tensor(addresses, dtype=torch.int64, device=device)
        """int64 `[targets]`: addresses of `SiteFactors.lora_b`."""
        columns = [(c.width, c.stride, c.begin, c.size) for c in factors.columns]
        self.columns = torch.tensor(columns, dtype=torch.int32, device=device).flatten()
        """int32 `[targets * 4]`: width, stride, begin and number of columns."""
        rows_a = _gradient_rows(factors, factors.grad_a)
        rows_b = _gradient_rows(factors, factors.grad_b)
        self.grad_a = torch.from_numpy(rows_a).to(device)
        """int64 `[a_rows]`: the address of each rank row's gradient of A; 0 beyond a rank."""
        self.grad_b = torch.from_numpy(rows_b).to(device)
        """The same of B, numbered like the rows of the arena of A."""
        self.aligned_a, self.aligned_b = not (rows_a % 16).any(), not (rows_b % 16).any()
        """True if all gradients of A (of B) lie at 16 bytes."""
        self.aligned_lora_b = all(
            b.data_ptr() % 16 == 0 and b.stride(0) * b.element_size() % 16 == 0
            for b in factors.lora_b
        )


class KernelLinear(BoundLinear):
    """A `BoundLinear` whose kernels read work lists and address tables on the device."""

    __slots__ = ("plan", "tables")

    def __init__(self, factors: SiteFactors, rows: RowGroups) -> None:
        super().__init__(factors, rows)
        device = factors.lora_a.device
        self.plan: PlanTensors = plan_tensors(rows, factors.layout, device)
        """Work lists of the micro-batch, shared by all linears of the layout."""
        self.tables: SiteTables = factors.cached(SiteTables)
        """Addresses of the linear's weights and gradients."""


def _gradient_rows(factors: SiteFactors, grads: Sequence[Sequence[Tensor | None]]) -> np.ndarray:
    rows = np.zeros(factors.layout.a_rows, dtype=np.int64)
    for slot, begins in enumerate(factors.layout.a_begin):
        for p, begin in enumerate(begins):
            rank, grad = factors.layout.ranks[slot][p], grads[slot][p]
            if grad is None:
                continue
            assert grad.stride(1) == 1, "a gradient's rows must be contiguous"
            assert rank_chunks(rank) * RANK_CHUNK >= len(grad), "a gradient must fit its chunks"
            step = grad.stride(0) * grad.element_size()
            rows[begin : begin + len(grad)] = grad.data_ptr() + step * np.arange(len(grad))
    return rows
