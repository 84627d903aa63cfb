"""Unmodified scripts of a Megatron-LM checkout on the losslessness scenario, without CUDA."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.helpers import launch
from tests.helpers.launch import HANG_S, REPO
from tests.helpers.oracle import OracleResult
from tests.helpers.scenario import (
    assert_run_equals_oracle,
    load_scenario,
    make_scenario,
    oracle_results,
)

RUNNER = Path(__file__).with_name("megatron_lm_cpu.py")
NUM_STEPS = 22
"""Steps of every job."""
SEED = 1
"""Megatron's `--seed`, which has to be positive and is added to every job's own."""


def words(text: str) -> list[str]:
    return text.split()


COMMON = words(
    "--micro-batch-size 1 --lr 1e-3 --log-interval 1 --eval-interval 100 --eval-iters 0 "
    f"--num-workers 0 --seed {SEED} --mock-data --no-create-attention-mask-in-dataloader"
)
SIZES = words("--seq-length 256 --global-batch-size 2 --train-iters 400 --save-interval 10")
SP = "--tensor-model-parallel-size 2 --sequence-parallel"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def checkout() -> Path:
    return Path(os.environ["MEGATRON_LM_PATH"])


def make_launch_scenario(root: Path, **base_model: Any) -> Path:
    """The scenario of `scenario.make_scenario`, and its `jobs.json` for the flag, returned."""
    document = json.loads(make_scenario(root, num_steps=NUM_STEPS, num_layers=4).read_text())
    return write_jobs(root / "jobs.json", document, base_model=base_model)


def write_jobs(
    path: Path,
    document: Mapping[str, Any],
    *,
    base_model: Mapping[str, Any] = {},
    run: Mapping[str, Any] = {},
    **sections: Any,
) -> Path:
    sections |= {
        "base_model": {"path": "base", **base_model},
        "run": {"tensorboard": False, **run},
        "jobs": document["jobs"],
    }
    path.write_text(json.dumps(sections))
    return path


def convert(base: Path, out: Path) -> None:
    command = [sys.executable, "-m", "tlora_megatron.cli", "convert", str(base), str(out)]
    subprocess.run(command, check=True, cwd=REPO, capture_output=True, timeout=HANG_S)


def tokenizer_alone(root: Path) -> Path:
    """A copy of the scenario's tokenizer without the base's config.json, which is then unknown."""
    ignored = shutil.ignore_patterns("config.json", "*.safetensors")
    copied = shutil.copytree(root / "base", root / "tokenizer", ignore=ignored, dirs_exist_ok=True)
    return Path(copied)


def model_flags(checkpoint: Path) -> list[str]:
    """The words with which Megatron-LM builds the model of a converted checkpoint."""
    return (checkpoint / "model_flags.txt").read_text().split("\n")[:-1]


def pretrain_gpt() -> Path:
    return checkout() / "pretrain_gpt.py"


def arguments(root: Path, out: Path, flags: str = "", *, config: str = "jobs.json") -> list[Any]:
    """A whole command line of pretrain_gpt.py, behind the script."""
    checkpoint = root / "megatron"
    sources = ["--load", checkpoint, "--save", out, "--tlora-config", root / config]
    more = [word for word in flags.format(out=out).split() if word != "--single"]
    return [*model_flags(checkpoint), *COMMON, *SIZES, *sources, *more]


def train(
    root: Path, out: Path, flags: str = "", *, config: str = "jobs.json", **given: Any
) -> str:
    """Runs pretrain_gpt.py in two processes, or in one without flags or with `--single`."""
    nproc = 1 if not flags or "--single" in flags else 2
    return run(pretrain_gpt(), arguments(root, out, flags, config=config), nproc=nproc, **given)


def assert_equals_oracle(out: Path, root: Path) -> None:
    assert_run_equals_oracle(out, oracle(root), root / "config.json", oracle(root))


def outcome(
    script: Path,
    args: Sequence[object],
    *,
    nproc: int = 1,
    plain: bool = False,
    environment: Mapping[str, str] = {},
) -> tuple[int, str]:
    """Exit code and output of a script under torchrun; `plain` leaves the launcher out."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", nproc]
    # The repository first: a checkout has a package `tests` of its own.
    paths = [str(REPO), str(RUNNER.parent), os.environ.get("PYTHONPATH")]
    own = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TLORA_PLAIN": "1" if plain else "",
    }
    env = launch.environment() | own | environment
    return launch.outcome(*launcher, RUNNER, script, *args, env=env)


def run(script: Path, args: Sequence[object], **options: Any) -> str:
    """Runs a script to its end; returns what it wrote.

    Raises:
        AssertionError: if it fails or hangs.
    """
    code, output = outcome(script, args, **options)
    assert code == 0, f"exit {code}: {script}\n{output[-8000:]}"
    return output


def refusal(script: Path, args: Sequence[object], **options: Any) -> tuple[list[str], str]:
    """The lines that begin with `error: ` of a script that must fail, and all that it wrote."""
    code, output = outcome(script, args, **options)
    assert code != 0, output[-2000:]
    return [line for line in output.splitlines() if line.startswith("error: ")], output


def logged(output: str) -> list[dict[str, float]]:
    """The numbers of each of the trainer's log lines, by what the line calls them.

    Ranks share one pipe and end their lines by writes of their own: on a line with the last rank's
    numbers the first rank's memory report may stand as well.
    """
    lines = re.findall(r"iteration +\d+/.*?(?=\[Rank |$)", output, re.MULTILINE)
    number = re.compile(r" ([^|:]+): ([-+\d.eE]+|nan|inf) \|")
    return [{key.strip(): float(value) for key, value in number.findall(line)} for line in lines]


@functools.cache
def oracle(root: Path) -> dict[str, OracleResult]:
    """Each job alone under transformers and PEFT, with the seeds that Megatron's `--seed` makes."""
    config = load_scenario(root / "config.json", output_dir=root / "unused")
    jobs = tuple(replace(job, seed=job.seed + SEED) for job in config.jobs)
    return oracle_results(replace(config, jobs=jobs))
