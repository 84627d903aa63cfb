"""Times the input gradient of FP8 linears at 8B shapes, beside bf16's, all in one run.

    python -m scripts.bench.fp8.dgrad [--csv FILE]

Rows of dy are quantised before the clock starts, but for `encode`, which is that alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scripts.bench.harness.arguments import bench_parser
from scripts.bench.harness.graph_timing import Replay, time_interleaved, warm_up
from scripts.bench.harness.rows import append_rows, gpu_name
from scripts.bench.linear.fused import build_factors, row_groups, with_dropout
from scripts.bench.linear.shapes import LINEARS, SHAPES, adapter_mix
from scripts.bench.linear.workload import Workload, make_workload
from tlora_megatron.ops.lora.cuda_calls import RankPart
from tlora_megatron.ops.lora.cuda_ops import CudaLinear, CudaOps
from tlora_megatron.ops.lora.torch_ops import TorchOps
from tlora_megatron.ops.quantised.cuda import fp8_dgrad
from tlora_megatron.ops.quantised.rows import QuantRows, encode_rows
from tlora_megatron.ops.quantised.weight import QuantWeight, encode_weight, input_gradient

Call = Callable[[], Tensor]
ROUNDS = 10
ADAPTERS = 4


def main() -> None:
    """Prints a line a shape and way, and keeps rows where a file is named."""
    parser = bench_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args()
    found = []
    for linear in LINEARS:
        for row in measure(f"8b_{linear}", options.tokens):
            print(
                f"{row['shape']:11} {row['way']:24} {row['us']:8.1f} us "
                f"{row['tflops']:7.0f} TFLOP/s  {row['ratio']:.3f} of bf16  "
                f"spread {row['spread']:.3f}",
                flush=True,
            )
            found.append({"gpu": gpu_name(), "commit": options.commit, **row})
    if options.csv is not None:
        append_rows(options.csv, found)


def measure(name: str, tokens: int) -> list[dict[str, Any]]:
    """Times every way to compute a linear's input gradient."""
    device = torch.device("cuda")
    workload = make_workload(SHAPES[name], tokens, device=device, dtype=torch.bfloat16)
    weights = [encode_weight(each.weight_NK) for each in workload.sets]
    rows = [
        encode_rows(each.dy_TN, fold_K=weight.fold_N)
        for each, weight in zip(workload.sets, weights, strict=True)
    ]
    print(f"{name:11} error {worst_error(rows[0], weights[0]):.1e} of a row", flush=True)
    ways = _ways(workload, weights, rows)
    for calls in ways.values():
        warm_up(lambda calls=calls: [call() for call in calls], device)  # type: ignore[misc]
    replays = [Replay(calls, device) for calls in ways.values()]
    samples = time_interleaved(replays, device, ROUNDS)
    site = workload.shape.site
    flops = 2.0 * tokens * site.in_size * site.out_size
    base_us = samples[0].median_us
    return [
        {
            "shape": name,
            "tokens": tokens,
            "way": way,
            "us": round(sample.median_us, 1),
            "tflops": round(flops / sample.median_us * 1e-6),
            "ratio": round(sample.median_us / base_us, 4),
            "spread": round(sample.spread, 4),
        }
        for way, sample in zip(ways, samples, strict=True)
    ]


def worst_error(rows: QuantRows, weight: QuantWeight) -> float:
    """The largest error of a row, of its norm, over the first and last rows."""
    dx_TK = _dgrad(rows, weight)
    some = torch.cat([torch.arange(256), torch.arange(len(dx_TK) - 77, len(dx_TK))])
    few = QuantRows(rows.codes_TK[some], rows.scales[some])
    expected = input_gradient(few, weight.codes_NK, weight.scales, torch.float64)
    difference = dx_TK[some].double() - expected
    return float((difference.norm(dim=1) / expected.norm(dim=1)).max())


def _dgrad(rows: QuantRows, weight: QuantWeight, rank: RankPart | None = None) -> Tensor:
    num_rows, size = len(rows.codes_TK), weight.shape[1]
    dx_TK = torch.empty(num_rows, size, dtype=torch.bfloat16, device=rows.codes_TK.device)
    fp8_dgrad(rows, weight, dx_TK, rank=rank)
    return dx_TK


def _ways(
    workload: Workload, weights: list[QuantWeight], rows: list[QuantRows]
) -> dict[str, list[Call]]:
    """A call for each buffer set, by way; bf16 first."""
    pairs = list(zip(rows, weights, strict=True))
    ways: dict[str, list[Call]] = {
        "bf16": [partial(torch.mm, each.dy_TN, each.weight_NK) for each in workload.sets]
    }
    ways["fp8"] = [partial(_dgrad, *pair) for pair in pairs]
    blocks = [QuantWeight(w.codes_NK, _block_scales(w)) for w in weights]
    ways["fp8 blocks"] = [partial(_dgrad, *pair) for pair in zip(rows, blocks, strict=True)]
    for p in (0.0, 0.1):
        parts = _rank_parts(workload, ADAPTERS, p)
        for name, of in (("fp8", weights), ("fp8 blocks", blocks)):
            ways[f"{name} {ADAPTERS} jobs" + (" dropout" if p else "")] = [
                partial(_dgrad, *each) for each in zip(rows, of, parts, strict=True)
            ]
    ways["encode"] = [
        partial(_encoded, each.dy_TN, weight.fold_N)
        for each, weight in zip(workload.sets, weights, strict=True)
    ]
    ways["cuBLASLt W^T kept"] = [_scaled_mm(*pair) for pair in pairs]
    return ways


def _block_scales(weight: QuantWeight) -> Tensor:
    n, k = weight.shape
    return torch.rand(-(-n // 128), -(-k // 128), device=weight.device) + 0.5


def _encoded(dy_TN: Tensor, fold_N: Tensor | None) -> Tensor:
    return encode_rows(dy_TN, fold_K=fold_N).codes_TK


def _scaled_mm(rows: QuantRows, weight: QuantWeight) -> Call:
    """cuBLASLt with fast accumulation and a second copy of W, transposed beforehand."""
    w_KN = weight.codes_NK.t().contiguous().view(torch.float8_e4m3fn)
    return partial(
        torch._scaled_mm,
        rows.codes_TK.view(torch.float8_e4m3fn),
        w_KN.t(),
        scale_a=rows.scales[:, None],
        scale_b=torch.ones(1, len(w_KN), device=weight.device),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def _rank_parts(workload: Workload, adapters: int, p: float) -> list[RankPart | None]:
    mix = adapter_mix(workload.tokens, adapters)
    rows = row_groups(mix, dropout=p)
    parts = []
    for factors, each in zip(
        with_dropout(build_factors(workload, mix), p), workload.sets, strict=True
    ):
        bound = CudaOps(TorchOps()).bind(factors, rows)
        assert isinstance(bound, CudaLinear)
        ds = bound.backward_up(each.dy_TN, bound.down(each.x_TK))
        parts.append(bound._rank_part(ds, bound._site.a, "chunk_a", bound._dgrad_dropout))
    return parts


if __name__ == "__main__":
    main()
