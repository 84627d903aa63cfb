"""The layout of an adapter's factors in its slab on one rank, and their place in whole tensors.

Factors that all routed experts of a layer share (`lora.expert_sharing`) come first, whole on every
rank; then TP-replicated ones, so that partial gradients are one slice to sum over TP; then the
sharded ones. Those of single routed experts come last: other ranks hold replicas of them. `lora_b`
is stored transposed, `[rank, out]`, as the kernels read it. Nothing of a block-diagonal adapter is
replicated, nor of a standard one under s_lora.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from tlora_megatron.config.job import LoraSpec
from tlora_megatron.layers.sites import Site, TargetShard

_Which = Literal["lora_a", "lora_b"]


class Factor(NamedTuple):
    """One factor's place in the slab, and the part of the whole canonical tensor that it is."""

    shard: TargetShard
    which: _Which
    offset: int
    shape: tuple[int, ...]
    """`[rank, in]` or, transposed, `[rank, out]`; local sizes. A block-diagonal factor has its
    blocks alone: `lora_a`'s `[rank / num_blocks, in / num_blocks]` below one another, `lora_b`'s
    beside one another. On routed experts one such matrix for each expert of this rank:
    `[experts, rank, in or out]`."""
    held: tuple[slice | Tensor, slice]
    """Rows and columns of the whole canonical tensor, or of each expert's."""
    num_blocks: int = 1
    """Diagonal blocks on this rank; with one, or in a dense factor, the kernels read `shape`."""
    experts: range | None = None
    """The experts of the whole canonical tensor's first dimension; None = it has none."""

    @property
    def name(self) -> str:
        """Canonical name, for example `layers.3.q_proj.lora_a`."""
        return f"{self.shard.name}.{self.which}"

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def spread_shape(self) -> tuple[int, int]:
        """Shape `[rank, in or out]` with the zeros around the blocks, as the kernels read it."""
        rows, columns = self.shape[-2:]
        if self.which == "lora_a":
            return rows, columns * self.num_blocks
        return rows * self.num_blocks, columns

    def take(self, whole: Tensor, local: Tensor) -> None:
        """Writes this rank's part of the whole canonical CPU tensor, in slab orientation.

        By numpy, as in `place`. Under s_lora the last ranks' shares of the rank rows may be filled
        up with zeros.
        """
        rows, columns = self.held
        part = self._of_experts(whole)[..., rows, :][..., columns].float().numpy()
        values = part if self.which == "lora_a" else part.swapaxes(-1, -2)
        room, size = local.numpy(), values.shape[-2]
        room[..., :size, :] = values
        room[..., size:, :] = 0

    def place(self, whole: Tensor, local: Tensor) -> None:
        """Writes this rank's part into the whole canonical CPU tensor: inverse of `take`.

        By numpy, which transposes twice as fast as torch does and starts no threads for it.
        """
        (rows, columns), of_experts = self.held, self._of_experts(whole)
        place = rows.numpy() if isinstance(rows, Tensor) else rows
        size = of_experts[..., rows, :].shape[-2]
        values = local[..., :size, :] if self.which == "lora_a" else local.mT
        of_experts.numpy()[..., place, columns] = values.numpy()

    def _of_experts(self, whole: Tensor) -> Tensor:
        """Returns this rank's experts of the whole tensor, a view."""
        return whole if self.experts is None else whole[self.experts.start : self.experts.stop]

    def blocks(self, local: Tensor) -> Tensor:
        """Returns a view `[num_blocks, rank of a block, features of a block]` of the factor."""
        if self.which == "lora_a":
            return local.unflatten(0, (self.num_blocks, -1))
        return local.unflatten(1, (self.num_blocks, -1)).transpose(0, 1)

    def diagonal(self, spread: Tensor) -> Tensor:
        """Returns the blocks of a tensor `spread_shape` as a view, shaped as in `blocks`."""
        n = self.num_blocks
        square = spread.unflatten(1, (n, -1)).unflatten(0, (n, -1))
        return square.diagonal(dim1=0, dim2=2).movedim(-1, 0)


