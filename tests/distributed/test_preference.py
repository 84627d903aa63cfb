"""A job of pairs gets in every layout what TRL's DPOTrainer gives it, and keeps its bits."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import preference_case as case
from tests.helpers.launch import REPO
from tests.helpers.scenario import records, summary_of
from tests.helpers.scenario_worlds import World, cases_of, entry, layout_params, run_cases, worlds
from tests.helpers.session import further
from tests.helpers.train_worker import train_until

SP = ("parallel.tp_size=2", "parallel.sequence_parallel=true")
LAYOUTS: dict[int, dict[str, tuple[str, ...]]] = {
    1: {"one process": ()},
    2: {
        "TP2+SP nano-batches": (*SP, "run.nano_batches=2"),
        "PP2": ("parallel.pp_size=2",),
        "DP2": (),
        "CP2": ("parallel.cp_size=2",),
        **further({
            "TP2": SP[:1],
            "TP2+SP": SP,
            "PP2 full recompute": ("parallel.pp_size=2", "run.recompute=full"),
            "CP2 by micro-batch": ("parallel.cp_size=2", "parallel.cp_by_micro_batch=true",
             "run.round_depth=2"),
        }),
    },
}  # fmt: skip
TRL = pytest.mark.skipif("TRL_PYTHON" not in os.environ, reason="scripts/trl_oracle.sh makes it")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return case.make_config(tmp_path_factory.mktemp("pairs"), case.sft("one"), case.sft("two"))


@pytest.fixture(scope="module")
def run_world(config: Path) -> World:
    return worlds(config.parent, lambda size: cases_of(config, LAYOUTS[size]))


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [record for record in records(run, "dpo") if "loss" in record]


def assert_equals_trl(found: list[dict[str, Any]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected) == case.STEPS
    for own, trl in zip(found, expected, strict=True):
        # Of rewards that are 0, rounding says which is larger.
        keys = [key for key in case.KEYS if own["step"] > 1 or key != "rewards/accuracies"]
        assert [own[key] for key in keys] == pytest.approx(
            [trl[key] for key in keys], rel=1e-5, abs=1e-5
        ), own["step"]


@pytest.mark.parametrize(("world_size", "layout"), layout_params(LAYOUTS))
def test_beside_others_it_equals_trl(run_world: World, world_size: int, layout: str) -> None:
    expected = json.loads(case.RECORDED.read_text())
    assert_equals_trl(steps_of(run_world(world_size) / layout), expected)


def test_what_is_told(run_world: World) -> None:
    before, after = (r for r in records(run_world(1) / "one process", "dpo") if "eval_loss" in r)
    assert before["eval_loss"] == pytest.approx(0.693147, abs=1e-6)
    assert after["eval_loss"] < 0.5
    assert after["eval_rewards/margins"] == pytest.approx(
        after["eval_rewards/chosen"] - after["eval_rewards/rejected"]
    )
    job = summary_of(run_world(1) / "one process")["jobs"]["dpo"]
    assert job["scores_after"]["rewards/accuracies"] > 0.95


def test_one_sha256_alone_beside_others_and_after_kills(tmp_path: Path) -> None:
    dropout = {"lora": case.LORA | {"dropout": 0.1}, "portion_tokens": 128}
    alone = case.make_config(tmp_path, deterministic=True, checkpoint_every_steps=2)
    document = json.loads(alone.read_text())
    document["jobs"][0] |= dropout
    alone.write_text(json.dumps(document))
    others = [case.sft("one"), case.sft("two", batch_size=3, portion_tokens=100)]
    beside = tmp_path / "beside.json"
    beside.write_text(json.dumps(document | {"jobs": [others[0], *document["jobs"], others[1]]}))
    run_cases(
        1,
        [
            entry(alone, tmp_path / "alone"),
            entry(beside, tmp_path / "beside"),
            # Before the first checkpoint all begins again; then the reference is the kept one.
            entry(beside, tmp_path / "killed", kill=["step", 4]),
            entry(beside, tmp_path / "killed", kill=["step", 16]),
            entry(alone, tmp_path / "killed"),
        ],
        tmp_path / "cases.json",
    )
    digests = {digest(tmp_path / name) for name in ("alone", "beside", "killed")}
    assert len(digests) == 1
    document["jobs"][0] |= {"max_steps": 2 * case.STEPS}
    alone.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="for all pairs of its steps and of"):
        train_until(alone, tmp_path / "killed")
    (tmp_path / "killed/jobs/dpo/reference.safetensors").unlink()
    with pytest.raises(ValueError, match="must hold the log-probabilities of the job's start, got"):
        train_until(alone, tmp_path / "killed")


def digest(run: Path) -> str:
    adapter = (run / "jobs/dpo/adapter/adapter_model.safetensors").read_bytes()
    steps = [{k: v for k, v in step.items() if k != "time_s"} for step in steps_of(run)]
    assert len(steps) == case.STEPS
    return hashlib.sha256(json.dumps(steps).encode() + adapter).hexdigest()


@TRL
@pytest.mark.parametrize("sft_weight", [None, 0.3])
def test_against_trl_itself(sft_weight: float | None, tmp_path: Path) -> None:
    config = case.make_config(tmp_path)
    document = json.loads(config.read_text())
    document["jobs"][0]["preference"] = {"sft_weight": sft_weight}
    config.write_text(json.dumps(document))
    command = [os.environ["TRL_PYTHON"], "-m", "tests.helpers.oracle_preference"]
    subprocess.run([*command, str(config), str(tmp_path / "log.json")], check=True, cwd=REPO)
    log = json.loads((tmp_path / "log.json").read_text())
    run_cases(1, [entry(config, tmp_path / "out")], tmp_path / "cases.json")
    assert_equals_trl(steps_of(tmp_path / "out"), log)
    if sft_weight is None:
        recorded = json.loads(case.RECORDED.read_text())
        for ours, theirs in zip(recorded, log, strict=True):
            assert ours == pytest.approx({key: theirs[key] for key in case.KEYS}, rel=1e-6)
