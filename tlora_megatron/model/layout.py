"""The parallel layout of one super-model, its replicas where they are unlike, and its recompute.

A deployment is the replicas of a run in rank order, each a grid of processes. The planner makes it,
the packer balances rounds by it, and every process computes the same with it: whole numbers leave
no room for another rounding on another machine.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal, NamedTuple, get_args

from tlora_megatron.config.reader import read_spec
from tlora_megatron.config.schema import ParallelSpec, Recompute, ReplicaSpec
from tlora_megatron.config.sections import expand_short_form, short_form

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


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaLayout:
    """One replica: `tp_size x cp_size x pp_size` processes in a row, TP fastest and PP slowest."""

    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    sequence_parallel: bool = False
    micro_batch_tokens: int | None = None
    """Most rows of a micro-batch, over its context-parallel ranks; None = the run's."""
    recompute: Recompute | None = None
    """None = the run's."""

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.tp_size * self.pp_size * self.cp_size

    @property
    def grid(self) -> tuple[int, int, int]:
        """Sizes TP, PP and CP: replicas of equal grids hold equal shards of adapters."""
        return self.tp_size, self.pp_size, self.cp_size

    def parallel_layout(self, num_replicas: int) -> ParallelLayout:
        """Returns the layout as the replica's own processes see it; DP counts replicas."""
        return ParallelLayout(
            tp_size=self.tp_size,
            pp_size=self.pp_size,
            cp_size=self.cp_size,
            dp_size=num_replicas,
            sequence_parallel=self.sequence_parallel,
        )


@dataclass(frozen=True, slots=True)
class PlacedReplica:
    """One replica and the processes that it is on."""

    index: int
    first_rank: int
    layout: ReplicaLayout

    @property
    def ranks(self) -> range:
        """Its global ranks."""
        return range(self.first_rank, self.first_rank + self.layout.size)

    def place_of(self, rank: int) -> tuple[int, int, int]:
        """Returns the TP, PP and CP rank of one of its global ranks."""
        local, layout = rank - self.first_rank, self.layout
        per_stage = layout.tp_size * layout.cp_size
        return local % layout.tp_size, local // per_stage, local // layout.tp_size % layout.cp_size


