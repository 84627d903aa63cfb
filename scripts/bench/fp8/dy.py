"""Times dS and dB from one read of dy beside a kernel each, at the linears' shapes, in one run.

    python -m scripts.bench.fp8.dy [--csv FILE] [--shapes 8b_o,8b_qkv] [--adapters 1,4,16]

`both` ways end with dA. Floors are bytes of dy (and of x, for dA) at `--bandwidth`. A way that
gives other values than the two kernels is named and not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scripts.bench.harness.arguments import bench_parser
from scripts.bench.harness.graph_timing import Replay, time_interleaved, warm_up
from scripts.bench.harness.rows import append_rows, gpu_name
from scripts.bench.linear.fused import build_factors, row_groups
from scripts.bench.linear.shapes import MEASURED, SHAPES, adapter_mix
from scripts.bench.linear.workload import BufferSet, Workload, make_workload
from tlora_megatron.ops.lora.cuda.ops import CudaLinear, CudaOps
from tlora_megatron.ops.lora.cuda.pair_items import PairFit
from tlora_megatron.ops.lora.cuda.work_items import DOWN, UP
from tlora_megatron.ops.lora.factors import SiteFactors
from tlora_megatron.ops.lora.torch_ops import TorchOps

ROUNDS = 10
FITS = tuple(
    PairFit(most_panels=panels, rows_per_run=rows)
    for panels, rows in ((2, 512), (2, 1024), (4, 256), (4, 512), (4, 1024), (8, 1024), (8, 2048))
)


class One(NamedTuple):
    """A linear over one buffer set."""

    bound: CudaLinear
    operands: BufferSet
    s: Tensor

    def rows(self) -> Tensor:
        """dS alone."""
        return self.bound._rank_rows(self.operands.dy_TN, self.bound._site.b, masked=False)

    def pair(self, fit: PairFit) -> Tensor:
        """dS and dB."""
        return self.bound._rank_pair(self.operands.dy_TN, self.s, fit)

    def sums(self, kinds: tuple[int, ...], ds: Tensor | None = None) -> Tensor:
        """dA, dB or both."""
        ds = self.s if ds is None else ds
        x_TK, dy_TN = self.operands.x_TK, self.operands.dy_TN
        self.bound._sum(x_TK, dy_TN, self.s, ds, (0, len(x_TK)), kinds)
        return ds

    def both(self, fit: PairFit | None) -> Tensor:
        """dS, dB and dA."""
        if fit is None:
            return self.sums((DOWN, UP), self.rows())
        return self.sums((DOWN,), self.pair(fit))


def main() -> None:
    """Prints a line a shape, adapters and way, and keeps rows where a file is named."""
    parser = bench_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--shapes", default=",".join(MEASURED))
    parser.add_argument("--adapters", default="1,4,16")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes a second")
    options = parser.parse_args()
    found = []
    for name in options.shapes.split(","):
        device = torch.device("cuda")
        workload = make_workload(SHAPES[name], options.tokens, device=device, dtype=torch.bfloat16)
        for adapters in map(int, options.adapters.split(",")):
            for row in measure(workload, adapters, options.bandwidth):
                print(
                    f"{name:16} {adapters:3} {row['way']:20} {row['us']:7.1f} us  "
                    f"{row['over_floor']:.2f} of its floor",
                    flush=True,
                )
                found.append({"gpu": gpu_name(), "commit": options.commit, "shape": name, **row})
    if options.csv is not None:
        append_rows(options.csv, found)


def measure(workload: Workload, adapters: int, bandwidth: float) -> list[dict[str, Any]]:
    """Times all ways over some adapters."""
    mix = adapter_mix(workload.tokens, adapters)
    rows, factors = row_groups(mix, dropout=0.0), build_factors(workload, mix)
    linears = []
    for each, operands in zip(factors, workload.sets, strict=True):
        bound = CudaOps(TorchOps()).bind(each, rows)
        assert isinstance(bound, CudaLinear), "these sizes must suit the kernels"
        linears.append(One(bound, operands, bound.down(operands.x_TK)))
    fits = [fit for fit in FITS if is_right(linears[0], factors[0], fit)]
    ways: dict[str, tuple[Callable[[One], Tensor], float]] = {
        "rows": (One.rows, 1.0),
        "sums dB": (lambda one: one.sums((UP,)), 1.0),
        "sums dA": (lambda one: one.sums((DOWN,)), 0.0),
        "both, two kernels": (lambda one: one.both(None), 1.0),
    }
    for fit in fits:
        label = f"{fit.most_panels} x {fit.rows_per_run}"
        ways[f"pair {label}"] = (partial(_pair, fit=fit), 1.0)
        ways[f"both, {label}"] = (partial(One.both, fit=fit), 1.0)
    calls = [[partial(way, one) for one in linears] for way, _ in ways.values()]
    for some in calls:
        warm_up(lambda some=some: [call() for call in some], workload.device)  # type: ignore[misc]
    samples = time_interleaved([Replay(c, workload.device) for c in calls], workload.device, ROUNDS)
    site, found = workload.shape.site, []
    for (name, (_, reads_dy)), sample in zip(ways.items(), samples, strict=True):
        reads_x = "dA" in name or "both" in name
        columns = reads_dy * site.out_size + reads_x * site.in_size
        floor_us = 2 * workload.tokens * columns / bandwidth * 1e6
        found.append(
            {
                "tokens": workload.tokens,
                "adapters": adapters,
                "way": name,
                "us": round(sample.median_us, 1),
                "floor_us": round(floor_us, 1),
                "over_floor": round(sample.median_us / floor_us, 3),
                "spread": round(sample.spread, 4),
            }
        )
    return found


def _pair(one: One, *, fit: PairFit) -> Tensor:
    return one.pair(fit)


def is_right(one: One, factors: SiteFactors, fit: PairFit) -> bool:
    """Compares dS and dB with those of the two kernels."""
    own = _values(one, factors, lambda: one.pair(fit))
    other = _values(one, factors, lambda: one.sums((UP,), one.rows()))
    errors = [
        float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30))
        for a, b in zip(own, other, strict=True)
    ]
    right = max(errors) < 4e-3 and max(errors[1:]) < 1e-4
    if not right:
        print(f"{fit}: errors {max(errors):.1e}, dB {max(errors[1:]):.1e}: not timed", flush=True)
    return right


def _values(one: One, factors: SiteFactors, run: Callable[[], Tensor]) -> list[Tensor]:
    """dS's chunks, then every dB."""
    grads = [g for slot in factors.grad_b for g in slot if g is not None]
    torch._foreach_zero_(grads)
    ds = run()
    return [one.bound._form.chunks(ds).clone(), *(g.clone() for g in grads)]


if __name__ == "__main__":
    main()
