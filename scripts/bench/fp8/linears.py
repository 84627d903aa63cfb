"""Times one linear with an FP8 base, both directions, beside bf16 and the library's FP8 GEMM.

    python -m scripts.bench.fp8.linears --csv scripts/bench/results/fp8_linears.csv

Every variant of a shape runs in turn as a CUDA graph over rotated operands, so that all see the
same clock and none finds its operands in L2; times are medians. `bf16` is cuBLAS; `library` is
torch._scaled_mm with scales of rows and fast accumulation, its transposed weight made beforehand.
`gemm` is ours without adapters, by width of tile, and `blocks` with scales of blocks; `xN` has N
adapters of rank 16 in it, from an s that is there. `linear xN` is all that training runs: casts, s,
GEMM; then casts, dS, GEMM, dA and dB. Ours is held against the definition first.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.nn.functional as F

from scripts.bench.harness.arguments import bench_parser
from scripts.bench.harness.graph_timing import Replay, time_interleaved, warm_up
from scripts.bench.harness.rows import append_rows, gpu_name
from scripts.bench.linear.fused import build_factors, row_groups
from scripts.bench.linear.workload import (
    MEASURED,
    SHAPES,
    AdapterMix,
    Workload,
    make_workload,
    segment_lengths,
)
from tlora_megatron.ops.lora.cuda_calls import GemmTile
from tlora_megatron.ops.lora.cuda_ops import CudaLinear
from tlora_megatron.ops.lora.kernel_choice import choose_ops
from tlora_megatron.ops.quantised import cuda
from tlora_megatron.ops.quantised.rows import GROUP, QuantRows, encode_rows
from tlora_megatron.ops.quantised.weight import (
    QuantWeight,
    encode_weight,
    forward_product,
    input_gradient,
)

TOKENS = 8192
RANK = 16
MOST = 3e-3
"""Error of a checked row over its norm."""
CHECKED_ROWS = 256
WIDTHS = (256, 192, 128)
"""Widths of tiles."""
PEAK_FLOPS, BANDWIDTH = 1979e12, 4.3e12
"""FP8 operations, dense, and bytes a second that streaming kernels reach, on an H200."""
Call = Callable[[int], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One thing that is timed, on the operands of a buffer set."""

    name: str
    direction: str
    """forward, backward or both."""
    call: Call


