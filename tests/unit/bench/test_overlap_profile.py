"""Where a recorded step's time goes: synthetic events with sums done by hand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.bench_modules import bench_modules

GEMM, ROWS = "void lora_gemm<256>(Problem)", "rank_rows(Problem)"


@pytest.fixture(scope="module")
def modules() -> Iterator[SimpleNamespace]:
    with bench_modules() as loader:
        yield loader


@pytest.fixture(scope="module")
def tool(modules: SimpleNamespace) -> Any:
    return modules.load("overlap_profile")


@pytest.fixture(scope="module")
def shown(modules: SimpleNamespace) -> Any:
    return modules.load("overlap_table")


def step(tool: SimpleNamespace) -> list[Any]:
    """Main runs 0:100, 110:200 and 230:300; beside it a sum and a copy, which main waits for."""
    event = tool.Event
    return [
        event(GEMM, 7, 0.0, 100.0, -50.0),
        event(ROWS, 7, 110.0, 150.0, -20.0),  # 10 us that nothing explains
        event(GEMM, 7, 150.5, 200.0, 10.0),
        event("Memcpy DtoD (Device -> Device)", 20, 190.0, 210.0, 20.0),
        event("sum_slices(SumProblem)", 20, 180.0, 190.0, 15.0),
        event("sum_slices(SumProblem)", 20, 210.0, 225.0, 15.0),
        event(GEMM, 7, 230.0, 300.0, 205.0),  # the host is late
    ]


def test_main_s_idle_time_and_what_ran_beside_it(tool: Any) -> None:
    found = tool.analyse(step(tool))
    assert found.span_us == 300.0
    assert found.main_busy_us == 259.5
    assert found.main_idle_us == 40.5
    assert found.short_gaps_us == 0.5
    assert found.host_gaps_us == 30.0
    assert found.beside_us == 10.0, "copies take no multiprocessors"
    kernels = {kind: dataclasses.astuple(k) for kind, k in found.kernels.items()}
    assert kernels == {
        "GEMM": (3, 219.5, 219.5), "s, dS": (1, 40.0, 40.0),
        "copies": (1, 20.0, 0.0), "reduction sum": (2, 25.0, 0.0),
    }  # fmt: skip
    late, unexplained = found.gaps
    assert (late.before, late.after, late.length_us, late.is_host) == (GEMM, GEMM, 30.0, True)
    assert late.beside_us == {"copies": 10.0, "reduction sum": 15.0}
    assert (unexplained.length_us, unexplained.is_host) == (10.0, False)
    assert unexplained.beside_us == {}


def test_a_kernel_that_begins_before_the_last_one_ends_leaves_no_gap(tool: Any) -> None:
    event = tool.Event
    events = [event(GEMM, 7, *span, 0.0) for span in ((0, 50), (40, 45), (48, 90), (91.5, 100))]
    found = tool.analyse(events)
    assert found.main_busy_us == 98.5
    assert [g.length_us for g in found.gaps] == [1.5]


def test_exclusive_times_and_idle_time_make_up_a_step(tool: Any) -> None:
    """Kernels that begin early add what they take after the last one, or nothing."""
    event = tool.Event
    events = [
        event(GEMM, 7, 0.0, 50.0, 0.0),
        event("flash_fwd", 7, 40.0, 45.0, 0.0),
        event(ROWS, 7, 48.0, 90.0, 0.0),
        event("flash_fwd", 7, 92.0, 100.0, 0.0),
        event("ncclDevKernel", 20, 60.0, 110.0, 0.0),
    ]
    found = tool.analyse(events)
    exclusive = {kind: k.exclusive_us for kind, k in found.kernels.items()}
    assert exclusive == {"GEMM": 50.0, "attention": 8.0, "s, dS": 40.0, "NCCL": 0.0}
    assert found.kernels["attention"].total_us == 13.0
    assert sum(exclusive.values()) == found.main_busy_us
    assert found.main_busy_us + found.main_idle_us == found.span_us == 110.0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (GEMM, "GEMM"),
        ("nvjet_sm90_tst_256x128", "GEMM"),
        ("_backward_up_kernel", "s, dS"),
        ("_backward_down_kernel", "dA, dB"),
        ("void pytorch_flash::flash_fwd_kernel<Traits<cutlass::bfloat16_t>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90", "attention"),
        ("ncclDevKernel_AllReduce_Sum_bf16", "NCCL"),
        ("two_shot_all_reduce_kernel", "reduction sum"),
        ("Memset (Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<8>", "norm, elementwise"),
        ("_backward_kernel", "norm, elementwise"),
        ("what", "other"),
    ],
)
def test_categories(tool: Any, name: str, expected: str) -> None:
    assert tool.category(name) == expected


def test_kernels_that_were_held_up_stand_out_of_their_like(tool: Any) -> None:
    """Each place takes its own time, the same in all layers and nano-batches, but one kernel."""
    layers, parts = 3, 2
    usual = [1.0, 0.5, 4.0, 2.0]
    halves = [usual[:2], usual[2:]] * layers + [usual[:1:-1], usual[1::-1]] * layers
    lengths = [length for half in halves for _ in range(parts) for length in half]
    events = [tool.Event(GEMM, 7, 0.0, length, 0.0) for length in lengths]
    assert tool.late_kernels(events, parts, layers, "lora_gemm") == []
    held = 4 * parts * layers + 1  # behind "down" of the first nano-batch, on the way back
    assert lengths[held] == 4.0
    events[held] = events[held]._replace(end=7.0)
    assert tool.late_kernels(events, parts, layers, "lora_gemm") == [
        ("lora_gemm back gate_up", 7.0, 4.0)
    ]
    assert tool.late_kernels(events[1:], parts, layers, "lora_gemm") == []


def test_ratios_match_each_linear_s_kernels_over_nano_batches(tool: Any) -> None:
    """Unsplit kernel n of a step takes n + 1; nano-batch i of it 60 % or 50 % of that."""
    event, layers, parts = tool.Event, 2, 2
    count = 2 * 4 * layers
    whole = [event(GEMM, 7, 0.0, n + 1.0, 0.0) for n in range(count)]
    split = [
        event(GEMM, 7, 0.0, (n + 1.0) * (0.6, 0.5)[part], 0.0)
        for half in range(count // 2)
        for part in range(parts)
        for n in (2 * half, 2 * half + 1)
    ]
    ratios = tool.matched_ratios(whole, split, parts, layers, "lora_gemm")
    assert ratios == {
        f"lora_gemm {way} {place}": pytest.approx(1.1)
        for way in ("forward", "back")
        for place in ("qkv", "o", "gate_up", "down")
    }
    slower = [e._replace(end=e.end * 2) if i in (1, 3) else e for i, e in enumerate(split)]
    ratios = tool.matched_ratios(whole, slower, parts, layers, "lora_gemm")
    # Of o's kernels, unsplit 2 and 6 long, those of the first layer take twice as long.
    assert ratios.pop("lora_gemm forward o") == pytest.approx(1.1 * (2 * 2 + 6) / (2 + 6))
    assert list(ratios.values()) == pytest.approx([1.1] * 7)
    assert tool.matched_ratios(whole, split[1:], parts, layers, "lora_gemm") == {}


def test_backward_s_kernels_alone_go_back(tool: Any) -> None:
    event = tool.Event
    whole = [event("rank_sums", 7, 0.0, 1.0, 0.0)] * 4
    split = [event("rank_sums", 7, 0.0, t, 0.0) for t in (1, 0.5, 1, 0.5, 0.5, 0.5, 0.5, 0.5)]
    ratios = tool.matched_ratios(whole, split, 2, 1, "rank_sums")
    assert ratios == {
        "rank_sums back down": 2.0, "rank_sums back gate_up": 1.0,
        "rank_sums back o": 1.0, "rank_sums back qkv": 1.0,
    }  # fmt: skip


def test_events_of_a_trace_are_in_order_of_launches_and_the_last_step_counts(tool: Any) -> None:
    launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 2.0}
    kernel = {"cat": "kernel", "name": GEMM, "dur": 5.0}
    trace = {
        "traceEvents": [
            {"ph": "M", "name": "process_name"},
            {**kernel, "ts": 40.0, "args": {"stream": 7, "correlation": 2}},
            {**kernel, "ts": 30.0, "args": {"stream": 9, "correlation": 1}},
            {**launch, "ts": 1.0, "args": {"correlation": 1}},
            {**launch, "ts": 5.0, "args": {"correlation": 2}},
        ]
    }
    events = tool.events_of(json.loads(json.dumps(trace)))
    assert [(e.stream, e.begin, e.end, e.launched) for e in events] == [
        (9, 30.0, 35.0, 3.0), (7, 40.0, 45.0, 7.0),
    ]  # fmt: skip
    assert tool.last_step(events, 2) == events[1:]


def test_the_table_and_the_json_name_every_variant(tool: Any, shown: Any) -> None:
    whole = tool.analyse(step(tool))
    profiles = {"none skipped 1": whole, "nccl 2": whole}
    lines = shown.table(profiles, {"nccl 2": {"lora_gemm back o": 1.25}})
    by_kind = {line[:20].strip(): line[20:].split() for line in lines}
    assert by_kind["GEMM"] == ["3x", "220", "220", "1.000"] * 2
    assert by_kind["reduction sum"] == ["2x", "25", "0"] * 2, "no ratio to nothing"
    assert by_kind["idle"] == ["40", "1.000"] * 2
    assert len({len(line) for line in lines if line[:20].strip() in ("us", "GEMM", "idle")}) == 1
    assert "nccl 2: gaps GEMM -> GEMM (host): 1x 30 us" in lines
    assert "nccl 2 / none skipped 1: lora_gemm back o 1.250" in lines
    written = json.loads(json.dumps(shown.as_json(profiles, {})))
    assert written["nccl 2"]["main_busy_us"] == 259.5
    assert written["nccl 2"]["kernels"]["GEMM"]["exclusive_us"] == 219.5
    assert written["nccl 2"]["gaps"][0]["is_host"]
