"""The parallel layout of one super-model: how processes share it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LoraSharding = Literal["fold", "rank_exchange", "s_lora"]
"""Ways for tensor-parallel ranks to share standard adapters; block-diagonal ones need none.

fold: one factor is replicated; partial sums join the base linear's own reduction. rank_exchange:
one factor is replicated and s and dS `[tokens, rank]` are exchanged, which works around any linear.
s_lora: both factors are sharded, s and dS are exchanged (S-LoRA, arXiv 2311.03285, section 6).
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """Sizes of tensor, pipeline, context and data parallelism; their product is the world size."""

    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    dp_size: int = 1
    sequence_parallel: bool = False
    stage_linears: tuple[tuple[tuple[int, str], ...], ...] | None = None
    """For every pipeline stage, the (global layer, linear) pairs that may carry adapters, in
    ascending order. None: every stage has all linears of `num_layers / pp_size` layers in a row."""
    lora_sharding: LoraSharding = "fold"
    """Sharding of standard adapters; without tensor parallelism all shardings are the same."""

    @classmethod
    def for_world(
        cls, world_size: int, *, tp_size: int, pp_size: int, cp_size: int, sequence_parallel: bool
    ) -> ParallelLayout:
        """Lays out `world_size` processes; those left after TP, PP and CP are data-parallel.

        Raises:
            ValueError: if `world_size` is not a multiple of `tp_size * pp_size * cp_size`.
        """
        model = tp_size * pp_size * cp_size
        if world_size % model:
            raise ValueError(
                f"world size must be a multiple of tp_size * pp_size * cp_size = {model}, "
                f"got {world_size}"
            )
        return cls(
            tp_size=tp_size,
            pp_size=pp_size,
            cp_size=cp_size,
            dp_size=world_size // model,
            sequence_parallel=sequence_parallel and tp_size > 1,
        )

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.tp_size * self.pp_size * self.cp_size * self.dp_size
