"""Bases with routed experts under `--tlora-config`: every job gets what it gets alone.

Unmodified `pretrain_gpt.py` of the checkout that MEGATRON_LM_PATH names, in each layout and with
both dispatchers, on jobs with adapters on attention, on experts and on both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.expert_jobs import ALL_EXPERTS, SHARED, expert_jobs
from tests.helpers.expert_jobs import LORA as OF_SCENARIO
from tests.helpers.megatron_lm import (
    FULL,
    SEED,
    SP,
    assert_equals_oracle,
    convert,
    train,
    write_jobs,
)
from tests.helpers.scenario import losses, make_scenario, summary_of
from tests.helpers.scenario_worlds import Life, live

pytestmark = [pytest.mark.megatron_lm, pytest.mark.slow]

LORA = OF_SCENARIO | {
    "outputs": {"target_modules": ["k_proj", "linear_fc1", "linear_fc2"], "expert_rank": 4}
}
ALLTOALL = "--moe-token-dispatcher-type alltoall"
EP = "--expert-model-parallel-size 2"
SELECTIVE = "--recompute-granularity selective"
LAYOUTS = {
    "one process": "",
    "one process alltoall full recompute": f"--single {ALLTOALL} {FULL}",
    "EP2": EP,
    "EP2 alltoall": f"{EP} {ALLTOALL}",
    "EP2 selective recompute": f"{EP} {SELECTIVE}",
    "TP2+SP": SP,
    "TP2+SP, experts whole, EP2": f"{SP} {EP} --expert-tensor-parallel-size 1",
    "TP2+SP, experts whole, EP2 alltoall full recompute": f"{SP} {EP} {ALLTOALL} {FULL} "
    "--expert-tensor-parallel-size 1",
    "TP2+SP, experts whole": f"{SP} --expert-tensor-parallel-size 1",
    "CP2xEP2": f"--context-parallel-size 2 {EP} {ALLTOALL}",
    "PP2": f"--pipeline-model-parallel-size 2 {FULL}",
}
OTHER_BASES: dict[str, dict[str, dict[str, Any]]] = {
    "mixtral": {name: LORA[name] for name in ("mlp", "everything")},
    "qwen2_moe": {name: SHARED[name] for name in ("everything", "outputs")},
}
"""The jobs over other kinds of base: on routed experts, or where these have a shared expert beside
them on that."""


def make(
    root: Path,
    loras: Mapping[str, dict[str, Any]] = LORA,
    refused: Mapping[str, dict[str, Any]] = {},
    **base: Any,
) -> Path:
    """The scenario's base, converted, and the jobs for the flag.

    Args:
        loras: those of the scenario that are trained, by name.
        refused: jobs beside them that cannot be.
    """
    document = json.loads(make_scenario(root, expert_jobs(loras), **base).read_text())
    like = document["jobs"][0]
    document["jobs"] += [like | {"name": name, "lora": refused[name]} for name in refused]
    write_jobs(root / "jobs.json", document, run={"on_job_error": "skip"} if refused else {})
    convert(root / "base", root / "megatron")
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("experts"), model_type="qwen3_moe")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_weights_equal_the_oracle(layout: str, root: Path, tmp_path: Path) -> None:
    train(root, tmp_path, LAYOUTS[layout])
    assert_equals_oracle(tmp_path, root)


@pytest.fixture(scope="module", params=OTHER_BASES)
def other_root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = request.param
    refused = {"routed": {"target_modules": ALL_EXPERTS}} if kind == "qwen2_moe" else {}
    return make(tmp_path_factory.mktemp(kind), OTHER_BASES[kind], refused, model_type=kind)


@pytest.mark.parametrize("layout", ["EP2 alltoall", "TP2+SP"])
def test_over_other_bases_too(layout: str, other_root: Path, tmp_path: Path) -> None:
    train(other_root, tmp_path, LAYOUTS[layout])
    assert_equals_oracle(tmp_path, other_root)
    if other_root.name.startswith("qwen2_moe"):
        told = summary_of(tmp_path)["jobs"]["routed"]
        assert told["status"] == "rejected"
        rule = "must not name routed experts over a base with shared experts, where PEFT does"
        assert rule in told["reason"]


def test_goes_on_in_other_layouts_and_in_tlora_train(root: Path, tmp_path: Path) -> None:
    """Experts divided over two ranks, cut by them, divided in `tlora train`, and in one process.

    Nobody interrupted the jobs of the oracle.
    """
    out, steps = tmp_path / "out", [0]
    ours = Life(2, ("parallel.ep_size=2", f"run.seed={SEED}"), ("outputs", 4))
    for life in (f"{LAYOUTS['EP2 alltoall']} --train-iters 2", f"{SP} --train-iters 4", ours, ""):
        if isinstance(life, Life):
            live(root / "config.json", tmp_path, [life])
        else:
            train(root, out, life)
        steps.append(sum(len(losses(out, name)) for name in LORA))
    assert steps == sorted(set(steps))  # each has its part
    assert_equals_oracle(out, root)
