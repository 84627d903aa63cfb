"""The bench of recompute by rows: what fits into its memory, and that the modes train alike."""

from __future__ import annotations

import pytest

from scripts.bench.planner.cases import model_spec
from scripts.bench.recompute_by_micro_batch import PROFILE, Bench, drawn_lengths
from tlora_megatron.model.layout import RECOMPUTES
from tlora_megatron.planner.hardware import load_profile


@pytest.mark.parametrize(("memory_gb", "fixed"), [(48, ("full",)), (80, ("selective", "full"))])
def test_the_lightest_recompute_for_all_is_held_against_the_table(
    memory_gb: int, fixed: tuple[str, ...]
) -> None:
    bench = Bench(
        spec=model_spec("8b"),
        hardware=load_profile(PROFILE),
        memory_bytes=memory_gb * 1e9,
        tokens=24576,
        lengths=drawn_lengths((4, 16), 16384),
    )
    modes = bench.modes()
    assert tuple(modes) == (*fixed, "auto")
    table = modes["auto"].table
    assert table is not None
    assert [table.of(rows) for rows in (1024, 24576)] == ["none", fixed[0]]
    rates = [bench.rate(recompute).sequence_ps(4096) for recompute in RECOMPUTES]
    assert rates == sorted(rates)


def test_sequences_are_drawn_from_all_parts_of_the_lengths() -> None:
    lengths = drawn_lengths((2, 16), 8192)
    assert lengths == drawn_lengths((2, 16), 8192)
    assert {tuple(map(len, steps)) for steps in lengths.values()} == {(2, 16)}
    for steps in lengths.values():
        assert steps[1] == sorted(steps[1])
        assert max(steps[1]) <= 8192
