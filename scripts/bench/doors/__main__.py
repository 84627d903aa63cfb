"""Times a service over HTTP: requests, streams, and many clients of the `tinker` SDK.

    python -m scripts.bench.doors requests streams --csv scripts/bench/results/doors.csv
    python -m scripts.bench.doors tenants                       # 200 on a gang that pretends
    python -m scripts.bench.doors cpu                           # 16 on the quickstart's base
    python -m scripts.bench.doors gpu --csv rows.csv            # 16 on one GPU, 8B shapes

`requests`: 100 submits and 20 lists a second with 10,000 jobs stored. `streams`: from an event in
the store until 1,000 listeners have heard of it. `tenants`: clients of the unmodified SDK, each
with a step and then a time to think, on a gang that only pretends. `cpu` and `gpu`: the same on
`tlora serve --http`, all together and then one after another, thinking included. Each service is a
process of its own with SQLite in a temporary folder of `runs`, for /tmp may be
memory. The load averages before and after are rows too. Returns 1 if a figure that must hold does
not.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.doors import fused
from scripts.bench.doors.requests import measure_requests, measure_streams
from scripts.bench.doors.serving import BASE, QUICKSTART
from scripts.bench.doors.tenants import Plan
from scripts.bench.harness.arguments import REPO, bench_parser
from scripts.bench.harness.rows import Figures, gpu_name

Case = Callable[[Figures, Path, Any], None]


def _plan(args: Any, sequences: int, length: int, steps: int = 0) -> Plan:
    return Plan(base=BASE, think_s=args.think, sequences=sequences, length=length, steps=steps)


def _tenants(notes: Figures, folder: Path, args: Any) -> None:
    plan = _plan(args, 4, 64, args.steps)
    fused.measure_pretended(notes, folder, plan, count=args.tenants or 200)


def _fused(args: Any, **more: Any) -> fused.Load:
    times = {"together_s": args.together, "alone_s": args.each}
    return fused.Load(count=args.tenants or 16, alone=args.alone, **times, **more)


def _cpu(notes: Figures, folder: Path, args: Any) -> None:
    plan = _plan(args, 4, 32)
    load = _fused(args, name="quickstart", base=QUICKSTART, gpus=0, plan=plan)
    fused.measure_fused(notes, folder, load)


def _gpu(notes: Figures, folder: Path, args: Any) -> None:
    from scripts.bench.around_training.base import base_in
    from tlora_megatron.ops.kernel_build import build, built_library

    base = args.base or folder / "base"
    base_in(base, args.size, "bfloat16")
    build(built_library())  # once a machine, which is not what is timed here
    notes.gpu = gpu_name()
    must = 5.0 if args.size == "8b" else None
    plan = _plan(args, args.sequences, args.length)
    about = {"name": args.size, "base": base, "hardware": args.hardware}
    fused.measure_fused(notes, folder, _fused(args, **about, gpus=1, must=must, plan=plan))


CASES: Mapping[str, tuple[str, Case]] = {
    "requests": ("none", lambda n, folder, args: measure_requests(n, folder, seconds=args.seconds)),
    "streams": ("none", lambda n, f, args: measure_streams(n, f, listeners=args.listeners)),
    "tenants": ("none", _tenants),
    "cpu": ("local", _cpu),
    "gpu": ("local", _gpu),
}
"""Word of the command line -> the engine that its rows name, and what measures it."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("cases", nargs="+", choices=list(CASES))
    parser.add_argument("--seconds", type=float, default=20.0, help="of requests")
    parser.add_argument("--listeners", type=int, default=1000)
    parser.add_argument("--tenants", type=int, help="clients of tinker")
    parser.add_argument("--think", type=float, default=1.0, help="mean seconds between two steps")
    parser.add_argument("--steps", type=int, default=5, help="of each tenant, where they pretend")
    parser.add_argument("--together", type=float, default=45.0, help="seconds of all tenants")
    parser.add_argument("--each", type=float, default=12.0, help="seconds of a tenant alone")
    parser.add_argument("--alone", type=int, default=4, help="tenants that are measured alone")
    parser.add_argument("--size", choices=["8b", "six layers", "toy"], default="8b")
    parser.add_argument("--sequences", type=int, default=8, help="of a step, on a GPU")
    parser.add_argument("--length", type=int, default=256, help="tokens of each, on a GPU")
    parser.add_argument("--base", type=Path, help="folder that keeps the base (default: none)")
    parser.add_argument("--hardware", help="profile for the planner, where the GPU's is not found")
    parser.add_argument("--scratch", type=Path, default=REPO / "runs", help="folder for services")
    args = parser.parse_args(argv)
    args.scratch.mkdir(parents=True, exist_ok=True)
    missed = []
    with tempfile.TemporaryDirectory(dir=args.scratch, ignore_cleanup_errors=True) as folder:
        for case in args.cases:
            engine, measure = CASES[case]
            notes = Figures(csv=args.csv, commit=args.commit, engine=engine)
            measure(notes, Path(folder).resolve(), args)
            missed += notes.missed
    for case in missed:
        print(f"missed: {case}", file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
