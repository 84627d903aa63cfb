#!/usr/bin/env python3
"""The rank-extended CUDA GEMM beside cuBLAS: is it right, and what does each tile width cost?

    python scripts/bench/gemm_times.py [--tokens 2048 8192] [--adapters 16] [--csv OUT.csv]

For the forward ([T, K] x [N, K]^T) and the dgrad ([T, N] x [N, K]) of Llama-3.1-8B's linears and
the 70B/TP4 shards, cuBLAS without adapters against this kernel with and without a rank part, for
every tile width. Times are medians over CUDA-graph replays on rotated buffers.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from result_rows import write_rows

from tlora_megatron.ops.dropout.masks import dropout_reference
from tlora_megatron.ops.lora.columns import OutputColumns
from tlora_megatron.ops.lora.cuda.calls import Arenas, Dropout, GemmTile, RankPart, gemm
from tlora_megatron.ops.lora.rank_form import RankForm
from tlora_megatron.ops.lora.tiling import RANK_CHUNK, ROW_TILE, RankLayout, TilePlan, tile_plan

SHAPES = {
    "8B_qkv": (4096, 6144),
    "8B_o": (4096, 4096),
    "8B_gate_up": (4096, 28672),
    "8B_down": (14336, 4096),
    "70Bt4_qkv": (8192, 2560),
    "70Bt4_o": (2048, 8192),
    "70Bt4_gate_up": (8192, 14336),
    "70Bt4_down": (7168, 8192),
}
RANKS = (8, 16, 32, 64)
WIDTHS = (128, 192, 256)


class Case:
    """A GEMM with a rank part of `adapters` ragged segments, `sets` sets of operands."""

    def __init__(
        self,
        tokens: int,
        depth: int,
        width: int,
        adapters: int,
        *,
        transposed: bool,
        dropout: float = 0.0,
        columns: tuple[OutputColumns, ...] = (),
        sets: int = 1,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.transposed, self.columns, self.adapters = transposed, columns, adapters
        self.targets = max(1, len(columns))

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=dtype)

        self.x = [draw(tokens, depth) for _ in range(sets)]
        shape = (width, depth) if transposed else (depth, width)
        self.weight = [draw(*shape).div_(depth**0.5) for _ in range(sets)]
        self.out = [
            torch.full((tokens, width), torch.nan, device="cuda", dtype=dtype) for _ in self.x
        ]
        self.ranks = [RANKS[i % 4] if adapters > 1 else 16 for i in range(adapters)]
        self.ends = _segments(tokens, adapters)
        layout = RankLayout(tuple((r,) * self.targets for r in self.ranks))
        self.plan = tile_plan(self.ends, layout) if adapters else None
        self.dropout = None
        if self.plan is not None:
            self._draw_rank_part(draw, layout, self.plan, width)
            if dropout:
                self.dropout = Dropout(
                    probability=torch.full((1,), dropout, device="cuda"),
                    row_keys=torch.randint(2**31 - 1, (tokens,), dtype=torch.int32, device="cuda"),
                    row_slots=torch.zeros(tokens, dtype=torch.int32, device="cuda"),
                    key=12345,
                    first_column=0,
                )

    def _draw_rank_part(
        self, draw: Callable[..., torch.Tensor], layout: RankLayout, plan: TilePlan, width: int
    ) -> None:
        self.ext = torch.zeros(
            plan.num_chunks * RANK_CHUNK, ROW_TILE, device="cuda", dtype=self.x[0].dtype
        )
        for pair in plan.pairs:
            for p, first in enumerate(pair.chunks):
                rank = layout.ranks[pair.slot][p]
                rows = slice(first * RANK_CHUNK, first * RANK_CHUNK + rank)
                tile = slice(pair.begin - pair.tile * ROW_TILE, pair.end - pair.tile * ROW_TILE)
                self.ext[rows, tile] = draw(rank, pair.end - pair.begin)
        if self.columns:
            self.factors = tuple(
                draw(n, c.size) for n, c in zip(layout.b_rows, self.columns, strict=True)
            )
            chunk_rows = plan.chunk_b
        else:
            self.factors = (draw(layout.a_rows, width),)
            chunk_rows = plan.chunk_a
        self.chunk_rows = torch.tensor(chunk_rows, dtype=torch.int32, device="cuda")
        self.tile_chunks = torch.tensor(plan.tile_chunks, dtype=torch.int32, device="cuda")

    def run(self, index: int, tile_columns: int, group: int, *, rank_part: bool = True) -> None:
        rank = None
        if rank_part and self.plan is not None:
            rank = RankPart(
                flat=self.ext,
                form=RankForm(chunk_rows=len(self.ext), num_rows=0, row_width=0),
                factors=Arenas(self.factors, self.columns),
                num_targets=self.targets,
                tile_chunks=self.tile_chunks,
                chunk_rows=self.chunk_rows,
                dropout=self.dropout,
            )
        gemm(
            self.x[index],
            self.weight[index],
            self.out[index],
            GemmTile(tile_columns, group),
            transposed=self.transposed,
            rank=rank,
        )

    def cublas(self, index: int) -> None:
        weight = self.weight[index].t() if self.transposed else self.weight[index]
        torch.mm(self.x[index], weight, out=self.out[index])

    def reference(self) -> torch.Tensor:
        """fp32 of set 0."""
        weight = self.weight[0].float()
        y = self.x[0].float() @ (weight.t() if self.transposed else weight)
        if self.plan is None:
            return y
        branch = torch.zeros_like(y)
        for tile, bounds in enumerate(self.plan.tile_chunks):
            rows = slice(tile * ROW_TILE, min((tile + 1) * ROW_TILE, y.shape[0]))
            for p in range(self.targets):
                for c in range(bounds[p], bounds[p + 1]):
                    s = self.ext[
                        c * RANK_CHUNK : (c + 1) * RANK_CHUNK, : rows.stop - rows.start
                    ].float()
                    row = int(self.chunk_rows[c])
                    factor = self.factors[p if self.columns else 0][row : row + RANK_CHUNK].float()
                    if self.columns:
                        self.columns[p].add(branch[rows], s.t() @ factor)
                    else:
                        branch[rows] += s.t() @ factor
        if self.dropout is not None:
            p_T = self.dropout.probability[self.dropout.row_slots.long()]
            branch = dropout_reference(branch, self.dropout.row_keys, p_T, self.dropout.key, 0)
        return y + branch


def _segments(tokens: int, adapters: int) -> list[int]:
    if not adapters:
        return [tokens]
    generator = torch.Generator().manual_seed(adapters)
    shares = torch.rand(adapters, generator=generator) + 0.2
    lengths = (shares / shares.sum() * tokens).long().clamp(min=1).tolist()
    lengths[-1] += tokens - sum(lengths)
    return [*itertools.accumulate(lengths), tokens]


def graph_time_us(call: Callable[[int], None], sets: int) -> float:
    """Median microseconds a call, over replays of a graph that runs it once on every set."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(sets):
            call(i)
    graph.replay()
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / sets)
    return statistics.median(times)


