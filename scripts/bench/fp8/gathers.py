"""Times what sequence parallelism moves around one linear over an FP8 base, between GPUs.

    torchrun --standalone --nproc-per-node 2 -m scripts.bench.fp8.gathers --csv rows.csv

Rows of bf16 against their codes and scales; and what dy as codes would ask for beside them: s
summed and dS gathered, both of rank size. Medians, the transfers in turns; all ranks' rows are
counted in `tokens`.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from scripts.bench.harness.arguments import bench_parser
from scripts.bench.harness.clock import Marks
from scripts.bench.harness.rows import append_rows, gpu_name
from scripts.bench.harness.world import is_main, say
from tlora_megatron.parallel.collectives import all_reduce, gather_rows, gather_together

Transfer = Callable[[], object]
_REPEATS = 8
_WARM_ROUNDS = 3


def transfers(tokens: int, width: int, ranks: int, device: torch.device) -> dict[str, Transfer]:
    """The transfers by name, over the default group."""
    own = tokens // dist.get_world_size()
    x = torch.zeros(own, width, dtype=torch.bfloat16, device=device)
    codes, scales = x.to(torch.uint8), torch.ones(own, device=device)
    s, ds = (torch.zeros(rows, ranks, dtype=x.dtype, device=device) for rows in (tokens, own))
    return {
        "bf16": lambda: gather_rows(x, None).wait(),
        "codes + scales": lambda: [p.wait() for p in gather_together([codes, scales], None)],
        "sum of s": lambda: all_reduce(s, dist.group.WORLD).wait(),
        "dS": lambda: gather_rows(ds, None).wait(),
    }


def measure(timed: dict[str, Transfer], rounds: int) -> dict[str, float]:
    """Microseconds of each transfer."""
    found: dict[str, list[float]] = {name: [] for name in timed}
    for index in range(rounds + _WARM_ROUNDS):
        for name, transfer in timed.items():
            dist.barrier()
            marks = Marks(on_gpu=torch.cuda.is_available())
            marks.set()
            for _ in range(_REPEATS):
                transfer()
            marks.set()
            if index >= _WARM_ROUNDS:
                found[name].append(marks.seconds()[0] / _REPEATS * 1e6)
    return {name: statistics.median(times) for name, times in found.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints rows."""
    parser = bench_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=128, help="of all adapters in a row of s")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args(argv)
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if on_gpu else None
    if device is not None:
        torch.cuda.set_device(device)
    times = measure(
        transfers(args.tokens, args.width, args.ranks, device or torch.device("cpu")), args.rounds
    )
    for name, spent_us in times.items():
        say(f"{name:16} {spent_us:8.1f} us")
        if args.csv and is_main():
            row = {"gpu": gpu_name(), "commit": args.commit, "gpus": dist.get_world_size()}
            row |= {"tokens": args.tokens, "width": args.width, "transfer": name}
            append_rows(args.csv, [row | {"us": round(spent_us, 1)}])
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
