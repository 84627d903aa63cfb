"""A deployment: the replicas of a run in rank order, each a grid of processes, and their speed.

The planner makes it, the packer balances rounds by it, and every process computes the same with it:
whole numbers leave no room for another rounding on another machine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace

from tlora_megatron.config.reader import read_spec
from tlora_megatron.config.schema import ParallelSpec, Recompute, ReplicaSpec
from tlora_megatron.config.sections import expand_short_form, short_form
from tlora_megatron.model.layout import ParallelLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaRate:
    """Predicted time that one replica takes for its part of a round.

    A sequence of x rows takes `token_ps * x + square_ps * x**2` picoseconds.
    """

    token_ps: int
    """Picoseconds a row, forward and backward, recompute included."""
    square_ps: int
    """Picoseconds a squared row of a sequence: attention."""
    fixed_ps: int = 0
    """Picoseconds a micro-batch, however many rows it has."""
    longest: int
    """Rows that one of its micro-batches may hold, and so the longest sequence it may be given."""

    def __post_init__(self) -> None:
        for name, least in (("token_ps", 1), ("square_ps", 0), ("fixed_ps", 0), ("longest", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value}")

    def sequence_ps(self, rows: int) -> int:
        """Picoseconds of a sequence of so many rows."""
        return (self.token_ps + self.square_ps * rows) * rows


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
