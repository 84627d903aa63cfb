"""Bases with routed experts under `--tlora-config`: every job gets what it gets alone.

Unmodified `pretrain_gpt.py` of the checkout that MEGATRON_LM_PATH names, in each layout and with
both dispatchers, on jobs with adapters on attention, on experts and on both.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.megatron_lm import (
    COMMON,
    SIZES,
    checkout,
    convert,
    model_flags,
    oracle,
    run,
    write_jobs,
)
from tests.helpers.oracle import assert_equals_alone
from tests.helpers.scenario import JOBS, exported, losses, make_scenario

pytestmark = [pytest.mark.megatron_lm, pytest.mark.slow]

_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_EXPERTS = ["gate_proj", "up_proj", "down_proj"]
LORA: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "mlp": {"target_modules": _EXPERTS},
    "everything": {"target_modules": [*_ATTENTION, *_EXPERTS], "expert_rank": 3},
    "outputs": {"target_modules": ["k_proj", "linear_fc1", "linear_fc2"], "expert_rank": 4},
}
ALLTOALL = "--moe-token-dispatcher-type alltoall"
EP = "--expert-model-parallel-size 2"
SP = "--tensor-model-parallel-size 2 --sequence-parallel"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective"
LAYOUTS = {
    "one process": "",
    "one process alltoall full recompute": f"--single {ALLTOALL} {FULL}",
    "one process recompute of experts": f"--single {SELECTIVE} --recompute-modules moe",
    "EP2": EP,
    "EP2 alltoall": f"{EP} {ALLTOALL}",
    "EP2 alltoall recompute of experts": f"{EP} {ALLTOALL} {SELECTIVE} --recompute-modules moe",
    "EP2 selective recompute": f"{EP} {SELECTIVE}",
    "TP2+SP": SP,
    "TP2+SP alltoall": f"{SP} {ALLTOALL}",
    "TP2+SP, experts whole, EP2": f"{SP} {EP} --expert-tensor-parallel-size 1",
    "TP2+SP, experts whole, EP2 alltoall full recompute": f"{SP} {EP} {ALLTOALL} {FULL} "
    "--expert-tensor-parallel-size 1",
    "TP2+SP, experts whole": f"{SP} --expert-tensor-parallel-size 1",
    "CP2xEP2": f"--context-parallel-size 2 {EP} {ALLTOALL}",
    "PP2": f"--pipeline-model-parallel-size 2 {FULL}",
}
Launch = Callable[..., tuple[Path, str]]


def make(root: Path, **base: Any) -> Path:
    """The scenario's base, converted, and its jobs for the flag."""
    jobs = [dict(job) for job in JOBS]
    specs = [job | {"lora": {**job["lora"], **LORA[job["name"]]}} for job in jobs]
    document = json.loads(make_scenario(root, specs, **base).read_text())
    write_jobs(root / "jobs.json", document)
    convert(root / "base", root / "megatron")
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the scenario over Qwen3-MoE, its base and the base converted."""
    return make(tmp_path_factory.mktemp("experts"), model_type="qwen3_moe")


def arguments(root: Path, out: Path, flags: str, *, config: str = "jobs.json") -> list[Any]:
    """A whole command line of pretrain_gpt.py, behind the script."""
    checkpoint = root / "megatron"
    sources = ["--load", checkpoint, "--save", out, "--tlora-config", root / config]
    words = [word for word in flags.split() if word != "--single"]
    return [*model_flags(checkpoint), *COMMON, *SIZES, *sources, *words]


def train(root: Path, out: Path, flags: str, **options: Any) -> str:
    """Runs pretrain_gpt.py in two processes, or in one without flags or with `--single`."""
    nproc = 1 if not flags or "--single" in flags else 2
    return run(checkout() / "pretrain_gpt.py", arguments(root, out, flags), nproc=nproc, **options)


def assert_equals_oracle(out: Path, root: Path) -> None:
    for name, expected in oracle(root).items():
        factors = exported(out, name, root / "base")
        assert_equals_alone(losses(out, name), factors, expected, name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_weights_equal_the_oracle(layout: str, root: Path, tmp_path: Path) -> None:
    train(root, tmp_path, LAYOUTS[layout])
    assert_equals_oracle(tmp_path, root)
