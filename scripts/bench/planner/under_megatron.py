"""Times cases under Megatron-LM's own trainer with `--tlora-config`, beside their prediction.

    python -m scripts.bench.planner.under_megatron --gpus 4 --megatron-lm CHECKOUT --csv rows.csv

Every case is one life of an unmodified `pretrain_gpt.py`, started by the very script that `tlora
plan --write megatron` writes for the plan, over random weights. Jobs' data are texts whose lengths
are those of the planner's histograms, so rounds hold what the packer without a model says; those
are timed that are most like the mean one. Cases end with `mN`: N micro-batches of a replica in each
round; `pp2x4` are two stages of four model chunks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import string
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from scripts.bench.around_training.base import shape_of, write_config
from scripts.bench.harness.arguments import add_checkout, bench_parser, check_checkout
from scripts.bench.harness.clock import is_main, largest, peak_bytes, summed, wait_for_all
from scripts.bench.harness.processes import (
    ITERATION,
    MEGATRON_WORKER,
    live,
    megatron_environment,
    torchrun,
)
from scripts.bench.harness.rows import append_rows, gpu_name, versions
from scripts.bench.planner.cases import MEGATRON_CASES, Case, parse_case, predict
from scripts.bench.planner.results import Measured, Row, report, show
from scripts.bench.planner.rounds import packed_rounds, typical_window
from tlora_megatron.config.load import load_config
from tlora_megatron.planner.cost.memory import MemoryUse
from tlora_megatron.planner.cost.step_terms import StepCost
from tlora_megatron.planner.hardware import HardwareProfile, load_profile
from tlora_megatron.planner.search import RankedPlan
from tlora_megatron.planner.workload import JobLoad
from tlora_megatron.profiling.synthetic_run import data_lengths
from tlora_megatron.runtime.planning.plan_files import jobs_file, write_plan
from tlora_megatron.runtime.planning.plan_inputs import plan_model

_WARM_ROUNDS, _FEWEST_ROUNDS, _SKIPPED = 3, 3, 8
_MEAN_OF = 256
_LEFT_OUT = ("--load", "--exit-on-missing-checkpoint")
"""Arguments of a script that random weights do not have, with their values."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a life of the script failed."""
    options = _arguments(argv)
    hardware = load_profile(options.hardware)
    rows: list[Row] = []
    failed = 0
    for text in options.cases or MEGATRON_CASES[options.gpus]:
        case = parse_case(text, options.gpus)
        if case.plan.num_micro_batches is None:
            raise ValueError(f"a case under Megatron-LM must end with mN, got {text!r}")
        prediction = predict(case, hardware)
        if prediction[1].total_bytes > hardware.memory_bytes:
            gib = prediction[1].total_bytes / 2**30
            print(f"{case.name}: left out, {gib:.0f} GiB needed", flush=True)
            continue
        with tempfile.TemporaryDirectory() as work:
            measured = run(case, prediction, hardware, Path(work), options)
        if measured is None:
            failed += 1
            continue
        rows.append(Row.of(case, prediction, measured, commit=options.commit))
        print(f"{case.name}: {show(rows[-1])}", flush=True)
        if options.csv:
            append_rows(options.csv, [asdict(rows[-1])])
    for line in report(rows) if rows else []:
        print(line)
    return 1 if failed or not rows else 0


def run(
    case: Case,
    prediction: tuple[StepCost, MemoryUse],
    hardware: HardwareProfile,
    work: Path,
    options: argparse.Namespace,
) -> Measured | None:
    """One life of the script; None if it failed, whose output is then printed."""
    size = int(options.seconds / prediction[0].step_time_s)
    size = min(max(size, _FEWEST_ROUNDS), options.rounds)
    packed = packed_rounds(case, _MEAN_OF)
    first = typical_window(packed[: _SKIPPED + size], size, _WARM_ROUNDS)
    script, result = write_case(case, prediction, hardware, work), work / "measured.json"
    checkout = options.megatron_lm.resolve()
    flags = flags_of(script, iterations=first + size + 1)
    cpu = ["--cpu"] if options.cpu else []
    trainer = (MEGATRON_WORKER, *cpu, checkout / "pretrain_gpt.py")
    env = megatron_environment(checkout) | {
        ITERATION: "scripts.bench.planner.under_megatron:begin",
        "TLORA_PLAN_WINDOW": f"{first},{size}",
        "TLORA_PLAN_RESULT": str(result),
    }
    command = torchrun(case.plan.num_gpus, *trainer, *flags)
    life = live(command, env, work / "log", options.timeout)
    print(f"{case.name}: {life.seconds:.0f} s, exit {life.code}", flush=True)
    if life.code != 0 or not result.is_file():
        print(life.output[-6000:])
        return None
    return Measured(**json.loads(result.read_text()))