class SlabLayout(NamedTuple):
    """The place of each factor of one adapter on one rank."""

    lora: LoraSpec
    factors: tuple[Factor, ...]
    replicated_numel: int
    """Number of elements, at the beginning, that are replicated over TP; 0 without TP."""
    numel: int
    experts_begin: int
    """First element of the factors on routed experts, which come last."""
    experts_replicated: int = 0
    """Number of elements, from there on, that are replicated over the ranks that cut an expert."""

    @property
    def spread(self) -> tuple[Factor, ...]:
        """Factors of several blocks on this rank, which the kernels read with zeros around."""
        return tuple(factor for factor in self.factors if factor.num_blocks > 1)

    def parts(self, numel: int) -> Iterator[tuple[Factor, ...]]:
        """Yields factors in runs of so many elements at most; larger ones by themselves."""
        run: list[Factor] = []
        for factor in self.factors:
            if run and sum(f.numel for f in run) + factor.numel > numel:
                yield tuple(run)
                run = []
            run.append(factor)
        if run:
            yield tuple(run)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Returns the factors as views of a flat buffer, in layout order."""
        parts = buffer.split_with_sizes([factor.numel for factor in self.factors])
        pairs = zip(parts, self.factors, strict=True)
        return [part.view(factor.shape) for part, factor in pairs]


def slab_layout(sites: Sequence[Site], lora: LoraSpec) -> SlabLayout:
    """Lays an adapter out over the sites of one rank: dense linears, then routed experts."""
    of_experts = [site for site in sites if site.experts is not None]
    dense = [site for site in sites if site.experts is None]
    shared = _shared_by_experts(of_experts, lora)
    dense_begin = _end(shared, 0)
    factors, replicated = _lay_out(dense, lora, dense_begin)
    if any(site.tp_size > 1 for site in dense):
        replicated += dense_begin
    begin = _end(factors, dense_begin)
    more, experts_replicated = _lay_out(of_experts, lora, begin)
    return SlabLayout(
        lora, (*shared, *factors, *more), replicated, _end(more, begin), begin, experts_replicated
    )


def _end(factors: Sequence[Factor], begin: int) -> int:
    return factors[-1].offset + factors[-1].numel if factors else begin


def _lay_out(sites: Sequence[Site], lora: LoraSpec, offset: int) -> tuple[list[Factor], int]:
    """Returns the factors from an offset on, and how many elements of them are replicated."""
    factors, numels = [], []
    for replicated in (True, False):
        begin = offset
        for site, shard, which in _wanted(sites, lora, replicated=replicated):
            if lora.is_shared(shard.target, which):
                continue
            factors.append(_factor(site, shard, which, offset, lora))
            offset += factors[-1].numel
        numels.append(offset - begin)
    shared = any(site.tp_size > 1 and site.lora_sharding != "s_lora" for site in sites)
    return factors, numels[0] if shared and not lora.is_block_diagonal else 0


def _wanted(
    sites: Sequence[Site], lora: LoraSpec, *, replicated: bool
) -> Iterator[tuple[Site, TargetShard, _Which]]:
    """Yields an adapter's factors: those that tensor parallelism replicates, or the others."""
    for site in sites:
        for shard in site.targets:
            if shard.target in lora.target_modules:
                yield site, shard, "lora_a" if replicated == (site.kind == "column") else "lora_b"


def _shared_by_experts(sites: Sequence[Site], lora: LoraSpec) -> list[Factor]:
    """Returns the factors that all routed experts of a layer share, whole on every rank."""
    factors: list[Factor] = []
    for _, shard, which in _wanted(sites, lora, replicated=True):
        if lora.is_shared(shard.target, which):
            size = shard.in_size if which == "lora_a" else shard.columns.size
            shape, whole = (lora.rank_of(shard.target), size), (slice(None), slice(None))
            factors.append(Factor(shard, which, _end(factors, 0), shape, whole))
    return factors


def _factor(site: Site, shard: TargetShard, which: _Which, offset: int, lora: LoraSpec) -> Factor:
    """Returns one factor's part on this rank, cut as the base's weight is.

    A rank has all rank rows of a standard adapter, and of a block-diagonal one the blocks that meet
    its part of the base (arXiv 2510.23346, section 3).
    """
    whole, is_a = slice(None), which == "lora_a"
    rows = whole if is_a or shard.lora_b_rows is None else shard.lora_b_rows
    columns = shard.lora_a_columns if is_a and shard.lora_a_columns else whole
    size = shard.in_size if is_a else shard.columns.size
    if site.experts is not None:
        shape = (len(site.experts), lora.rank_of(shard.target), size)
        return Factor(shard, which, offset, shape, (rows, columns), experts=site.experts)
    if lora.is_block_diagonal:
        rank = lora.local_rank(site.tp_size)
        ranks = slice(site.tp_rank * rank, (site.tp_rank + 1) * rank)
        is_block = which == lora.block_factor(shard.target)
        blocks = lora.num_blocks // site.tp_size if is_block else 1
        if is_a:
            # Blocks below one another: those of some rows of the rank are whole rows.
            held = (ranks, whole if is_block else columns)
            return Factor(shard, which, offset, (rank, size // blocks), held, blocks)
        held_b = (rows, whole if is_block else ranks)
        return Factor(shard, which, offset, (rank // blocks, size), held_b, blocks)
    if site.lora_sharding != "s_lora" or is_a != (site.kind == "column"):
        return Factor(shard, which, offset, (lora.rank, size), (rows, columns))
    if is_a:
        size, ranks = site.rank_rows(lora.rank)
        return Factor(shard, which, offset, (size, shard.in_size), (ranks, whole))
    own = site.own_outputs
    rows = slice(own.begin, own.begin + own.width)
    return Factor(shard, which, offset, (lora.rank, own.width), (rows, whole))
