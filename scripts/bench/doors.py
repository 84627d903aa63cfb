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

from scripts.bench.door_cases import fused, pretending, requests, streams
from scripts.bench.door_cases.notes import Notes
from scripts.bench.door_cases.serving import QUICKSTART
from scripts.bench.harness.arguments import REPO, bench_parser
from scripts.bench.harness.rows import gpu_name

Case = Callable[[Notes, Path, Any], None]


def _requests(notes: Notes, folder: Path, args: Any) -> None:
    requests.measure(notes, folder, seconds=args.seconds)


def _streams(notes: Notes, folder: Path, args: Any) -> None:
    streams.measure(notes, folder, listeners=args.listeners)


def _tenants(notes: Notes, folder: Path, args: Any) -> None:
    pretending.measure(
        notes, folder, count=args.tenants or 200, steps=args.steps, think_s=args.think
    )


def _cpu(notes: Notes, folder: Path, args: Any) -> None:
    load = fused.Load(
        name="quickstart",
        base=QUICKSTART,
        gpus=0,
        count=args.tenants or 16,
        alone=args.alone,
        together_s=args.together,
        alone_s=args.each,
        think_s=args.think,
        sequences=4,
        length=32,
    )
    fused.measure(notes, folder, load)


def _gpu(notes: Notes, folder: Path, args: Any) -> None:
    from scripts.bench.around_training.base import shapes, warm_page_cache, write_base
    from tlora_megatron.ops.kernel_build import build, built_library

    base = args.base or folder / "base"
    write_base(shapes()[args.size], base)
    warm_page_cache(base)
    build(built_library())  # once a machine, which is not what is timed here
    notes.gpu = gpu_name()
    load = fused.Load(
        name=args.size,
        base=base,
        gpus=1,
        count=args.tenants or 16,
        alone=args.alone,
        together_s=args.together,
        alone_s=args.each,
        think_s=args.think,
        hardware=args.hardware,
        must=5.0 if args.size == "8b" else None,
        sequences=args.sequences,
        length=args.length,
    )
    fused.measure(notes, folder, load)


CASES: Mapping[str, tuple[str, Case]] = {
    "requests": ("none", _requests),
    "streams": ("none", _streams),
    "tenants": ("none", _tenants),
    "cpu": ("local", _cpu),
    "gpu": ("local", _gpu),
}
"""Word of the command line -> the engine that its rows name, and what measures it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; returns the exit code."""
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
            notes = Notes(csv=args.csv, commit=args.commit, engine=engine)
            measure(notes, Path(folder).resolve(), args)
            missed += notes.missed
    for case in missed:
        print(f"missed: {case}", file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