def write_case(
    case: Case, prediction: tuple[StepCost, MemoryUse], hardware: HardwareProfile, work: Path
) -> Path:
    """Writes base, data and configuration of a case, and the planner's script for its plan."""
    _write_base(case, work / "base")
    document = {
        "base_model": {
            "config": str(work / "base" / "config.json"),
            "random_init": True,
            "dtype": "bfloat16" if hardware.dtype == "bfloat16" else "float32",
        },
        "run": {"output_dir": str(work / "out"), "tensorboard": False, "resume": "never"},
        "jobs": [_write_job(load, seed, work) for seed, load in enumerate(case.jobs)],
    }
    (work / "run.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    config = load_config(work / "run.yaml")
    script = work / "run.sh"
    spec = plan_model(config)
    assert replace(spec, model_type="") == replace(case.spec, model_type=""), "config.json says it"
    ranked = RankedPlan(case.plan, *prediction)
    write_plan("megatron", script, config=config, spec=spec, ranked=ranked, hardware=hardware)
    jobs = jobs_file(script)
    written = yaml.safe_load(jobs.read_text())
    written["base_model"] = {"path": str(work / "base"), "random_init": True}
    # Else nano-batches would be tried while rounds are timed.
    written["run"] = written.get("run", {}) | {"nano_batches": 1, "resume": "never"}
    jobs.write_text(yaml.safe_dump(written, sort_keys=False))
    return script


def _write_base(case: Case, folder: Path) -> None:
    spec = case.spec
    shape = {
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn_size,
        "vocab_size": spec.vocab_size,
    }
    write_config(shape_of("8b") | shape, folder)


def _write_job(load: JobLoad, seed: int, work: Path) -> dict[str, Any]:
    """Writes a job's texts, a token for each letter behind the first, which begins a text."""
    draw = random.Random(seed)
    file = work / f"{load.name}.jsonl"
    with file.open("w") as sink:
        for rows in data_lengths(load):
            letters = "".join(draw.choices(string.ascii_lowercase, k=rows))
            sink.write(json.dumps({"text": letters}) + "\n")
    return {
        "name": load.name,
        "data": {"train": str(file)},
        "lora": {"rank": load.rank, "target_modules": list(load.targets)},
        "batch_size": load.batch_size,
        "max_seq_len": load.lengths.longest + 1,
        "max_steps": 10**6,
        "seed": seed,
        "optimizer": {"lr": 1e-5},
    }


def flags_of(script: Path, *, iterations: int) -> list[str]:
    """The flags of the written script, for so many iterations on random weights."""
    words = shlex.split(script.read_text(), comments=True)
    begin = words.index("$MEGATRON_LM/pretrain_gpt.py") + 1
    flags = [word for word in words[begin:] if word not in ("$@", "\n")]
    for flag in _LEFT_OUT:
        place = flags.index(flag)
        del flags[place : place + (2 if flag == "--load" else 1)]
    flags[flags.index("--train-iters") + 1] = str(iterations)
    more = ("--lr", "1e-5", "--eval-interval", "1000000", "--num-workers", "0", "--mock-data")
    return [*flags, *more]


class IterationTimer:
    """Times iterations of the trainer in its processes, from one's beginning to the next one's.

    Args:
        first: number of the first iteration that is timed.
        size: number of iterations.
    """

    def __init__(self, first: int, size: int, result: Path) -> None:
        self._first, self._size, self._result = first, size, result
        self._count = self._tokens = 0
        self._begin = 0.0

    def iteration(self, session: Any, run: Any) -> Any:
        """Runs one iteration of the trainer."""
        number = self._count
        self._count += 1
        if number == 0:
            self._watch(session)
        if number == self._first:
            self._tokens = 0
            wait_for_all()
            self._begin = time.perf_counter()
        if number == self._first + self._size:
            wait_for_all()
            self._finish(session, time.perf_counter() - self._begin)
        return run()

    def _watch(self, session: Any) -> None:
        from scripts.bench.flag_speed.turns import real_tokens

        feed = session._feed
        fill = feed.fill

        def watched(batches: Sequence[Any]) -> None:
            self._tokens += real_tokens(batches)
            fill(batches)

        feed.fill = watched

    def _finish(self, session: Any, seconds: float) -> None:
        """Writes what was measured; every rank of a replica has counted the replica's tokens."""
        layout = session.loop.super_model.groups.layout
        (tokens,) = summed([float(self._tokens)])
        (peak,) = largest([float(peak_bytes())])
        if is_main():
            measured = {
                "gpu": gpu_name(),
                "versions": versions("megatron-core"),
                "seconds": seconds / self._size,
                "tokens": tokens * layout.dp_size / layout.world_size / self._size,
                "peak_bytes": int(peak),
            }
            self._result.write_text(json.dumps(measured))


def begin() -> Callable[[Any, Any], Any]:
    """What stands between the trainer and the session in a life of the script."""
    first, size = map(int, os.environ["TLORA_PLAN_WINDOW"].split(","))
    return IterationTimer(first, size, Path(os.environ["TLORA_PLAN_RESULT"])).iteration


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser(__doc__)
    add_checkout(parser)
    parser.add_argument("--hardware", type=Path, default=Path("configs/hardware/h200.json"))
    parser.add_argument("--gpus", type=int, required=True, help="processes of each case")
    parser.add_argument("--cases", nargs="+", help="instead of those of so many GPUs")
    parser.add_argument("--rounds", type=int, default=8, help="timed, at most")
    parser.add_argument("--seconds", type=float, default=8.0, help="of timed rounds, a case")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a case may take")
    parser.add_argument("--cpu", action="store_true", help="gloo in the place of NCCL, to try out")
    options = parser.parse_args(argv)
    check_checkout(parser, options)
    return options


if __name__ == "__main__":
    sys.exit(main())
