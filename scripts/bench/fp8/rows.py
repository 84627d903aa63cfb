"""Times what makes FP8 codes, in bytes a second beside a plain copy and the floor of reads and
writes; codes are compared with the definition first.

    python -m scripts.bench.fp8.rows --csv rows.csv
    python -m scripts.bench.fp8.rows --tiles      # other tiles of the quantiser beside the chosen

Shapes are those of Llama-3.1-8B. Each case runs as a CUDA graph over rotated buffers; times are
medians.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scripts.bench.harness.arguments import bench_parser
from scripts.bench.harness.graph_timing import Replay, time_interleaved, warm_up
from scripts.bench.harness.rows import append_rows, gpu_name, versions
from tlora_megatron.ops.frozen.norm_weight import NormWeight
from tlora_megatron.ops.frozen.parts import swiglu_vjp
from tlora_megatron.ops.frozen.rms_norm import Beside, add_rms_norm_vjp
from tlora_megatron.ops.frozen.rotary import unpack_qkv_vjp
from tlora_megatron.ops.quantised.rows import GROUP, QuantRows, encode_rows
from tlora_megatron.ops.quantised.triton_rows import RowTile, launch_encode, row_tile
from tlora_megatron.ops.quantised.weight import QuantWeight

WIDTHS = (4096, 6144, 14336, 28672)
BUFFERS = 3
"""Inputs that take turns, so that none is read from the L2 cache."""
FLOOR_BYTES_PER_S = 4.3e12
"""Bytes that an H200 reads and writes."""
CHECKED_ROWS = 64


class Case(NamedTuple):
    """Something to time."""

    name: str
    width: int
    bytes_moved: int
    calls: Sequence[Callable[[], Any]]


def _copies(num_rows: int) -> Iterator[Case]:
    sources = [torch.randn(num_rows, 4096, device="cuda").bfloat16() for _ in range(BUFFERS)]
    yield Case("copy", 4096, 4 * sources[0].numel(), [source.clone for source in sources])


def _encodes(num_rows: int, *, tiles: bool) -> Iterator[Case]:
    for width in WIDTHS:
        x = [torch.randn(num_rows, width, device="cuda").bfloat16() for _ in range(BUFFERS)]
        fold = torch.rand(width, device="cuda") + 0.1
        for name, group, given in (
            ("row", None, None),
            ("group", GROUP, None),
            ("fold", None, fold),
        ):
            chosen = row_tile(x[0])
            for tile in (chosen, *(_others(chosen) if tiles else ())):
                _check(x[0], group, given, tile)
                label = f"encode {name}" + (f" {tuple(tile)}" if tiles else "")
                calls = [
                    lambda x=x_TK, group=group, fold=given, tile=tile: launch_encode(
                        x, group, fold, tile
                    )
                    for x_TK in x
                ]
                scales = 4 * num_rows * (width // GROUP if group else 1)
                yield Case(label, width, 3 * x[0].numel() + scales, calls)


def _swiglus(num_rows: int) -> Iterator[Case]:
    """SwiGLU both ways, without codes and with them: those of the second read no more."""
    width = 14336
    generator = torch.Generator("cuda").manual_seed(1)

    def draw(columns: int) -> Tensor:
        return torch.randn(num_rows, columns, device="cuda", generator=generator).bfloat16()

    x, dy = [draw(2 * width) for _ in range(BUFFERS)], [draw(width) for _ in range(BUFFERS)]
    row, column = _scales_of(24, width), _scales_of(2 * width, 24)
    values = num_rows * width
    for name, weights, code_bytes in (("", (None, None), 0), (" + codes", (row, column), values)):
        ways = [swiglu_vjp(part, *weights) for part in x]
        forward = [lambda x=part, w=weights[0]: swiglu_vjp(x, w)[0] for part in x]
        backward = [lambda g=g, way=way[1]: way(g) for g, way in zip(dy, ways, strict=True)]
        yield Case(f"swiglu forward{name}", width, 6 * values + code_bytes, forward)
        yield Case(f"swiglu backward{name}", width, 10 * values + 2 * code_bytes, backward)


def _norms(num_rows: int) -> Iterator[Case]:
    """The norm with its residual sum, both ways, without codes and with them."""
    width, values = 4096, num_rows * 4096
    norm = NormWeight(torch.ones(width, device="cuda").bfloat16(), 1e-5)
    x, residual, dtotal, dy = (
        [torch.randn(num_rows, width, device="cuda").bfloat16() for _ in range(BUFFERS)]
        for _ in range(4)
    )
    wanted = Beside(_scales_of(24, width), _scales_of(width, 24))
    for name, beside, code_bytes in (("", None, 0), (" + codes", wanted, values)):
        ways = [add_rms_norm_vjp(*pair, norm, beside) for pair in zip(x, residual, strict=True)]
        forward = [
            lambda a=a, b=b, beside=beside: add_rms_norm_vjp(a, b, norm, beside)[:2]
            for a, b in zip(x, residual, strict=True)
        ]
        grads = zip(dtotal, dy, ways, strict=True)
        backward = [lambda a=a, b=b, way=way[2]: way(a, b) for a, b, way in grads]
        yield Case(f"norm forward{name}", width, 8 * values + code_bytes, forward)
        yield Case(f"norm backward{name}", width, 8 * values + code_bytes, backward)


def _rotations(num_rows: int) -> Iterator[Case]:
    """The way back through the rotation, without codes and with them."""
    groups, per_group, dim = 8, 4, 128
    width = groups * (per_group + 2) * dim
    angles = torch.rand(num_rows, dim // 2, device="cuda").repeat(1, 2)
    rest = angles.cos().bfloat16(), angles.sin().bfloat16(), None
    mixed = [
        torch.randn(num_rows, groups, per_group + 2, dim, device="cuda").bfloat16()
        for _ in range(BUFFERS)
    ]
    for name, column in (("", None), (" + codes", _scales_of(width, 24))):
        ways = [unpack_qkv_vjp(part, *rest, column) for part in mixed]
        calls = [lambda outs=outs, back=back: back(*outs) for outs, back in ways]
        moved = num_rows * (width * (4 if column is None else 5) + 4 * dim)
        yield Case(f"rotation backward{name}", width, moved, calls)


def _scales_of(num_rows: int, num_columns: int) -> QuantWeight:
    """A weight of which the scales are read and the codes are not."""
    codes = torch.empty(num_rows, num_columns, dtype=torch.uint8, device="cuda")
    return QuantWeight(codes, torch.rand(num_rows, device="cuda") + 0.1)


def _others(tile: RowTile) -> list[RowTile]:
    warps = {max(1, tile.num_warps // 2), tile.num_warps, min(32, tile.num_warps * 2)}
    found = {tile._replace(num_warps=w, stages=s) for w in warps for s in (1, 3)}
    return sorted(found - {tile})


def _check(x: Tensor, group: int | None, fold: Tensor | None, tile: RowTile) -> None:
    """Compares codes and scales with the definition on the CPU."""
    part = x[:CHECKED_ROWS].contiguous()
    found = QuantRows(*launch_encode(part, group, fold, tile))
    expected = encode_rows(part.cpu(), group=group, fold_K=None if fold is None else fold.cpu())
    if not torch.equal(found.codes_TK.cpu(), expected.codes_TK):
        raise SystemExit(f"codes must equal the definition's, got others with {tile}")
    if not torch.equal(found.scales.cpu(), expected.scales):
        raise SystemExit(f"scales must equal the definition's, got others with {tile}")


def _cases(num_rows: int, *, tiles: bool) -> Iterator[Case]:
    yield from _copies(num_rows)
    yield from _encodes(num_rows, tiles=tiles)
    yield from _swiglus(num_rows)
    yield from _norms(num_rows)
    yield from _rotations(num_rows)


def _measured(case: Case, num_rows: int) -> dict[str, object]:
    device = torch.device("cuda")
    for call in case.calls:
        warm_up(call, device)
    sample = time_interleaved([Replay(case.calls, device)], device)[0]
    rate = case.bytes_moved / (sample.median_us * 1e-6)
    share = rate / FLOOR_BYTES_PER_S
    print(
        f"{case.name:<34} {case.width:>6} {sample.median_us:8.1f} us"
        f" {rate / 1e9:8.0f} GB/s {share:6.1%} of the floor",
        flush=True,
    )
    return {
        "case": case.name,
        "width": case.width,
        "rows": num_rows,
        "time_us": round(sample.median_us, 2),
        "bytes": case.bytes_moved,
        "share_of_floor": round(share, 3),
        "gpu": gpu_name(),
        "versions": versions("triton"),
    }


def main() -> int:
    """Measures all cases and prints them; rows go to `--csv`."""
    parser = bench_parser(__doc__)
    parser.add_argument("--rows", type=int, default=8192, help="tokens of a micro-batch")
    parser.add_argument("--tiles", action="store_true", help="time other tiles as well")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("fp8.rows needs a GPU")
        return 1
    torch.manual_seed(0)
    rows = []
    for case in _cases(args.rows, tiles=args.tiles):
        rows.append(_measured(case, args.rows) | {"commit": args.commit})
    if args.csv is not None:
        append_rows(args.csv, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
