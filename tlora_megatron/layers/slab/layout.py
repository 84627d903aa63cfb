"""The layout of an adapter's factors in its slab on one rank, and their place in whole tensors.

TP-replicated factors come first, so that their partial gradients are one slice to sum over TP; then
the sharded ones. `lora_b` is stored transposed, `[rank, out]`, as the kernels read it. Nothing of a
block-diagonal adapter is replicated, and only the blocks of its block-diagonal factors are stored.
Under s_lora nothing of a standard adapter is replicated either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from tlora_megatron.config.job import LoraSpec
from tlora_megatron.layers.sites import Site, TargetShard


class Factor(NamedTuple):
    """One factor's place in the slab, and the part of the whole canonical tensor that it is."""

    shard: TargetShard
    which: Literal["lora_a", "lora_b"]
    offset: int
    shape: tuple[int, int]
    """`[rank, in]` or, transposed, `[rank, out]`; local sizes. A block-diagonal factor has its
    blocks alone: `lora_a`'s `[rank / num_blocks, in / num_blocks]` below one another, `lora_b`'s
    beside one another."""
    held: tuple[slice | torch.Tensor, slice]
    """Rows and columns of the whole canonical tensor."""
    num_blocks: int = 1
    """Diagonal blocks on this rank; with one, or in a dense factor, the kernels read `shape`."""

    @property
    def name(self) -> str:
        """Canonical name, for example `layers.3.q_proj.lora_a`."""
        return f"{self.shard.name}.{self.which}"

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.shape[0] * self.shape[1]

    @property
    def spread_shape(self) -> tuple[int, int]:
        """Shape `[rank, in or out]` with the zeros around the blocks, as the kernels read it."""
        rows, columns = self.shape
        if self.which == "lora_a":
            return rows, columns * self.num_blocks
        return rows * self.num_blocks, columns

    def shard_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of the whole canonical tensor, in slab orientation."""
        rows, columns = self.held
        part = whole[rows][:, columns]
        if self.which == "lora_b":
            return part.t()
        # Under s_lora the last ranks' shares of the rank rows may be filled up.
        return F.pad(part, (0, 0, 0, self.shape[0] - len(part)))

    def take(self, whole: torch.Tensor, local: torch.Tensor) -> None:
        """Writes this rank's part of the whole canonical tensor into a CPU tensor, as `shard_of`.

        By numpy, as in `place`.
        """
        rows, columns = self.held
        part = whole[rows][:, columns].float().numpy()
        values = part if self.which == "lora_a" else part.T
        room = local.numpy()
        room[: len(values)] = values
        room[len(values) :] = 0

    def place(self, whole: torch.Tensor, local: torch.Tensor) -> None:
        """Writes this rank's part into the whole canonical CPU tensor: inverse of `shard_of`.

        By numpy, which transposes twice as fast as torch does and starts no threads for it.
        """
        rows, columns = self.held
        place = rows.numpy() if isinstance(rows, torch.Tensor) else rows
        values = local[: len(whole[rows])] if self.which == "lora_a" else local.t()
        whole.numpy()[place, columns] = values.numpy()

    @property
    def is_whole_as_stored(self) -> bool:
        """True if the part is the whole canonical tensor, in its orientation."""
        everything = slice(None)
        return self.which == "lora_a" and self.held == (everything, everything)

    def blocks(self, local: torch.Tensor) -> torch.Tensor:
        """Returns a view `[num_blocks, rank of a block, features of a block]` of the factor."""
        if self.which == "lora_a":
            return local.unflatten(0, (self.num_blocks, -1))
        return local.unflatten(1, (self.num_blocks, -1)).transpose(0, 1)

    def diagonal(self, spread: torch.Tensor) -> torch.Tensor:
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

    def split(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the factors as flat views of a flat buffer, in layout order, by one call."""
        return buffer.split_with_sizes([f.numel for f in self.factors])

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Returns the factors as views of a flat buffer, in layout order."""
        parts = zip(self.split(buffer), self.factors, strict=True)
        return [part.view(factor.shape) for part, factor in parts]


def slab_layout(sites: Sequence[Site], lora: LoraSpec) -> SlabLayout:
    """Lays an adapter out over the sites of one rank."""
    shards = [
        (site, shard)
        for site in sites
        for shard in site.targets
        if shard.target in lora.target_modules
    ]
    wanted: list[tuple[Site, TargetShard, Literal["lora_a", "lora_b"]]] = []
    for replicated in (True, False):
        for site, shard in shards:
            is_a = replicated == (site.kind == "column")
            wanted.append((site, shard, "lora_a" if is_a else "lora_b"))
    factors, offset = [], 0
    for site, shard, which in wanted:
        shares_all = site.lora_sharding == "s_lora" and not lora.is_block_diagonal
        make = _shared_factor if shares_all else _factor
        factors.append(make(site, shard, which, offset, lora))
        offset += factors[-1].numel
    replicates = _replicates(sites) and not lora.is_block_diagonal
    replicated_numel = sum(f.numel for f in factors[: len(shards)]) if replicates else 0
    return SlabLayout(lora, tuple(factors), replicated_numel, offset)


def _factor(
    site: Site,
    shard: TargetShard,
    which: Literal["lora_a", "lora_b"],
    offset: int,
    lora: LoraSpec,
) -> Factor:
    """Returns one factor's part on this rank.

    A rank has all rank rows of a standard adapter, and of a block-diagonal one the blocks that meet
    its part of the base (arXiv 2510.23346, section 3).
    """
    rank, whole = lora.local_rank(site.tp_size), slice(None)
    ranks = slice(site.tp_rank * rank, (site.tp_rank + 1) * rank)
    if not lora.is_block_diagonal:
        ranks = whole
    is_block = which == lora.block_factor(shard.target)
    blocks = lora.num_blocks // site.tp_size if is_block else 1
    if which == "lora_a":
        # Blocks below one another: those of some rows of the rank are whole rows.
        columns = whole if is_block or shard.lora_a_columns is None else shard.lora_a_columns
        shape = (rank, shard.in_size // blocks)
        return Factor(shard, which, offset, shape, (ranks, columns), blocks)
    rows = whole if shard.lora_b_rows is None else shard.lora_b_rows
    shape = (rank // blocks, shard.columns.size)
    return Factor(shard, which, offset, shape, (rows, whole if is_block else ranks), blocks)


def _shared_factor(
    site: Site,
    shard: TargetShard,
    which: Literal["lora_a", "lora_b"],
    offset: int,
    lora: LoraSpec,
) -> Factor:
    """Returns one factor of a standard adapter under s_lora, where nothing is replicated."""
    if (which == "lora_a") != (site.kind == "column"):
        return _factor(site, shard, which, offset, lora)
    if which == "lora_a":
        size, ranks = site.rank_rows(lora.rank)
        return Factor(shard, which, offset, (size, shard.in_size), (ranks, slice(None)))
    own = site.own_outputs
    rows = slice(own.begin, own.begin + own.width)
    return Factor(shard, which, offset, (lora.rank, own.width), (rows, slice(None)))


def _replicates(sites: Sequence[Site]) -> bool:
    return any(site.tp_size > 1 and site.lora_sharding != "s_lora" for site in sites)
