"""Times iterations of an unmodified `pretrain_gpt.py` with `--tlora-config` beside our own trainer.

    python -m scripts.bench.flag_speed --megatron-lm CHECKOUT --impl transformer_engine --tp 2
    python -m scripts.bench.flag_speed --megatron-lm CHECKOUT --model toy --tokens 256   # on a CPU

In one life of the script for each implementation the modes take turns, block by block:

- `flag`: iterations of the trainer, all between two `train_step`s; `flag_modules`: the base by
  Megatron's modules (`TLORA_FLAG_COMPUTE`) instead of our kernels.
- `own`: rounds of our own trainer on a second base of the same shape, the same jobs and data. With
  `--precision fp8` it is quantised as `base_model.quantization: fp8` has it.
- `floor`: forward and input gradients of Megatron's modules without any adapter, over the whole
  micro-batches that the trainer ran.
- `stock_peft`: one adapter of rank 16 trained on those micro-batches by a checkout of
  Megatron-Bridge (`--bridge`), as its recipe for Llama 3.1 8B does. `stock_fused_loss` adds
  Transformer Engine's fused cross-entropy, `stock_op_fuser` its fused operations; `stock_in_turn`
  has each job step on its own rows. `--jobs one` has the flag train that adapter, and compares.

Eight jobs of ranks 4 to 64 on real texts fill every micro-batch; weights are random. `--kernels
FILE` writes what each mode launches in one iteration.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch

from scripts.bench.flag_speed.cases import (
    IMPLS,
    JOBS,
    MODELS,
    PRECISIONS,
    STOCK,
    USERBUFFERS,
    Case,
    Place,
    Row,
    show,
)
from scripts.bench.harness.arguments import add_checkout, bench_parser, check_checkout
from scripts.bench.harness.processes import live
from scripts.bench.harness.rows import append_rows

_FIELDS = {field.name for field in fields(Case)}
_BESIDE = ("flag_modules", "own", "floor")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a life of the script failed."""
    options = arguments(argv)
    rows: list[Row] = []
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        place = Place(
            checkout=options.megatron_lm.resolve(),
            work=Path(scratch),
            on_cpu=not torch.cuda.is_available(),
        )
        for impl in options.impl:
            asked = {name: value for name, value in vars(options).items() if name in _FIELDS}
            case = Case(**asked | {"impl": impl})
            found = run(case, place, options.timeout)
            failed += [] if found else [impl]
            rows += found
            if options.csv:
                append_rows(options.csv, found)
    for row in rows:
        print(show(row, rows))
    return 1 if failed else 0


def run(case: Case, place: Place, timeout_s: float) -> list[Row]:
    """One life of the script; no rows if it failed."""
    rows_file, log = place.prepare(case)
    env = place.environment(case, rows_file)
    code, seconds, output = live(place.command(case), env, log, timeout_s)
    print(f"{case.impl} {case.precision}: {seconds:.0f} s, exit {code}")
    for line in output.splitlines():
        if any(words in line for words in ("base: ", "by Megatron's modules", "stock: ")):
            print(f"  {line.strip()}")
    if code != 0 or not rows_file.is_file():
        print(output[-6000:])
        return []
    return json.loads(rows_file.read_text())


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; ends with a usage error where it cannot be run."""
    parser = bench_parser(__doc__)
    add_checkout(parser)
    add = parser.add_argument
    add("--impl", nargs="+", choices=list(IMPLS), help="all that are installed")
    add(
        "--precision",
        choices=list(PRECISIONS),
        default="bf16",
        help="on a CPU fp32, and with fp8 our own trainer's base alone is quantised",
    )
    add(
        "--modes",
        nargs="+",
        choices=(*_BESIDE, *STOCK),
        help="beside the flag; not by the modules where that is no way of its own",
    )
    add("--jobs", choices=JOBS, default="eight", help="that the flag trains")
    add("--bridge", type=Path, help="src folder of a Megatron-Bridge checkout, for stock modes")
    add("--model", choices=list(MODELS), default="8b")
    add("--layers", type=int, help="fewer layers than the model has, to try out")
    add("--tp", type=int, default=1, help="tensor-parallel size")
    add("--sp", action=argparse.BooleanOptionalAction, default=True, help="sequence parallelism")
    add("--nano", type=int, default=1, help="nano-batches of a micro-batch, flag and own")
    add(
        "--tp-comm-overlap", nargs="?", choices=list(USERBUFFERS), const="userbuffers",
        help="Transformer Engine's userbuffers; layers then run by the modules",
    )  # fmt: skip
    add("--tokens", type=int, default=8192, help="rows of a micro-batch")
    add("--rounds", type=int, default=8, help="timed iterations of a mode in a turn")
    add("--turns", type=int, default=2, help="how often each mode has its turn")
    add("--kernels", type=Path, help="write tables of kernels to this file")
    add("--timeout", type=float, default=400.0, help="seconds that a life of the script may take")
    options = parser.parse_args(argv)
    check_checkout(parser, options)
    _check_overlap(parser, options)
    package = (options.bridge or Path("nowhere")) / "megatron" / "bridge" / "peft"
    if not {*STOCK}.isdisjoint(options.modes or ()) and not package.is_dir():
        parser.error(f"--bridge must be the src folder of a Megatron-Bridge checkout for {STOCK}")
    if options.modes is None:
        # In nano-batches Transformer Engine's modules take turns with nothing beside them.
        is_alone = options.nano > 1 or options.tp_comm_overlap
        options.modes = [mode for mode in _BESIDE if mode != "flag_modules" or not is_alone]
    if options.impl is None:
        on_gpu = torch.cuda.is_available()
        options.impl = ["local", "transformer_engine"] if on_gpu else ["local_unfused"]
    if not torch.cuda.is_available() and options.precision != "fp8":
        options.precision = "fp32"
    if options.kernels:
        options.kernels.unlink(missing_ok=True)
    options.modes = tuple(options.modes)
    options.sequence_parallel = options.sp and options.tp > 1
    options.userbuffers = options.tp_comm_overlap or ""
    options.kernels = options.kernels and options.kernels.resolve()
    options.bridge = options.bridge and options.bridge.resolve()
    return options


def _check_overlap(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends with a usage error where nothing could be overlapped as asked."""
    if options.nano > 1 and (options.tp == 1 or options.tp_comm_overlap):
        parser.error("--nano wants --tp above 1, and no --tp-comm-overlap")
    if options.tp_comm_overlap is None:
        return
    if options.tp == 1 or not options.sp or not torch.cuda.is_available():
        parser.error("--tp-comm-overlap wants --tp above 1, --sp and GPUs")
    if any(impl.startswith("local") for impl in options.impl or ["local"]):
        parser.error("--tp-comm-overlap wants --impl transformer_engine")


if __name__ == "__main__":
    sys.exit(main())
