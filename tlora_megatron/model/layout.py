"""How one super-model is laid out over processes: a value that answers questions about ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LoraSharding = Literal["fold", "rank_exchange", "s_lora"]
"""How tensor-parallel ranks share standard adapters; block-diagonal ones need no sharing.

fold: one factor replicated, the branch's partial sums in the base's own reduction. rank_exchange:
one factor replicated, s and dS `[tokens, rank]` exchanged, around any base. s_lora: both factors
sharded, s and dS exchanged (S-LoRA, arXiv 2311.03285, section 6).
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """Tensor, pipeline, context, data parallel sizes; `dp_size = world_size / (tp * pp * cp)`."""

    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    dp_size: int = 1
    sequence_parallel: bool = False
    stage_linears: tuple[tuple[tuple[int, str], ...], ...] | None = None
    """For every pipeline stage, the (global layer, linear) pairs that may carry adapters, in
    ascending order; None = all linears of `num_layers / pp_size` consecutive layers a stage."""
    lora_sharding: LoraSharding = "fold"
    """Of standard adapters; all are the same without tensor parallelism."""

    @classmethod
    def for_world(
        cls, world_size: int, *, tp_size: int, pp_size: int, cp_size: int, sequence_parallel: bool
    ) -> ParallelLayout:
        """Lays out `world_size` processes; what is left after TP, PP and CP is data parallel.

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
