"""Chooses the LoRA sharding of a run, and the recompute of every micro-batch by its rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

from tlora_megatron.config.schema import Recompute
from tlora_megatron.model.layout import RECOMPUTES, LoraSharding, RecomputeTable
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.candidate import SHARDINGS, Plan
from tlora_megatron.planner.cost.cost_model import CostModel
from tlora_megatron.planner.cost.memory import ROW_TILE, MemoryModel
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.workload import JobLoad

LEAST_ROWS = 1024
"""Fewest rows a GPU that a run is cut into micro-batches for. At 1,024 rows without recompute an
H200 is predicted to need 68 us a row of Llama-3.1-8B, at 24,576 rows with all of it 79 us; below,
its kernels are short of rows and it waits for the host."""


def recompute_for_rows(
    memory: MemoryModel,
    plan: Plan,
    budget_bytes: float,
    *,
    multiple: int | None = None,
    least_rows: int | None = None,
) -> RecomputeTable:
    """Returns the lightest recompute of a plan's micro-batches that fits, by their rows.

    Args:
        budget_bytes: memory of each GPU, as `MemoryUse.total_bytes` counts it.
        multiple: the rows of micro-batches are a multiple of this; None: as on GPUs.
        least_rows: a recompute that fits fewer rows is left out; None: `LEAST_ROWS` a GPU.
    """
    step = ROW_TILE * plan.cp_size if multiple is None else multiple
    fewest = LEAST_ROWS * plan.cp_size if least_rows is None else least_rows
    sizes = range(step, plan.micro_batch_tokens + step, step)
    found: list[tuple[Recompute, int]] = []
    for recompute in RECOMPUTES:
        use_of = partial(memory.use, replace(plan, recompute=recompute))
        fitting = bisect_right(sizes, budget_bytes, key=lambda rows: use_of(rows).total_bytes)
        rows = sizes[fitting - 1] if fitting else 0
        if rows > (found[-1][1] if found else min(fewest, sizes[-1]) - 1):
            found.append((recompute, rows))
        if fitting == len(sizes):
            break
    return RecomputeTable(tuple(found or [(RECOMPUTES[-1], sizes[-1])]))


_MARGIN = 0.02
"""Share of fold's time that another sharding must save. Predicted ratios to fold are off by 1 % in
the median of measured cells and by 6 % at most (docs/lora_sharding.md); fold exchanges least."""


class ShardingChoice(NamedTuple):
    """The sharding of a run and the reason for it."""

    sharding: LoraSharding
    reason: str

    @property
    def line(self) -> str:
        """The choice as a line for the log."""
        return f"parallel.lora_sharding: {self.sharding} ({self.reason})"


def choose_lora_sharding(
    asked: LoraSharding | Literal["auto"],
    *,
    tp_sizes: Collection[int],
    black_box: str | None,
    overlaps: bool,
    times_s: Mapping[LoraSharding, float],
    source: str,
) -> ShardingChoice:
    """Resolves `parallel.lora_sharding`; depends on its arguments only.

    Args:
        tp_sizes: tensor-parallel sizes of the run's replicas, each once.
        black_box: class of linears whose GEMM and reduction are not ours (Transformer Engine's),
        around which only rank_exchange works; None: all linears are Megatron's own.
        overlaps: True if nano-batches shall hide communication; they run fold's linears only.
        times_s: predicted seconds of a round by sharding; empty without a prediction.
        source: where the times come from, or why there are none.

    Raises:
        ValueError: if what is asked for contradicts the linears.
    """
    if set(tp_sizes) == {1}:
        return ShardingChoice("fold", "TP 1 has nothing to share")
    if len(set(tp_sizes)) > 1:
        if asked not in ("auto", "fold") or black_box is not None:
            got = asked if black_box is None else f"a {black_box}"
            raise ValueError(
                "parallel.lora_sharding must be fold or auto where replicas differ in tp_size, on "
                f"Megatron's own linears, got {got}"
            )
        return ShardingChoice("fold", "replicas differ in tp_size")
    if black_box is not None:
        if asked not in ("auto", "rank_exchange"):
            raise ValueError(
                f"parallel.lora_sharding must be rank_exchange or auto around a {black_box}, whose "
                f"reduction is its own, got {asked}; or build the model of Megatron's own linears"
            )
        return ShardingChoice("rank_exchange", f"all that goes around a {black_box}")
    if asked != "auto":
        return ShardingChoice(asked, "asked for")
    if overlaps:
        return ShardingChoice("fold", "auto: nano-batches overlap it alone")
    if not times_s:
        return ShardingChoice("fold", f"auto: {source}")
    best = preferred(times_s)
    told = ", ".join(f"{name} {times_s[name] * 1e3:.4g} ms" for name in SHARDINGS)
    return ShardingChoice(best, f"auto: a round is to take {told}, {source}")


def sharding_times(
    spec: ModelSpec, jobs: Sequence[JobLoad], plan: Plan, hardware: HardwareProfile
) -> dict[LoraSharding, float]:
    """Predicted seconds of a round by sharding."""
    model = CostModel(spec, jobs, hardware)
    return {
        name: model.step_cost(replace(plan, lora_sharding=name)).step_time_s for name in SHARDINGS
    }


def preferred(times_s: Mapping[LoraSharding, float]) -> LoraSharding:
    """The fastest sharding if it saves enough, otherwise fold."""
    return min(SHARDINGS, key=lambda name: times_s[name] / handicap(name))


def handicap(sharding: LoraSharding) -> float:
    """Factor by which a sharding's predicted speed counts compared with fold's."""
    return 1.0 if sharding == "fold" else 1.0 - _MARGIN


def sharding_options(
    jobs: Sequence[JobLoad], plan: Plan, asked: LoraSharding | None
) -> tuple[LoraSharding, ...]:
    """The shardings that may be best; the one that needs least memory comes last.

    Only standard adapters on several tensor-parallel ranks leave a choice. rank_exchange, for
    linears that fold cannot enter, is tried only if it is asked for.
    """
    if plan.tp_size == 1 or all(job.num_blocks > 1 for job in jobs):
        return ("fold",)
    return ("fold", "s_lora") if asked is None else (asked,)
