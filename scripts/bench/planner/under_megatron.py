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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from scripts.bench.around_training.base import TOKENIZER
from scripts.bench.harness.arguments import REPO, bench_parser
from scripts.bench.harness.processes import live
from scripts.bench.harness.rows import append_rows
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

WORKER = Path(__file__).with_name("under_megatron_worker.py")
_WARM_ROUNDS, _FEWEST_ROUNDS, _SKIPPED = 3, 3, 8
_MEAN_OF = 256
_LEFT_OUT = ("--load", "--exit-on-missing-checkpoint")
"""Arguments of a script that random weights do not have, with their values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Folders and device of all lives."""

    checkout: Path
    work: Path
    on_cpu: bool


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
            place = Place(
                checkout=options.megatron_lm.resolve(), work=Path(work), on_cpu=options.cpu
            )
            measured = run(case, prediction, hardware, place, options)
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
    place: Place,
    options: argparse.Namespace,
) -> Measured | None:
    """One life of the script; None if it failed, whose output is then printed."""
    size = int(options.seconds / prediction[0].step_time_s)
    size = min(max(size, _FEWEST_ROUNDS), options.rounds)
    packed = packed_rounds(case, _MEAN_OF)
    first = typical_window(packed[: _SKIPPED + size], size, _WARM_ROUNDS)
    script = write_case(case, prediction, hardware, place.work)
    result = place.work / "measured.json"
    command = command_of(script, case, place, iterations=first + size + 1)
    window = {"TLORA_PLAN_WINDOW": f"{first},{size}", "TLORA_PLAN_RESULT": str(result)}
    life = live(command, _environment(place) | window, place.work / "log", options.timeout)
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
    folder.mkdir(parents=True)
    shape = json.loads((REPO / "configs" / "models" / "llama-3.1-8b.json").read_text())
    spec = case.spec
    shape |= {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn_size,
        "vocab_size": spec.vocab_size,
    }
    (folder / "config.json").write_text(json.dumps(shape))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TOKENIZER / name).read_bytes())


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


def command_of(script: Path, case: Case, place: Place, *, iterations: int) -> list[str]:
    """The written script's command line with the worker in the launcher's place."""
    words = shlex.split(script.read_text(), comments=True)
    begin = words.index("$MEGATRON_LM/pretrain_gpt.py") + 1
    flags = [word for word in words[begin:] if word not in ("$@", "\n")]
    for flag in _LEFT_OUT:
        place_of = flags.index(flag)
        del flags[place_of : place_of + (2 if flag == "--load" else 1)]
    flags[flags.index("--train-iters") + 1] = str(iterations)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return [
        *(sys.executable, *launcher, str(case.plan.num_gpus), str(WORKER)),
        *(["--cpu"] if place.on_cpu else []),
        str(place.checkout / "pretrain_gpt.py"),
        *flags,
        *(("--lr", "1e-5", "--eval-interval", "1000000", "--num-workers", "0", "--mock-data")),
    ]


def _environment(place: Place) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    # The repository first: a checkout has packages `tests` and `scripts` of its own.
    paths = [str(REPO), str(place.checkout), os.environ.get("PYTHONPATH")]
    return inherited | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "MEGATRON_LM_PATH": str(place.checkout),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser(__doc__)
    checkout = os.environ.get("MEGATRON_LM_PATH")
    parser.add_argument("--megatron-lm", type=Path, default=checkout and Path(checkout))
    parser.add_argument("--hardware", type=Path, default=Path("configs/hardware/h200.json"))
    parser.add_argument("--gpus", type=int, required=True, help="processes of each case")
    parser.add_argument("--cases", nargs="+", help="instead of those of so many GPUs")
    parser.add_argument("--rounds", type=int, default=8, help="timed, at most")
    parser.add_argument("--seconds", type=float, default=8.0, help="of timed rounds, a case")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a case may take")
    parser.add_argument("--cpu", action="store_true", help="gloo in the place of NCCL, to try out")
    options = parser.parse_args(argv)
    if not ((options.megatron_lm or Path("nowhere")) / "pretrain_gpt.py").is_file():
        parser.error("--megatron-lm (or MEGATRON_LM_PATH) must name a Megatron-LM checkout")
    return options


if __name__ == "__main__":
    sys.exit(main())
