"""Measures again, in two minutes on one H200, the figures that the README is known for.

    python -m scripts.bench.smoke --json smoke.json                  # on a GPU
    python -m scripts.bench.smoke --json smoke.json --size toy       # on a CPU: shows that it works

`scripts/test.sh gpu` runs it behind the tests. Each part is a benchmark of this folder in a process
of its own, with few repetitions; parts take their turns, so that each has the GPU to itself. What
is compared with the docs are ratios of one run, and of times to a first step the seconds. A figure
that is more than 5 % short is printed, and goes into the record; it is no failure. A part that
crashes is one: it is reported with its last lines, and the others are measured all the same.

Weights are drawn on the GPU. On a GPU with less than 100 GiB, steps have 16 of 8B's 32 layers.
Returns 1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.bench.harness.arguments import add_checkout, bench_parser
from scripts.bench.smoke.figures import Measured, figures, show
from scripts.bench.smoke.parts import Part, parts_on_gpu, run_parts, skipped_on_cpu, toy_parts

_TOLD = 80
"""Lines of a failed part that are printed: torchrun says much behind the error."""
_WHOLE_BYTES = 100 << 30
"""An 8B step beside a second base takes 85 GiB."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _arguments(argv)
    is_toy, checkout = options.size == "toy", options.megatron_lm
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="smoke_") as folder:
        work = Path(folder)
        skipped: Mapping[str, str] = {}
        if is_toy:
            parts, skipped = toy_parts(checkout, work), skipped_on_cpu(checkout)
        else:
            parts = parts_on_gpu(checkout or Path("MEGATRON_LM_PATH"), _layers())
        found = measure(parts, work, options, is_toy=is_toy)
    seconds = round(time.monotonic() - begin_s, 1)
    document = {"commit": options.commit, "seconds": seconds, **found, "skipped": dict(skipped)}
    options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for part, why in skipped.items():
        print(f"skipped: {part}: {why}")
    print(f"smoke figures in {seconds:.0f} s: {document['parts']}")
    for failure in found["failures"]:
        print(f"FAILED smoke: {failure}")
    return 1 if found["failures"] else 0


def measure(
    parts: Sequence[Part], work: Path, options: argparse.Namespace, *, is_toy: bool
) -> dict[str, Any]:
    """Runs the parts and prints their figures; returns those, failures and seconds by part."""
    names = ("toy", "toy") if is_toy else ("six layers", "six layers")
    measured: list[Measured] = []
    failures: list[str] = []
    seconds: dict[str, float] = {}
    for part, ended, rows in run_parts(parts, work, options.commit, options.timeout):
        seconds[part.name] = round(ended.seconds, 1)
        if ended.failure:
            failures.append(f"{part.name}: {ended.failure}")
            print("\n".join([f"-- {part.name}", *ended.output.splitlines()[-_TOLD:]]))
            continue
        for figure in figures(*names):
            if figure.part == part.name:
                try:
                    measured.append(figure.measure(rows, compares=not is_toy))
                except (LookupError, OSError) as error:
                    failures.append(f"{part.name}: {error}")
    print(show(measured), flush=True)
    return {"figures": [asdict(m) for m in measured], "failures": failures, "parts": seconds}


def _layers() -> int | None:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("--size 8b must have a GPU, got none; --size toy runs on a CPU")
    memory = torch.cuda.get_device_properties(0).total_memory
    return None if memory >= _WHOLE_BYTES else 16


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser(__doc__)
    add_checkout(parser)
    parser.add_argument("--json", type=Path, required=True, help="write what was found here")
    parser.add_argument("--size", choices=["8b", "toy"], default="8b")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of a part")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
