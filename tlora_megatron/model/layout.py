"""The parallel layout of one super-model, and the recompute of its micro-batches."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from tlora_megatron.config.schema import Recompute

LoraSharding = Literal["fold", "rank_exchange", "s_lora"]
"""Ways for tensor-parallel ranks to share standard adapters; block-diagonal ones need none.

fold: one factor is replicated; partial sums join the base linear's own reduction. rank_exchange:
one factor is replicated and s and dS `[tokens, rank]` are exchanged, which works around any linear.
s_lora: both factors are sharded, s and dS are exchanged (S-LoRA, arXiv 2311.03285, section 6).
"""


class ExpertPlace(NamedTuple):
    """A rank's place among those that share the routed experts of a layer."""

    ep_rank: int = 0
    """The run of experts that it holds."""
    tp_rank: int = 0
    """The part of each of them that it holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """Sizes of tensor, pipeline, context and data parallelism; their product is the world size."""

    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    """Ranks that share the routed experts of a layer, each with some of them."""
    expert_tp_size: int | None = None
    """Tensor-parallel ranks that share each routed expert; None: `tp_size`, else it is 1."""
    sequence_parallel: bool = False
    first_stage_layers: int | None = None
    """Layers of the first pipeline stage; None: as many as of each middle one."""
    last_stage_layers: int | None = None
    stage_linears: tuple[tuple[tuple[int, str], ...], ...] | None = None
    """For every pipeline stage, the (global layer, linear) pairs that may carry adapters, in
    ascending order. None: every stage has all linears of its layers."""
    lora_sharding: LoraSharding = "fold"
    """Sharding of standard adapters; without tensor parallelism all shardings are the same."""

    def for_world(self, world_size: int) -> ParallelLayout:
        """Lays out `world_size` processes; those left after TP, PP and CP are data-parallel.

        Raises:
            ValueError: if `world_size` is not a multiple of `tp_size * pp_size * cp_size`, or the
                ranks of a pipeline stage not of `expert_tp_size * ep_size`.
        """
        model = self.tp_size * self.pp_size * self.cp_size
        if world_size % model:
            raise ValueError(
                f"world size must be a multiple of tp_size * pp_size * cp_size = {model}, "
                f"got {world_size}"
            )
        shared = self.ep_size * self.expert_tp
        if world_size // self.pp_size % shared:
            raise ValueError(
                f"processes of a pipeline stage must be a multiple of ep_size * expert_tp_size = "
                f"{shared}, got {world_size // self.pp_size}"
            )
        sequence_parallel = self.sequence_parallel and self.tp_size > 1
        return replace(self, dp_size=world_size // model, sequence_parallel=sequence_parallel)

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel ranks that share each routed expert."""
        return self.expert_tp_size or self.tp_size

    @property
    def expert_holders(self) -> int:
        """Ranks of a pipeline stage, the first ones, that together hold one replica of all."""
        return max(self.tp_size, self.ep_size * self.expert_tp)

    def expert_place(self, stage_rank: int) -> ExpertPlace:
        """Returns the place of the rank with this number in its pipeline stage, as Megatron's."""
        return ExpertPlace(
            ep_rank=stage_rank // self.expert_tp % self.ep_size,
            tp_rank=stage_rank % self.expert_tp,
        )

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.tp_size * self.pp_size * self.cp_size * self.dp_size

    def stage_layers(self, num_layers: int, pp_rank: int) -> range:
        """Global indices of one pipeline stage's layers; see `stage_sizes`."""
        sizes = stage_sizes(
            num_layers, self.pp_size, self.first_stage_layers, self.last_stage_layers
        )
        begin = sum(sizes[:pp_rank])
        return range(begin, begin + sizes[pp_rank])


@functools.lru_cache(maxsize=4096)
def stage_sizes(
    num_layers: int, pp_size: int, first: int | None = None, last: int | None = None
) -> tuple[int, ...]:
    """Number of layers of every pipeline stage, divided as Megatron-core does.

    Args:
        first: layers of the first stage; None: as many as of each middle one.
        last: those of the last stage, likewise.

    Raises:
        ValueError: if the layers that are left cannot be shared evenly by the stages that are left.
    """
    given = [n for n in (first, last) if n is not None]
    stages, layers = pp_size - len(given), num_layers - sum(given)
    if not given and layers % pp_size:
        raise ValueError(
            f"num_layers must be a multiple of pp_size={pp_size}, got {num_layers}; or give "
            "first_stage_layers, last_stage_layers or both, so that the other stages are alike"
        )
    if stages < 0 or (layers != 0 if stages == 0 else layers < stages or layers % stages):
        raise ValueError(
            f"first_stage_layers and last_stage_layers must leave equally many of {num_layers} "
            f"layers to each of the other {max(0, stages)} stages, got {first} and {last}"
        )
    middle = layers // stages if stages else 0
    ends = [middle if first is None else first] + [middle] * (pp_size - 2)
    return tuple([*ends, middle if last is None else last] if pp_size > 1 else ends)


RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
"""All of them, the one that computes least again first."""


@dataclass(frozen=True, slots=True)
class RecomputeTable:
    """The recompute of every micro-batch of a run, by its rows.

    The last entry holds every micro-batch that is longer than it says, too: nothing saves more.
    """

    most_rows: tuple[tuple[Recompute, int], ...]
    """Recomputes, and the most rows of a micro-batch (over its context-parallel ranks) that each
    has memory for; what computes least again comes first."""

    def __post_init__(self) -> None:
        rows = [most for _, most in self.most_rows]
        if not rows or rows[0] < 1 or any(a >= b for a, b in itertools.pairwise(rows)):
            raise ValueError(f"rows of a recompute table must ascend from 1, got {self.most_rows}")

    def of(self, rows: int) -> Recompute:
        """Returns the recompute of a micro-batch of `rows` rows."""
        return next((name for name, most in self.most_rows if rows <= most), self.most_rows[-1][0])

    def room_around(self, rows: int) -> int:
        """Returns the most rows of a micro-batch around so many that needs no more recompute."""
        return next((most for _, most in self.most_rows if rows <= most), rows)

    def of_share(self, size: int, cp_size: int) -> RecomputeTable:
        """Returns the table of micro-batches that only some context-parallel ranks share."""
        rows = [(name, max(1, most * size // cp_size)) for name, most in self.most_rows]
        return RecomputeTable(tuple(rows))

    @property
    def line(self) -> str:
        """The table as users read it: `none to 6,144 rows, selective to 12,288, full beyond`."""
        *lighter, (last, _) = self.most_rows
        if not lighter:
            return f"{last} for all micro-batches"
        parts = [f"{name} to {most:,}" for name, most in lighter]
        parts[0] += " rows"
        return ", ".join([*parts, f"{last} beyond"])
