"""Recomputed layers see the micro-batch of their first run, and give the bits of any recompute."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.unit.integrations.megatron.layer.test_frozen_sublayer import ALL, SPEC
from tlora_megatron.config.schema import Recompute
from tlora_megatron.integrations.megatron import engine
from tlora_megatron.model.layout import RECOMPUTES, ParallelLayout, RecomputeTable
from tlora_megatron.ops.exactness import exactness_of
from tlora_megatron.ops.routing import (
    Document,
    current_micro_batch,
    pack_micro_batch,
    use_micro_batch,
)
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.profiling.synthetic_run import SyntheticRun


def test_transformer_engine_s_checkpoint_is_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's `te_checkpoint` imports the function when it is called."""
    kept: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
    distributed = ModuleType("transformer_engine.pytorch.distributed")

    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kept.append((function, args, kwargs))
        return function(*args)

    distributed.checkpoint = checkpoint  # type: ignore[attr-defined]
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, distributed.__name__, distributed)
    engine._install_in_transformer_engine()
    engine._install_in_transformer_engine()
    first, second = (
        pack_micro_batch([Document(slot=0, length=n)], num_slots=1, num_tokens=4) for n in (3, 4)
    )
    with use_micro_batch(first):
        seen = distributed.checkpoint(lambda x: (x, current_micro_batch()), 5, tp_group=None)
    assert seen == (5, first)
    ((function, args, kwargs),) = kept
    assert kwargs == {"tp_group": None}
    with use_micro_batch(second):
        assert function(*args) == (5, first)
        assert current_micro_batch() is second


def test_without_transformer_engine_nothing_is_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)  # its import fails
    engine._install_in_transformer_engine()


ROUNDS = 3
LENGTHS = LengthHistogram.from_counts([(10, 4), (30, 2), (60, 1)])
LOADS = [
    JobLoad(name=f"job{r}", rank=r, batch_size=4, lengths=LENGTHS, targets=ALL, dropout=0.2)
    for r in (2, 4)
]


def train(recomputes: tuple[Recompute, ...]) -> tuple[list[Any], Counter[Recompute | None]]:
    """Losses, norms and weights of a run whose rounds are cut alike, whatever the recomputes."""
    run = SyntheticRun(SPEC, ParallelLayout(), dtype=torch.float32)
    torch.manual_seed(0)
    model = run.super_model(LOADS, 128)
    table = RecomputeTable(tuple(zip(recomputes, (16, 48, 128), strict=True)))
    model.round_shape = replace(model.round_shape, recompute=table)
    found: list[Any] = []
    seen: Counter[Recompute | None] = Counter()
    for _ in range(ROUNDS):
        batches = model.begin_round()
        seen.update(batch.view.recompute for batch in batches)
        reports = model.end_round(run.engine.forward_backward(batches))
        found += [(report.outcome.loss, report.outcome.grad_norm) for report in reports]
    found += [job.adapter.slab.whole("master").tolist() for job in model.jobs]
    return found, seen


@pytest.mark.slow
def test_a_run_by_micro_batch_has_the_bits_of_each_fixed_recompute() -> None:
    found, seen = train(RECOMPUTES)
    assert seen.keys() == set(RECOMPUTES)
    for recompute in RECOMPUTES:
        expected, same = train((recompute, recompute, recompute))
        assert same == {recompute: sum(seen.values())}
        assert found == expected, recompute


def train_in_portions(loads: list[JobLoad]) -> tuple[list[float], list[Recompute | None]]:
    """Weights of the first job, in portions, and the recomputes of all micro-batches."""
    run = SyntheticRun(SPEC, ParallelLayout(), dtype=torch.float32)
    torch.manual_seed(0)
    model = run.super_model(loads, 128)
    for job in model.jobs:
        job.spec = replace(job.spec, portion_tokens=60)
    table = RecomputeTable((("none", 64), ("selective", 80), ("full", 128)))
    model.round_shape = replace(
        model.round_shape, recompute=table, exactness=exactness_of(deterministic=True)
    )
    job, seen = model.jobs[0], []
    while job.step < ROUNDS:
        batches = model.begin_round()
        seen += [batch.view.recompute for batch in batches]
        model.end_round(run.engine.forward_backward(batches))
    return job.adapter.slab.whole("master").tolist(), seen


@pytest.mark.slow
def test_cuts_by_recompute_keep_a_job_s_bits_beside_others() -> None:
    alone, few = train_in_portions(LOADS[:1])
    together, many = train_in_portions(LOADS)
    assert alone == together
    assert len(many) > len(few), "the other job's rows have room of their own"
