"""Bases with routed experts in a service: what jobs and gangs over one are, and what they cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.scenario import make_scenario
from tests.helpers.tiny_models import TinyModelType, tiny_config
from tlora_megatron.config.job import EXPERT_TARGETS, SHARED_EXPERT_TARGETS
from tlora_megatron.config.load import read_gang_config
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.hardware import load_profile
from tlora_megatron.runtime.planning.plan_inputs import base_shape
from tlora_megatron.service.control.pricing import Pricing, planned_base
from tlora_megatron.service.control.records import LiveJob, gang_spec, plan_of, stats_of, take_stats
from tlora_megatron.service.home import Home
from tlora_megatron.service.prepare.submission import (
    Outcome,
    PrepareRules,
    Refused,
    Validated,
    read_submissions,
)
from tlora_megatron.service.prepare.worker import validate
from tlora_megatron.service.settings import Settings
from tlora_megatron.service.store import JobState

OUTER = {
    "rank": 6,
    "expert_rank": 3,
    "expert_sharing": "outer",
    "target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"],
}
Validate = Callable[..., Outcome]


@pytest.fixture
def submit(tmp_path: Path, home: Home) -> Validate:
    """Submits a job over a base of some kind; returns what validation says of it."""

    def submitted(model_type: TinyModelType, **job: Any) -> Outcome:
        document = {"name": "a", "lora": OUTER, "batch_size": 2, **job}
        path = make_scenario(tmp_path / "jobs", [document], num_layers=1, model_type=model_type)
        rules = PrepareRules(root=str(home.root), micro_batch_tokens=256)
        return validate("j1", read_submissions(path).submissions[0], rules)

    return submitted


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_a_job_is_what_the_planner_and_gangs_know(submit: Validate, model_type: str) -> None:
    found = submit(model_type)
    assert isinstance(found, Validated)
    load = found.load()
    assert load.targets == ("q_proj", *EXPERT_TARGETS)
    assert (load.rank, load.expert_rank, load.shares_outer) == (6, 3, True)
    assert found.document["portion_tokens"] is None, "over experts portions promise nothing"
    live = LiveJob(id="j1", number=1, name="a", tenant="local", base="b", state=JobState.QUEUED)
    take_stats(live, json.loads(json.dumps(stats_of(load, tokens=1.0, num_steps=1))))
    assert live.load is not None
    assert (live.load.rank, live.load.expert_rank, live.load.shares_outer) == (16, 4, True)


def test_beside_a_shared_expert(submit: Validate) -> None:
    found = submit("qwen2_moe", lora={"target_modules": ["q_proj", *SHARED_EXPERT_TARGETS]})
    assert isinstance(found, Validated)
    assert found.load().targets == ("q_proj", *SHARED_EXPERT_TARGETS)
    found = submit("qwen2_moe")
    assert isinstance(found, Refused)
    assert "must not name routed experts over a base with shared experts" in found.error


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen2_moe", "mixtral"])
def test_a_job_has_a_price_and_its_gang_a_plan(
    submit: Validate, repo: Path, tmp_path: Path, model_type: str
) -> None:
    found = submit(model_type, lora={"target_modules": ["q_proj", "o_proj"]})
    assert isinstance(found, Validated)
    profile = load_profile(repo / "configs/hardware/h200.json")
    pricing = Pricing(partial(planned_base, hardware=profile))
    pricing.add_base("b", {"path": str(tmp_path / "jobs/base")})
    live = LiveJob(
        id="j1", number=1, name="a", tenant="local", base="b", state=JobState.QUEUED, num_gpus=1
    )
    take_stats(live, stats_of(found.load(), tokens=found.train_tokens, num_steps=1))
    priced = pricing.price(live, 4)
    assert priced is not None
    assert priced.isolated_s > 0
    assert 0 <= pricing.speeds.residual((priced.kind,), 2) < 1
    assert live.load is not None
    plan = pricing.base("b").plan([live.load], 2)
    assert plan is not None
    assert pricing.base("b").holds([live.load], plan)
    assert pricing.base("b").memory([live.load], plan) is not None


def test_a_gang_has_the_layout_of_its_plan(tmp_path: Path) -> None:
    plan = Plan(tp_size=2, dp_size=2, ep_size=4, expert_tp_size=1, sequence_parallel=True)
    spec = gang_spec(
        name="g1",
        epoch=1,
        base_model={"path": "base"},
        plan=plan,
        gpus=[(0, gpu) for gpu in range(4)],
        root=tmp_path,
        settings=Settings(),
    )
    assert plan_of(spec) == plan
    (tmp_path / "base").mkdir()
    tiny_config("qwen3_moe").save_pretrained(tmp_path / "base")
    sections = {"base_model": spec.base_model, "parallel": spec.parallel, "run": spec.run}
    config = read_gang_config(sections, tmp_path, output_dir=tmp_path)
    assert (config.parallel.ep_size, config.parallel.expert_tp_size) == (4, 1)
    assert base_shape(config.base_model).experts is not None
