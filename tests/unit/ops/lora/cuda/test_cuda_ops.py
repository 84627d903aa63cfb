"""`CudaOps` on the CPU: its launches, executed item by item, give every output and gradient."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.helpers.cuda_cases import CASES, QKV, WHOLE
from tests.helpers.item_machine import ItemMachine
from tests.helpers.kernel_case import (
    KernelCase,
    assert_portions_add_up,
    compare,
    gradients,
    make_case,
    make_rows,
    operands,
    poisoned_memory,
    reference,
)
from tlora_megatron.ops.exactness import Exactness
from tlora_megatron.ops.lora import cuda_ops
from tlora_megatron.ops.lora.linear_ops import are_aligned
from tlora_megatron.ops.lora.torch_ops import TorchLinear, TorchOps
from tlora_megatron.ops.routing import Document, RowGroups, pack_micro_batch

CPU = torch.device("cpu")
IN_SIZE = 136


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[SimpleNamespace]]:
    """Makes `Bench`: `CudaOps` of a case with the machine in place of the GPU."""

    class Bench(SimpleNamespace):
        def __init__(self, case: KernelCase, **machine: int) -> None:
            super().__init__(case=case, machine=ItemMachine(case.factors, **machine))
            self.ops = cuda_ops.CudaOps(TorchOps())

        def __call__(
            self,
            x: torch.Tensor,
            dy: torch.Tensor,
            rows: RowGroups,
            shards: Sequence[tuple[int, int]] | None = None,
        ) -> dict[str, torch.Tensor]:
            """Every output and gradient by name; dA from the windows `shards` of x."""
            for name in ("rank_rows", "rank_sums", "gemm", "multiprocessors", "gemm_tile"):
                monkeypatch.setattr(cuda_ops, name, getattr(self.machine, name))
            case, bound = self.case, self.ops.bind(self.case.factors, rows)
            y, s = bound.forward(x, case.weight_NK, case.bias_N)
            ds = bound.backward_up(dy, s)
            dx = bound.dgrad(dy, ds, case.weight_NK)
            found: dict[str, torch.Tensor] = {}
            for begin, end in shards or [(0, len(x))]:
                bound.backward_down(x[begin:end], dy, s, ds, (begin, end))
                for name, grad in gradients(case.factors).items():
                    # Every rank has dA of its window and dB of all rows.
                    found[name] = grad + found[name] if name in found and name[1] == "A" else grad
            return {"y": y, "dx": dx, "s": s, "ds": ds, **found}

    with poisoned_memory():
        yield Bench


def make(
    name: str, dropout: tuple[float, ...] = ()
) -> tuple[KernelCase, RowGroups, torch.Tensor, torch.Tensor]:
    """A case, its rows, and their x and dy."""
    columns, ranks, lengths, padding = CASES[name]
    case = make_case(ranks, columns, IN_SIZE, dtype=torch.float64, dropout=dropout)
    rows = make_rows(lengths, padding)
    return case, rows, *operands(case, rows.ends[-1])


def check(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    compare({n: value for n, value in actual.items() if n not in ("s", "ds")}, expected, 1e-6)


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_the_definitions(name: str, run: type) -> None:
    case, rows, x, dy = make(name)
    bench = run(case)
    check(bench(x, dy, rows), reference(case, x, dy, rows))
    assert bench.machine.launches == ["rows", "gemm", "rows", "gemm", "sums"]


@pytest.mark.parametrize("cuts", [(130,), (1, 2, 451), (130, 260, 390)], ids=str)
@pytest.mark.parametrize("name", ["ragged segments", "one adapter among rows without"])
def test_dropout_scales_once_and_masks_three_times_in_windows_too(
    name: str, cuts: tuple[int, ...], run: type
) -> None:
    case, rows, x, dy = make(name, dropout=(0.3, 0.1, 0.9))
    num_rows = rows.ends[-1]
    check(run(case)(x, dy, rows), reference(case, x, dy, rows))
    shards = list(itertools.pairwise((0, *(c for c in cuts if c < num_rows), num_rows)))
    bench = run(case)
    found = bench(x, dy, rows, shards)
    check(found, reference(case, x, dy, rows))
    assert torch.equal(s_of_windows(bench, x, rows, shards), found["s"].nan_to_num(nan=0.0))


@pytest.mark.parametrize("tile", [128, 192])
@pytest.mark.parametrize("multiprocessors", [1, 200])
def test_any_tile_and_any_gpu_give_the_same(tile: int, multiprocessors: int, run: type) -> None:
    case, rows, x, dy = make("whole fused beside q")
    bench = run(case, tile=tile, multiprocessors=multiprocessors)
    check(bench(x, dy, rows), reference(case, x, dy, rows))


def s_of_windows(
    bench: Any, x: torch.Tensor, rows: RowGroups, shards: Sequence[tuple[int, int]]
) -> torch.Tensor:
    bound = bench.ops.bind(bench.case.factors, rows)
    parts = [bound.down(x[begin:end].clone(), (begin, end)) for begin, end in shards]
    return torch.stack(parts).sum(dim=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ragged segments", "one adapter", "ranks 1 to 256"])
def test_order_of_arrival_does_not_show(name: str, run: type) -> None:
    case, rows, x, dy = make(name)
    first, second = (run(case, seed=seed)(x, dy, rows) for seed in (0, 1))
    for key in first.keys() - {"s", "ds"}:
        assert torch.equal(first[key], second[key]), key


def test_a_jobs_bits_do_not_depend_on_its_neighbours(run: type) -> None:
    """The same rows at the same adapter: first among others, then behind them."""
    columns, ranks = WHOLE, [(24,), (24,), (60,)]
    case = make_case(ranks, columns, IN_SIZE, dtype=torch.float64)
    for arena in (case.factors.lora_a, case.factors.lora_b[0]):
        arena[32:64] = arena[:32]
    case.factors.scaling[1] = case.factors.scaling[0]
    x, dy = operands(case, 900)
    before, after = run(case), run(case)
    a = before(x, dy, make_rows((600, 0, 300), 0))
    b = after(x.roll(77, 0), dy.roll(77, 0), make_rows((77, 600, 223), 0))
    assert torch.equal(a["dA[0][0]"], b["dA[1][0]"])
    assert torch.equal(a["dB[0][0]"], b["dB[1][0]"])


@pytest.mark.parametrize("multiprocessors", [8, 40])
def test_how_full_a_micro_batch_is_changes_no_bit(multiprocessors: int, run: type) -> None:
    """Without a budget, runs are longer (8) or clusters smaller (40) in the fuller one."""
    case = make_case([(24,), (60,)], WHOLE, IN_SIZE, dtype=torch.float64)
    x, dy = operands(case, 2304)
    found, tiles = [], []
    for rest in (156, 1604):
        bench = run(case, multiprocessors=multiprocessors)
        own = 700 + rest
        found.append(bench(x[:own], dy[:own], make_rows((700, rest), budget=2304)))
        tiles.append(bench.machine.tile_sizes)
    assert tiles[0] == tiles[1] == [(2304, case.out_size), (2304, IN_SIZE)]
    for name in ("dA[0][0]", "dB[0][0]"):
        assert torch.equal(found[0][name], found[1][name]), name
    for name in ("y", "dx"):
        assert torch.equal(found[0][name][:700], found[1][name][:700]), name


def test_with_exactness_neither_the_gpu_nor_the_budget_decides(run: type) -> None:
    """On 8 and on 40 multiprocessors, cut for 900 rows and for 2304."""
    case = make_case([(24,), (60,)], WHOLE, IN_SIZE, dtype=torch.float64)
    x, dy = operands(case, 900)
    found, tiles = [], []
    for multiprocessors, budget in ((8, 900), (40, 2304)):
        view = pack_micro_batch(
            [Document(slot=0, length=700), Document(slot=1, length=200)],
            num_slots=2, num_tokens=900, token_budget=budget, exactness=Exactness(),
        )  # fmt: skip
        bench = run(case, multiprocessors=multiprocessors)
        found.append(bench(x, dy, view.rows))
        tiles.append(bench.machine.tile_sizes)
    assert tiles[0] == tiles[1] == [(8192, case.out_size), (8192, IN_SIZE)]
    for name in found[0].keys() - {"s", "ds"}:
        assert torch.equal(found[0][name], found[1][name]), name


@pytest.mark.parametrize("neighbour", [0.0, 0.5])
def test_with_exactness_a_neighbours_dropout_chooses_no_kernel(neighbour: float, run: type) -> None:
    """A GEMM with masks adds the rank part first: it must have them whoever is there."""
    case = make_case([(16,), (8,)], WHOLE, IN_SIZE, dtype=torch.float64, dropout=(0.0, neighbour))
    rows = replace(make_rows((60, 40), 28), exactness=Exactness())
    x, dy = operands(case, rows.ends[-1])
    bench = run(case)
    check(bench(x, dy, rows), reference(case, x, dy, rows))
    assert bench.machine.masked_gemms == [False, True]


PORTIONS = make_rows((900, 40, 0, 300), 21, budget=4000, cuts=(150, 500, 520, 1000))
"""The first slot's second portion has two runs, the others one; the last slot's come later."""


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [(), (0.3, 0.1, 0.5, 0.0)], ids=["", "dropout"])
def test_portions_add_up_as_micro_batches_one_after_another(
    dropout: tuple[float, ...], run: type
) -> None:
    ranks = [(24, 0, 8), (8, 8, 8), (16, 16, 16), (130, 4, 0)]
    case = make_case(ranks, QKV, IN_SIZE, dtype=torch.float64, dropout=dropout)
    x, dy = operands(case, PORTIONS.ends[-1])
    bench = run(case, multiprocessors=200)
    check(bench(x, dy, PORTIONS), reference(case, x, dy, PORTIONS))
    for ops in (bench.ops, TorchOps()):
        assert_portions_add_up(ops, case, x, dy, PORTIONS)
    shards = [(0, 510), (510, 1100), (1100, PORTIONS.ends[-1])]
    check(bench(x, dy, PORTIONS, shards), reference(case, x, dy, PORTIONS))


def test_rows_without_adapters_go_through_the_same_gemm(run: type) -> None:
    """A job that adapts nothing here must not notice whether another does."""
    case, *_ = make("missing all targets")
    rows = make_rows((0, 300, 0), 5)
    x, dy = operands(case, rows.ends[-1])
    bench = run(case)
    check(bench(x, dy, rows), reference(case, x, dy, rows))
    assert bench.machine.launches == ["gemm", "gemm"]


@pytest.mark.parametrize("poisoned", [0, 1, 2, 3])
def test_nan_in_one_slots_rows_stays_there(poisoned: int, run: type) -> None:
    """Slot 3 stands for rows without an adapter."""
    case, rows, x, dy = make("ragged segments")
    clean = run(case)(x, dy, rows)
    begin = (0, *rows.ends)[poisoned]
    mine = slice(begin, rows.ends[poisoned])
    x[mine], dy[mine] = torch.nan, torch.nan
    dirty = run(case)(x, dy, rows)
    others = torch.ones(len(x), dtype=torch.bool)
    others[mine] = False
    for name in ("y", "dx"):
        assert torch.equal(clean[name][others], dirty[name][others]), name
    for name in clean.keys() - {"y", "dx", "s", "ds"}:
        if name[3] != str(poisoned):
            assert torch.equal(clean[name], dirty[name]), name


def test_a_plan_keeps_no_activations(run: type) -> None:
    case, rows, x, dy = make("ragged segments")
    bench = run(case)
    bench(x, dy, rows)
    kept = weakref.ref(x), weakref.ref(dy)
    del x, dy
    assert [ref() is None for ref in kept] == [True, True]


def test_a_plan_goes_with_its_micro_batch(run: type) -> None:
    """Without help of the collector of cycles, which would leave tables and workspaces for long."""
    case, rows, x, dy = make("ragged segments")
    bench = run(case)
    gc.disable()
    try:
        bench(x, dy, rows)
        plan = weakref.ref(bench.ops.bind(case.factors, rows).plan)
        del rows
        assert plan() is None
    finally:
        gc.enable()


def test_gradients_off_16_bytes_go_to_the_fallback() -> None:
    """They lie so where another linear of the model has an odd size: a slab holds all in a row."""
    case, rows, *_ = make("one adapter")
    shifted = torch.zeros(1 + 16 * IN_SIZE)[1:].view(16, IN_SIZE)
    factors = replace(case.factors, grad_a=((shifted,),), is_aligned=are_aligned(((shifted,),)))
    ops = cuda_ops.CudaOps(TorchOps())
    found = ops.bind(factors, rows)
    assert isinstance(found, TorchLinear)
    assert (found.factors, found.rows) == (factors, rows)
    assert isinstance(ops.bind(case.factors, rows), cuda_ops.CudaLinear)