def check() -> None:
    """Errors against fp32: both directions, widths, ragged sizes, fused columns, dropout."""
    group = {"groups": 4, "stride": 768}
    qkv = tuple(
        OutputColumns(**group, begin=begin, width=width)
        for begin, width in ((0, 512), (512, 128), (640, 128))
    )
    cases = {
        "forward": {"transposed": True},
        "forward q/k/v": {"transposed": True, "columns": qkv},
        "forward fp16": {"transposed": True, "dtype": torch.float16},
        "dgrad": {"transposed": False},
        "dgrad dropout": {"transposed": False, "dropout": 0.1},
        "dgrad fp16": {"transposed": False, "dtype": torch.float16},
    }
    for (name, options), adapters, tokens in itertools.product(
        cases.items(), (0, 1, 13), (512, 1000)
    ):
        case = Case(tokens, 2048 if tokens == 512 else 1992, 3072, adapters, **options)  # type: ignore[arg-type]
        expected = case.reference()
        for width in WIDTHS:
            case.out[0].fill_(torch.nan)
            case.run(0, width, 8)
            error = float((case.out[0].float() - expected).norm() / expected.norm())
            flag = "" if error < 5e-3 else "   WRONG"
            if flag or width == 256:
                cell = f"{name:16} adapters {adapters:3} tokens {tokens:5} width {width}"
                print(f"{cell}: {error:.2e}{flag}")


def measure(case: Case, groups: Sequence[int]) -> dict[str, float]:
    """Times over cuBLAS's; cuBLAS again at the end, for a GPU that slows down as it warms."""
    sets = len(case.x)
    base = graph_time_us(case.cublas, sets)
    row = {"cublas_us": base}
    for columns, group, ranked in itertools.product(WIDTHS, groups, (False, True)):
        call = functools.partial(case.run, tile_columns=columns, group=group, rank_part=ranked)
        name = f"{columns}/{group}{' with ranks' if ranked else ''}"
        row[name] = graph_time_us(call, sets) / base
    row["cublas again"] = graph_time_us(case.cublas, sets) / base
    return row


def sets_of(tokens: int, depth: int, width: int) -> int:
    """Sets of operands that together exceed the L2 cache several times."""
    set_bytes = 2 * (tokens * (depth + width) + depth * width)
    return min(6, max(2, -(-(300 << 20) // set_bytes)))


def main() -> None:
    """Checks, measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--adapters", type=int, default=16, help="of the rank part (default 16)")
    parser.add_argument("--groups", type=int, nargs="+", default=[8], help="raster groups to try")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    check()
    rows = []
    directions = ("forward", "dgrad")
    for tokens, name, direction in itertools.product(
        arguments.tokens, arguments.shapes, directions
    ):
        transposed = direction == "forward"
        depth, width = SHAPES[name] if transposed else reversed(SHAPES[name])
        sets = sets_of(tokens, depth, width)
        case = Case(tokens, depth, width, arguments.adapters, transposed=transposed, sets=sets)
        row = {"tokens": tokens, "shape": name, "direction": direction}
        row |= {k: round(v, 3) for k, v in measure(case, arguments.groups).items()}
        print(row, flush=True)
        rows.append(row)
    if arguments.csv:
        write_rows(arguments.csv, rows)


if __name__ == "__main__":
    main()
