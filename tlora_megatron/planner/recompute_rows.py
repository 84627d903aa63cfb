"""Chooses the recompute of every micro-batch by its rows and the memory that there is."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from functools import partial

from tlora_megatron.model.layout import RECOMPUTES, Recompute, RecomputeTable
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.memory import ROW_TILE, MemoryModel

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
        memory: predicts the bytes of a mix of jobs.
        plan: the layout and the most rows of a micro-batch; its own recompute is not read.
        budget_bytes: memory of each GPU, as `MemoryUse.total_bytes` counts it.
        multiple: the rows of micro-batches are a multiple of this; None: as on GPUs.
        least_rows: a recompute that fits fewer rows is left out; None: `LEAST_ROWS` a GPU.
    """
    step = ROW_TILE * plan.cp_size if multiple is None else multiple
    fewest = LEAST_ROWS * plan.cp_size if least_rows is None else least_rows
    sizes = range(step, plan.micro_batch_tokens + step, step)
    found: list[tuple[Recompute, int]] = []
    for recompute in RECOMPUTES:
        need = partial(_total_bytes, memory, replace(plan, recompute=recompute))
        fitting = bisect_right(sizes, budget_bytes, key=need)
        rows = sizes[fitting - 1] if fitting else 0
        if rows > (found[-1][1] if found else min(fewest, sizes[-1]) - 1):
            found.append((recompute, rows))
        if fitting == len(sizes):
            break
    return RecomputeTable(tuple(found or [(RECOMPUTES[-1], sizes[-1])]))


def _total_bytes(memory: MemoryModel, plan: Plan, rows: int) -> float:
    return memory.use(plan, rows).total_bytes
