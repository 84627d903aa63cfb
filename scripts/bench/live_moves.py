"""Lets `tlora_elastic` rule two GPUs: a long job shrinks, grows and is paused for short ones.

    python -m scripts.bench.live_moves --csv rows.csv                     # two GPUs, 8B shapes
    python -m scripts.bench.live_moves --gpus 0 --size quickstart         # a laptop's CPU

A controller of `tlora serve` with its real prices decides; nobody moves a job by hand. The long job
is alone on both GPUs when two small ones come, which share one of them, and again when a wide one
comes, which gets both. Then each job is trained alone, on one GPU, and its losses are compared.

A row for each move: how long the job stood still, from having left with a checkpoint to its next
step; for `pre-empt` that includes the time of the wide job. Returns 1 if a move is missing, or if
losses differ by more than 1e-5.

What a start of a gang takes is known to a service that has run for a while; here it is given. On a
CPU steps are priced at a second or more, so that the policy finds the moves worth their pauses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.bench.around_training.base import base_in
from scripts.bench.around_training.command import TEXTS
from scripts.bench.harness.arguments import REPO, bench_parser
from scripts.bench.harness.rows import append_rows, gpu_name
from tests.helpers import elastic_worker
from tests.helpers.gang_driver import quickstart_base
from tests.helpers.live_service import FloorCost
from tests.helpers.moves import Move, fused, moves, stays
from tests.helpers.ruled_service import RuledService
from tlora_megatron.ops.kernel_build import build, built_library
from tlora_megatron.service.control.pricing import pricing_of
from tlora_megatron.service.engines.local import LocalEngine
from tlora_megatron.service.settings import Settings
from tlora_megatron.training.metrics import METRICS_FILE, read_metrics

MUST_DIFFER = 1e-5
EXPECTED = ("shrink", "grow", "pre-empt")
_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_BATCH = {"long": 256, "small": 1, "other": 1, "wide": 256}
"""Sequences are short: these of the long and the wide job are enough for two GPUs."""
_LENGTH = 512


def documents(args: Any) -> dict[str, dict[str, Any]]:
    """The jobs by name."""
    if args.size == "quickstart":
        return elastic_worker.documents()
    texts = sorted(path for path in TEXTS.glob("*.jsonl") if not path.stem.endswith("_eval"))
    steps = dict(zip(_BATCH, args.steps, strict=True))
    return {
        name: {
            "name": name, "data": {"train": str(text.resolve())},
            "lora": {"rank": 16, "alpha": 32, "target_modules": _LINEARS}, "batch_size": batch,
            "max_seq_len": _LENGTH, "portion_tokens": 2 * _LENGTH, "max_steps": steps[name],
            "optimizer": {"lr": 1e-4},
        }
        for (name, batch), text in zip(_BATCH.items(), texts, strict=True)
    }  # fmt: skip


def served(args: Any, root: Path, base: Mapping[str, Any]) -> tuple[list[Move], dict[str, str]]:
    """Has the service train all jobs; returns its moves and the jobs' ids by name."""
    settings = Settings(dwell_s=0.0, regroups_per_min=1000)
    engine = LocalEngine(root, args.gpus, slots=None if args.gpus else 2)
    if args.size == "quickstart":
        pricing = elastic_worker.slow_prices(FloorCost)
    else:
        pricing = pricing_of(engine.nodes(), settings)
    with RuledService(root, engine, pricing, base, settings) as service:
        context = service.controller.context
        if args.gpus:
            per_s = 1e9 * args.weights_gb_per_s
            context.cost = replace(context.cost, replan_s=args.start_s, weights_bytes_per_s=per_s)
        service.make_moves(documents(args))
        found = stays(root)
        rows = {row.id: row.name for row in service.store.jobs.page()}
        for group in fused(found):
            print("shared a gang:", ", ".join(sorted(rows[job] for job in group)), flush=True)
        made = [replace(move, job=rows[move.job]) for move in moves(found, service.store)]
    return made, {name: job for job, name in rows.items()}