class Quantised:
    """The operands of a workload in FP8."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.weights = tuple(encode_weight(s.weight_NK) for s in workload.sets)
        self.x = tuple(encode_rows(s.x_TK) for s in workload.sets)
        pairs = zip(workload.sets, self.weights, strict=True)
        self.dy = tuple(encode_rows(s.dy_TN, fold_K=w.fold_N) for s, w in pairs)

    @cached_property
    def copies_KN(self) -> tuple[torch.Tensor, ...]:
        """Transposed codes, which the library's backward reads."""
        return tuple(w.codes_NK.t().contiguous() for w in self.weights)

    def product(self, width: int, index: int) -> torch.Tensor:
        """Ours, without adapters."""
        return self._gemm(self.x[index], self.weights[index], GemmTile(width))

    @cached_property
    def grouped_x(self) -> tuple[QuantRows, ...]:
        """Inputs for scales of blocks."""
        return tuple(encode_rows(s.x_TK, group=GROUP) for s in self.workload.sets)

    @cached_property
    def scales_of_blocks(self) -> torch.Tensor:
        """Those of every weight: all 1."""
        codes = self.weights[0].codes_NK
        return torch.ones([-(-size // GROUP) for size in codes.shape], device=codes.device)

    def product_of_blocks(self, width: int, index: int) -> torch.Tensor:
        """Ours, without adapters, with scales of blocks."""
        blocks = QuantWeight(self.weights[index].codes_NK, self.scales_of_blocks)
        return self._gemm(self.grouped_x[index], blocks, GemmTile(width))

    def gradient(self, index: int) -> torch.Tensor:
        """Ours, without adapters."""
        weight = self.weights[index]
        out = torch.empty(TOKENS, weight.shape[1], dtype=torch.bfloat16, device="cuda")
        cuda.fp8_dgrad(self.dy[index], weight, out)
        return out

    def product_of_torch(self, index: int) -> torch.Tensor:
        """torch._scaled_mm."""
        weight = self.weights[index]
        return _scaled_mm(self.x[index], weight.codes_NK, weight.scales)

    def gradient_of_torch(self, index: int) -> torch.Tensor:
        """torch._scaled_mm."""
        copy_KN = self.copies_KN[index]
        return _scaled_mm(self.dy[index], copy_KN, torch.ones(len(copy_KN), device=copy_KN.device))

    def _gemm(self, rows: QuantRows, weight: QuantWeight, tile: GemmTile) -> torch.Tensor:
        out = torch.empty(TOKENS, weight.num_columns, dtype=torch.bfloat16, device="cuda")
        cuda.fp8_gemm(rows, weight, out, tile)
        return out


def _scaled_mm(rows: QuantRows, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    kind = torch.float8_e4m3fn
    product: torch.Tensor = torch._scaled_mm(
        rows.codes_TK.view(kind),
        codes.view(kind).t(),
        scale_a=rows.scales[:, None],
        scale_b=scales[None],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return product


def base_variants(q: Quantised) -> Iterator[Variant]:
    """Yields what computes without adapters, and what that needs."""
    sets, weights = q.workload.sets, q.weights

    def forward(name: str, call: Call) -> Variant:
        return Variant(name=name, direction="forward", call=call)

    def backward(name: str, call: Call) -> Variant:
        return Variant(name=name, direction="backward", call=call)

    yield forward("bf16", lambda i: F.linear(sets[i].x_TK, sets[i].weight_NK))
    yield backward("bf16", lambda i: torch.mm(sets[i].dy_TN, sets[i].weight_NK))
    yield forward("library", q.product_of_torch)
    yield backward("library", q.gradient_of_torch)
    yield forward("cast", lambda i: encode_rows(sets[i].x_TK).codes_TK)
    yield backward("cast", lambda i: encode_rows(sets[i].dy_TN, fold_K=weights[i].fold_N).codes_TK)
    yield backward("gemm", q.gradient)
    for width in WIDTHS:
        yield forward(f"gemm {width}", partial(q.product, width))
    for width in WIDTHS[::2]:
        yield forward(f"blocks {width}", partial(q.product_of_blocks, width))


class Adapted:
    """A workload's linear with equal adapters of one rank."""

    def __init__(self, q: Quantised, num_adapters: int) -> None:
        self._q = q
        lengths = segment_lengths(TOKENS, num_adapters)
        ones = (1.0,) * num_adapters
        mix = AdapterMix(ranks=(RANK,) * num_adapters, scalings=ones, lengths=lengths)
        rows = row_groups(mix, dropout=0.0)
        ops = choose_ops(q.workload.device, torch.bfloat16)
        self._bound = [ops.bind(f, rows) for f in build_factors(q.workload, mix)]
        sets = q.workload.sets
        self._s = [b.down(s.x_TK) for b, s in zip(self._bound, sets, strict=True)]
        pairs = zip(self._bound, sets, self._s, strict=True)
        self._ds = [b.backward_up(s.dy_TN, own) for b, s, own in pairs]

    def product(self, tile: GemmTile | None, index: int) -> torch.Tensor:
        """The GEMM alone, of codes and an s that are there."""
        bound, weight = self._bound[index], self._q.weights[index]
        assert isinstance(bound, CudaLinear), "this bench is for Hopper GPUs"
        out = torch.empty(TOKENS, weight.num_columns, dtype=torch.bfloat16, device="cuda")
        cuda.fp8_gemm(
            self._q.x[index],
            weight,
            out,
            tile or cuda.tile_of(out, weight),
            rank=bound._rank_part(self._s[index], bound._site.b, "chunk_b", None),
        )
        return out

    def gradient(self, index: int) -> torch.Tensor:
        """The GEMM alone, of codes and a dS that are there."""
        bound, weight = self._bound[index], self._q.weights[index]
        assert isinstance(bound, CudaLinear), "this bench is for Hopper GPUs"
        out = torch.empty(TOKENS, weight.shape[1], dtype=torch.bfloat16, device="cuda")
        rank = bound._rank_part(self._ds[index], bound._site.a, "chunk_a", None)
        cuda.fp8_dgrad(self._q.dy[index], weight, out, rank=rank)
        return out

    def linear(self, index: int) -> torch.Tensor:
        """All that training runs, forward and backward."""
        bound, operands = self._bound[index], self._q.workload.sets[index]
        weight, dy_TN = self._q.weights[index], operands.dy_TN
        y_TN, s = bound.forward(operands.x_TK, weight, None)
        ds = bound.backward_up(dy_TN, s)
        self.dx_TK = bound.product_dgrad(dy_TN, ds, weight)
        bound.backward_down(operands.x_TK, dy_TN, s, ds, (0, TOKENS))
        return y_TN


def adapted_variants(q: Quantised, num_adapters: int) -> Iterator[Variant]:
    """The GEMMs with adapters, and whole linears."""
    adapted, name = Adapted(q, num_adapters), f"x{num_adapters}"
    chosen = partial(adapted.product, None)
    yield Variant(name=f"gemm {name}", direction="forward", call=chosen)
    for width in WIDTHS:
        call = partial(adapted.product, GemmTile(width))
        yield Variant(name=f"gemm {width} {name}", direction="forward", call=call)
    yield Variant(name=f"gemm {name}", direction="backward", call=adapted.gradient)
    yield Variant(name=f"linear {name}", direction="both", call=adapted.linear)


def worst_error(q: Quantised, variant: Variant, result: torch.Tensor) -> float | None:
    """Error over the norm, of some rows of set 0; None for what the definition does not say."""
    if not variant.name.startswith(("gemm", "library")) or " x" in variant.name:
        return None
    weight, forward = q.weights[0], variant.direction == "forward"
    rows, product = (q.x[0], forward_product) if forward else (q.dy[0], input_gradient)
    some = QuantRows(rows.codes_TK[-CHECKED_ROWS:], rows.scales[-CHECKED_ROWS:])
    expected = product(some, weight.codes_NK, weight.scales, torch.bfloat16)
    return float((result[-CHECKED_ROWS:] - expected).norm() / expected.norm())


def measure(shape: str, adapters: Sequence[int], rounds: int) -> list[dict[str, object]]:
    """Rows of one shape."""
    device = torch.device("cuda")
    workload = make_workload(SHAPES[shape], TOKENS, device=device, dtype=torch.bfloat16)
    q = Quantised(workload)
    variants = list(base_variants(q))
    for count in adapters:
        variants += adapted_variants(q, count)
    replays, kept = [], []
    for variant in variants:
        calls = [partial(variant.call, i) for i in range(len(workload.sets))]
        try:
            warm_up(lambda calls=calls: [call() for call in calls], device)  # type: ignore[misc]
            replay = Replay(calls, device)
            error = worst_error(q, variant, replay.first_output())
        except RuntimeError as problem:
            print(f"{shape} {variant.direction} {variant.name}: {problem}", flush=True)
            continue
        if error is not None and not error < MOST:
            print(f"{shape} {variant.direction} {variant.name}: wrong, error {error:.1e}")
            continue
        replays.append(replay)
        kept.append((variant, error))
    samples = time_interleaved(replays, device, rounds)
    site = workload.shape.site
    flops = 2 * TOKENS * site.in_size * site.out_size
    return [
        {
            "shape": shape,
            "direction": variant.direction,
            "variant": variant.name,
            "us": round(sample.median_us, 1),
            "tflops": round(flops * (1 + (variant.direction == "both")) / sample.median_us / 1e6),
            "error": "" if error is None else f"{error:.1e}",
        }
        for (variant, error), sample in zip(kept, samples, strict=True)
    ]


def floor_line(shape: str) -> str:
    """Times that no kernel can beat: products at the peak, bytes at the bandwidth."""
    site = SHAPES[shape].site
    k, n = site.in_size, site.out_size
    flops_us = 2 * TOKENS * k * n / PEAK_FLOPS * 1e6
    forward, backward = (
        (TOKENS * a + 2 * TOKENS * b + k * n) / BANDWIDTH * 1e6 for a, b in ((k, n), (n, k))
    )
    casts = 3 * TOKENS * (k + n) / BANDWIDTH * 1e6
    return (
        f"{shape}: K {k}, N {n}; floors: products {flops_us:.0f} us a direction, bytes "
        f"{forward:.0f} and {backward:.0f}, casts {casts:.0f}, transpose "
        f"{2 * k * n / BANDWIDTH * 1e6:.0f}"
    )


def table(rows: Sequence[dict[str, object]]) -> str:
    """A line a variant, a column a shape: microseconds, and the share of bf16's time."""
    times = {(r["shape"], r["direction"], r["variant"]): float(str(r["us"])) for r in rows}
    shapes = list(dict.fromkeys(str(r["shape"]) for r in rows))
    lines = list(dict.fromkeys((str(r["direction"]), str(r["variant"])) for r in rows))
    text = [f"{'':31}" + "".join(f"{s.replace('70b_tp4', '70b'):>16}" for s in shapes)]
    for direction, variant in sorted(lines, key=lambda line: line[0] != "forward"):
        cells = ""
        for shape in shapes:
            us = times.get((shape, direction, variant))
            directions = ("forward", "backward") if direction == "both" else (direction,)
            bf16 = sum(times.get((shape, d, "bf16"), float("nan")) for d in directions)
            cells += f"{'-':>16}" if us is None else f"{us:>9.0f} {us / bf16:6.3f}"
        text.append(f"{direction:9} {variant:21}" + cells)
    return "\n".join(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every shape, prints one table."""
    args = arguments(argv)
    rows: list[dict[str, object]] = []
    begin_s = time.monotonic()
    for shape in args.shapes:
        if time.monotonic() - begin_s > args.budget_s:
            print(f"{shape}: no time left")
            continue
        print(floor_line(shape), flush=True)
        rows += measure(shape, args.adapters, args.rounds)
        gc.collect()
        torch.cuda.empty_cache()
    print(table(rows))
    if args.csv is not None:
        named = {"gpu": gpu_name(), "commit": args.commit, "tokens": TOKENS}
        append_rows(args.csv, [named | row for row in rows])
    return 0


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = bench_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=MEASURED)
    parser.add_argument("--adapters", nargs="+", type=int, default=(1, 4, 16))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--budget-s", type=float, default=120.0, help="start no shape after this")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
