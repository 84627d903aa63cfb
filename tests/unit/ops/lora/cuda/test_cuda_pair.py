"""dS and dB in one pass over dy: the items of rank_pair.cu, executed on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.helpers.cuda_cases import CASES, QKV, WHOLE, rank_rows_by_definition
from tests.helpers.kernel_case import (
    KernelCase,
    make_case,
    make_rows,
    portions_and_one_by_one,
    reference,
    run,
)
from tests.helpers.linear_case import error
from tlora_megatron.ops.lora.columns import OutputColumns
from tlora_megatron.ops.lora.plan_tensors import PlanTensors
from tlora_megatron.ops.lora.torch_ops import TorchOps
from tlora_megatron.ops.routing.row_groups import RowGroups

IN_SIZE = 72
REPLACED = ("rank_rows", "rank_pair", "rank_sums", "gemm", "multiprocessors", "gemm_tile")
WIDE = (OutputColumns(groups=1, stride=1096, begin=0, width=1096),)
PAIR_CASES = {
    **CASES,
    "many ranges": (WIDE, [(8,), (40,), (64,), (20,)], (300, 129, 77, 0), 3),
}


@pytest.fixture
def cuda_ops() -> Iterator[ModuleType]:
    """The module, where torch hands out memory full of NaN."""
    pytest.importorskip("triton")
    from tlora_megatron.ops.lora.cuda import ops as cuda_ops

    torch.use_deterministic_algorithms(True)
    yield cuda_ops
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def paired(cuda_ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> type[SimpleNamespace]:
    """Makes `CudaOps` with a machine in place of the GPU, and a fit."""
    from tests.helpers.pair_machine import PairMachine
    from tlora_megatron.ops.lora.cuda.pair_items import PairFit

    class Paired(SimpleNamespace):
        def __init__(
            self, case: KernelCase, panels: int = 2, rows: int = 256, seed: int = 0, **ops: bool
        ) -> None:
            machine = PairMachine(case.factors, seed=seed)
            super().__init__(machine=machine, ops=cuda_ops.CudaOps(TorchOps(), **ops))
            for name in REPLACED:
                monkeypatch.setattr(cuda_ops, name, getattr(machine, name))
            fit = PairFit(most_panels=panels, rows_per_run=rows)
            monkeypatch.setattr(cuda_ops, "pair_fit", lambda *_: fit)

    return Paired


def draw(case: KernelCase, rows: RowGroups) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = (IN_SIZE, case.out_size)
    x, dy = (torch.randn(rows.ends[-1], n, generator=generator, dtype=torch.float64) for n in sizes)
    return x, dy


@pytest.mark.parametrize(("panels", "num_rows"), [(2, 256), (8, 128)])
@pytest.mark.parametrize("name", PAIR_CASES)
def test_outputs_and_gradients_are_the_definitions(
    name: str, panels: int, num_rows: int, paired: type
) -> None:
    columns, ranks, lengths, padding = PAIR_CASES[name]
    case = make_case(ranks, columns, IN_SIZE, dtype=torch.float64)
    rows = make_rows(lengths, padding)
    x, dy = draw(case, rows)
    way = paired(case, panels, num_rows)
    actual = run(way.ops, case, x, dy, rows)
    for key, value in reference(case, x.clone(), dy, rows).items():
        assert torch.isfinite(actual[key]).all(), key
        assert error(actual[key], value) < 1e-6, key
    assert way.machine.launches == ["rows", "gemm", "pair", "gemm", "sums"]


@pytest.mark.parametrize("name", PAIR_CASES)
def test_ds_is_written_in_both_forms(name: str, paired: type) -> None:
    columns, ranks, lengths, padding = PAIR_CASES[name]
    case = make_case(ranks, columns, IN_SIZE, dtype=torch.float64)
    rows = make_rows(lengths, padding)
    x, dy = draw(case, rows)
    bound = paired(case).ops.bind(case.factors, rows)
    flat = bound.backward_up(dy, bound.down(x))
    ext, row_form = rank_rows_by_definition(case, dy, rows, per_target=True)
    found = flat[: ext.numel()].view_as(ext)
    torch.testing.assert_close(found, ext, rtol=1e-5, atol=1e-5)
    written = flat[ext.numel() :].view_as(row_form)
    torch.testing.assert_close(written, row_form, equal_nan=True, rtol=1e-5, atol=1e-5)


def test_dropout_scales_ds(paired: type) -> None:
    case = make_case([(8,), (24,)], WHOLE, IN_SIZE, dtype=torch.float64, dropout=(0.3, 0.0))
    rows = make_rows((150, 200), 9)
    x, dy = draw(case, rows)
    actual = run(paired(case).ops, case, x, dy, rows)
    for key, value in reference(case, x.clone(), dy, rows).items():
        assert error(actual[key], value) < 1e-6, key


def test_order_of_arrival_does_not_show(paired: type) -> None:
    columns, ranks, lengths, padding = PAIR_CASES["many ranges"]
    case = make_case(ranks, columns, IN_SIZE, dtype=torch.float64)
    rows = make_rows(lengths, padding)
    x, dy = draw(case, rows)
    first, second = (run(paired(case, seed=s).ops, case, x, dy, rows) for s in (0, 1))
    for key, value in first.items():
        assert torch.equal(value, second[key]), key


def test_portions_add_up_as_micro_batches_one_after_another(paired: type) -> None:
    rows = make_rows((900, 40, 0, 300), 21, budget=4000, cuts=(150, 500, 520, 1000))
    ranks = [(24, 0, 8), (8, 8, 8), (16, 16, 16), (130, 4, 0)]
    case = make_case(ranks, QKV, IN_SIZE, dtype=torch.float64)
    x, dy = draw(case, rows)
    together, alone = portions_and_one_by_one(paired(case).ops, case, x, dy, rows)
    for name, grad in alone.items():
        assert torch.equal(together[name], grad), name


@pytest.mark.parametrize("name", PAIR_CASES)
def test_bounds_hold_for_other_segments(name: str) -> None:
    from tlora_megatron.ops.lora.cuda.pair_items import PairFit, pair_bounds, pair_items

    columns, ranks, lengths, padding = PAIR_CASES[name]
    case = make_case(ranks, columns, IN_SIZE, dtype=torch.float64)
    widths, total = [c.size for c in columns], sum(lengths) + padding
    fit = PairFit(most_panels=2, rows_per_run=256)
    plan = PlanTensors(make_rows(lengths, padding).ends, case.layout, torch.device("cpu"),
                       graph_safe=True)  # fmt: skip
    limit = pair_bounds(plan, widths, fit)
    slots = len(ranks)
    for own in range(slots):
        for few in (0, 1, total // slots):
            spread = [few] * slots
            spread[own] = total - few * (slots - 1)
            ends = make_rows(spread).ends
            other = replace_ends(case, (*ends[:-1], total))
            found = pair_items(other, widths, fit)
            assert len(found.items) <= limit.items
            assert found.workspace <= limit.workspace
            assert found.counters <= limit.counters


def replace_ends(case: KernelCase, ends: tuple[int, ...]) -> PlanTensors:
    return PlanTensors(ends, case.layout, torch.device("cpu"), graph_safe=False)


def test_a_fit_follows_from_sizes() -> None:
    from tlora_megatron.ops.lora.cuda.pair_items import wide_fit

    fit = wide_fit(8192, 4096, 132, 2)
    assert (fit.most_panels, fit.rows_per_run) == (2, 1024)
    assert wide_fit(8192, 28672, 132).rows_per_run == 4096
    assert replace(fit, rows_per_run=4096) != fit
