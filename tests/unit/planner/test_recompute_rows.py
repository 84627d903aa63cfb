"""The recompute of micro-batches by their rows: the lightest that fits, and only where it pays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.planner_case import HARDWARE, SPEC, job
from tlora_megatron.model.layout import RECOMPUTES, RecomputeTable
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.choices import LEAST_ROWS, recompute_for_rows
from tlora_megatron.planner.cost.memory import MemoryModel

MODEL = MemoryModel(SPEC, [job()], HARDWARE)
PLAN = Plan(micro_batch_tokens=8192)


def bytes_of(recompute: str, rows: int, plan: Plan = PLAN) -> float:
    return MODEL.use(replace(plan, recompute=recompute), rows).total_bytes  # type: ignore[arg-type]


@pytest.mark.parametrize("cp_size", [1, 2])
def test_each_recompute_holds_as_many_rows_as_fit(cp_size: int) -> None:
    plan, step = replace(PLAN, cp_size=cp_size), 128 * cp_size
    budget = bytes_of("selective", 4096, plan)
    table = recompute_for_rows(MODEL, plan, budget)
    (none, few), (selective, some), (full, most) = table.most_rows
    assert (none, selective, full, some) == (*RECOMPUTES, 4096)
    for recompute, rows in table.most_rows[:2]:
        assert bytes_of(recompute, rows, plan) <= budget < bytes_of(recompute, rows + step, plan)
    assert [table.of(rows) for rows in (1, few, few + 1, some, some + 1, most, 10**9)] == [
        none, none, selective, selective, full, full, full
    ]  # fmt: skip


def test_the_lightest_is_all_where_it_fits() -> None:
    table = recompute_for_rows(MODEL, PLAN, 1e12)
    assert table == RecomputeTable((("none", 8192),))
    assert table.line == "none for all micro-batches"


def test_what_fits_too_few_rows_is_left_out() -> None:
    budget = bytes_of("none", LEAST_ROWS - 128)
    assert recompute_for_rows(MODEL, PLAN, budget).most_rows[0][0] == "selective"
    assert recompute_for_rows(MODEL, PLAN, budget, least_rows=128).most_rows[0][0] == "none"
    # Unless no micro-batch has more.
    small = replace(PLAN, micro_batch_tokens=LEAST_ROWS - 128)
    assert recompute_for_rows(MODEL, small, budget).most_rows == (("none", LEAST_ROWS - 128),)


def test_nothing_saves_more_than_full() -> None:
    assert recompute_for_rows(MODEL, PLAN, 0.0).most_rows == (("full", 8192),)
    table = recompute_for_rows(MODEL, PLAN, bytes_of("full", 6400))
    assert table.most_rows[-1] == ("full", 6400)
    assert table.of(8192) == "full"


def test_a_table_is_told_in_a_line() -> None:
    table = RecomputeTable((("none", 6144), ("selective", 12288), ("full", 24576)))
    assert table.line == "none to 6,144 rows, selective to 12,288, full beyond"
    with pytest.raises(ValueError, match="must ascend from 1"):
        RecomputeTable((("none", 128), ("full", 128)))