@dataclass(frozen=True, slots=True)
class Deployment:
    """Replicas in rank order, those of the largest `tp_size x cp_size` first.

    So a replica's tensor and context parallel ranks begin at a multiple of their number, and stay
    on one node where all those numbers are powers of two. Pipelines may reach over nodes.
    """

    replicas: tuple[ReplicaLayout, ...]

    @classmethod
    def of(cls, replicas: Iterable[ReplicaLayout]) -> Deployment:
        """Returns a deployment of replicas in any order; those of one size stay in theirs."""
        settled = (
            replace(layout, sequence_parallel=layout.sequence_parallel and layout.tp_size > 1)
            for layout in replicas
        )
        by_size = sorted(settled, key=lambda r: (-r.tp_size * r.cp_size, -r.size))
        return cls(tuple(by_size))

    @classmethod
    def from_specs(cls, specs: Sequence[ReplicaSpec]) -> Deployment:
        """Returns the deployment that the key `parallel.replicas` describes."""
        names = [field.name for field in fields(ReplicaLayout)]
        return cls.of(
            ReplicaLayout(**{name: getattr(spec, name) for name in names})
            for spec in specs
            for _ in range(spec.count)
        )

    @classmethod
    def parse(cls, text: str) -> Deployment:
        """Reads the short form, such as `2xTP2+SP@12288/selective + 4xTP1@6144`."""
        parts = expand_short_form(text, "replicas")
        return cls.from_specs([read_spec(ReplicaSpec, part, "replicas") for part in parts])

    def __str__(self) -> str:
        """The short form, which `parse` reads."""
        runs = ((layout, len(list(run))) for layout, run in itertools.groupby(self.replicas))
        return short_form([ReplicaSpec(count=n, **asdict(layout)) for layout, n in runs])

    @classmethod
    def for_world(cls, specs: Sequence[ReplicaSpec], world_size: int) -> Deployment:
        """Returns the deployment of `parallel.replicas` on so many processes.

        Raises:
            ValueError: if it takes more or fewer.
        """
        deployment = cls.from_specs(specs)
        if deployment.world_size != world_size:
            raise ValueError(
                f"parallel.replicas must take all {world_size} processes, got {deployment} on "
                f"{deployment.world_size}; change counts or start {deployment.world_size}"
            )
        return deployment

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return sum(layout.size for layout in self.replicas)

    @property
    def kinds(self) -> tuple[ReplicaLayout, ...]:
        """The different layouts, in the order of their first replicas."""
        return tuple(dict.fromkeys(self.replicas))

    @property
    def is_alike(self) -> bool:
        """True if all replicas are equal: then processes are laid out as for plain sizes."""
        return len(self.kinds) == 1

    @property
    def tp_is_alike(self) -> bool:
        """True if all replicas cut adapters over equally many tensor-parallel ranks."""
        return len({layout.tp_size for layout in self.replicas}) == 1

    @property
    def most_stages(self) -> int:
        """Pipeline stages of the deepest replica."""
        return max(layout.pp_size for layout in self.replicas)

    @property
    def atoms(self) -> int:
        """Runs of columns of which every replica's tensor-parallel ranks hold whole ones."""
        return math.lcm(*(layout.tp_size for layout in self.replicas))

    def budgets(self, run_tokens: int) -> tuple[int, ...]:
        """Returns the most rows of a micro-batch of every replica.

        Args:
            run_tokens: the budget of replicas that have none of their own.
        """
        return tuple(layout.micro_batch_tokens or run_tokens for layout in self.replicas)

    def longest(self, run_tokens: int) -> int:
        """Returns the largest budget of a micro-batch: no sequence may be longer."""
        return max(self.budgets(run_tokens))

    def row_work(self) -> tuple[int, ...]:
        """Returns the time of a row on every replica in one unit, by processes and recompute.

        It follows from the deployment alone, so that what is dealt out by it does, too.
        """
        common = math.lcm(*(layout.size for layout in self.replicas))
        passes = (4 if layout.recompute == "full" else 3 for layout in self.replicas)
        return tuple(
            count * common // layout.size
            for count, layout in zip(passes, self.replicas, strict=True)
        )

    def stage_borders(self, num_layers: int) -> tuple[int, ...]:
        """Returns the first layers of all stages of all replicas, and `num_layers`, ascending."""
        sizes = {layout.pp_size for layout in self.replicas}
        return tuple(sorted({num_layers * s // p for p in sizes for s in range(p + 1)}))

    def placed_replicas(self) -> tuple[PlacedReplica, ...]:
        """Returns every replica with its processes, in rank order."""
        firsts = itertools.accumulate((r.size for r in self.replicas), initial=0)
        return tuple(
            PlacedReplica(index, first, layout)
            for index, (first, layout) in enumerate(zip(firsts, self.replicas, strict=False))
        )

    def placed(self, rank: int) -> PlacedReplica:
        """Returns the replica that a global rank belongs to."""
        for replica in self.placed_replicas():
            if rank in replica.ranks:
                return replica
        raise IndexError(f"rank must be below {self.world_size}, got {rank}")


def lay_out_world(parallel: ParallelSpec, world_size: int) -> ParallelLayout | Deployment:
    """Returns the layout of all processes: a deployment where replicas are unlike.

    Raises:
        ValueError: if it does not take as many processes as there are.
    """
    if parallel.replicas is not None:
        deployment = Deployment.for_world(parallel.replicas, world_size)
        if not deployment.is_alike:
            return deployment
    layout = ParallelLayout(
        tp_size=parallel.tp_size,
        pp_size=parallel.pp_size,
        cp_size=parallel.cp_size,
        sequence_parallel=parallel.sequence_parallel,
        first_stage_layers=parallel.first_stage_layers,
        last_stage_layers=parallel.last_stage_layers,
        ep_size=parallel.ep_size,
        expert_tp_size=parallel.expert_tp_size,
    )
    return layout.for_world(world_size)