def train_alone(
    args: Any,
    folder: Path,
    base: Mapping[str, Any],
    jobs: Mapping[str, Mapping[str, Any]],
    gpu: int,
) -> None:
    """Trains jobs one after another by `tlora train` on one GPU."""
    own = {"CUDA_VISIBLE_DEVICES": str(gpu)} if args.gpus else {"OMP_NUM_THREADS": "1"}
    for name, job in jobs.items():
        run = {"output_dir": str(folder), "tensorboard": False, "micro_batch_tokens": 4096}
        document = {"base_model": dict(base), "run": run, "jobs": [job]}
        file = folder / f"{name}.json"
        file.write_text(json.dumps(document))
        command = [sys.executable, "-m", "tlora_megatron.cli", "train", str(file)]
        subprocess.run(command, check=True, env=os.environ | own, cwd=REPO)


def differences(root: Path, alone: Path, ids: Mapping[str, str]) -> dict[str, float]:
    """The largest relative difference of a job's losses from those of training alone."""
    found = {}
    for name, job in ids.items():
        own = _losses(root / "jobs" / job)
        expected = _losses(alone / "jobs" / name)
        assert own.keys() == expected.keys(), (name, len(own), len(expected))
        found[name] = max(abs(own[step] - loss) / abs(loss) for step, loss in expected.items())
    return found


def _losses(folder: Path) -> dict[int, float]:
    rows = read_metrics(folder / METRICS_FILE)
    return {int(row["step"]): float(row["loss"]) for row in rows if "loss" in row}


def compared(
    args: Any, folder: Path, base: Mapping[str, Any], ids: Mapping[str, str]
) -> dict[str, float]:
    """Trains each job alone, the long one beside the others on another GPU, and compares."""
    jobs, alone = documents(args), folder / "alone"
    alone.mkdir()
    short = {name: job for name, job in jobs.items() if name != "long"}
    turns = ({"long": jobs["long"]}, short)
    with ThreadPoolExecutor(2 if args.gpus else 1) as threads:
        done = [
            threads.submit(train_alone, args, alone, base, turn, gpu)
            for gpu, turn in enumerate(turns)
        ]
        for one in done:
            one.result()
    return differences(folder / "service", alone, ids)


def main(argv: Sequence[str] | None = None) -> int:
    """Shows the moves; returns the exit code."""
    parser = bench_parser(__doc__)
    parser.add_argument("--gpus", type=int, default=2, help="GPUs; 0 = two processes of a CPU")
    parser.add_argument("--size", choices=("8b", "six layers", "quickstart"), default="8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--steps",
        type=int,
        nargs=4,
        default=[450, 400, 350, 50],
        metavar="N",
        help="of the long, the small, the other and the wide job",
    )
    parser.add_argument("--start-s", type=float, default=4.0, help="start of a gang, seconds")
    parser.add_argument("--weights-gb-per-s", type=float, default=10.0, help="loading of a base")
    parser.add_argument("--no-compare", action="store_true", help="do not train the jobs alone")
    parser.add_argument("--scratch", type=Path, help="folder for base and service")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=args.scratch, ignore_cleanup_errors=True) as folder:
        return measure(args, Path(folder))


def measure(args: Any, folder: Path) -> int:
    """Runs the service and the comparison, and keeps their rows."""
    base = (
        quickstart_base()
        if args.size == "quickstart"
        else base_in(folder / "base", args.size, args.dtype)
    )
    if args.gpus and args.dtype == "bfloat16":
        build(built_library())  # once a machine, which is not what is timed here
    made, ids = served(args, folder / "service", base)
    for move in made:
        print(f"{move.job}: saved behind step {move.step}")
        case = f"{move.job}: {move.kind}, {move.gpus_before} to {move.gpus_after} GPUs"
        _row(args, case, move.pause_s, "s")
    missing = [kind for kind in EXPECTED if kind not in {move.kind for move in made}]
    found = {} if args.no_compare else compared(args, folder, base, ids)
    for name, difference in found.items():
        _row(args, f"{name}: largest relative difference of losses from alone", difference, "")
    far = [name for name, difference in found.items() if difference > MUST_DIFFER]
    for what in (*missing, *far):
        print(f"missed: {what}", file=sys.stderr)
    return int(bool(missing or far))


def _row(args: Any, case: str, value: float, unit: str) -> None:
    print(f"{case}: {value:.4g} {unit}", flush=True)
    if args.csv is not None:
        row = {
            "gpu": gpu_name(),
            "world": args.gpus or 2,
            "commit": args.commit,
            "engine": "local",
            "case": f"{args.size} under tlora_elastic: {case}",
            "value": f"{value:.4g}",
            "unit": unit,
        }
        append_rows(args.csv, [row])


if __name__ == "__main__":
    sys.exit(main())
