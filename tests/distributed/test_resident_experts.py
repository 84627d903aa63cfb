"""Jobs over routed experts join, leave, come back and fail; each gets what PEFT gives it alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from tests.helpers.expert_jobs import LORA, SHARED, expert_jobs
from tests.helpers.oracle import OracleResult
from tests.helpers.resident_case import Command, Resident, resident
from tests.helpers.scenario import NUM_STEPS, assert_equals_oracle, exported, losses, oracle_of
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.runtime.sampling.adapters import read_checkpoint

UNFUSED = LORA | {"outputs": {"target_modules": ["o_proj", "down_proj"], "expert_rank": 4}}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one process": ("qwen3_moe", 1, {}),
    "EP2": ("qwen3_moe", 2, {"ep_size": 2}),
    "TP2 SP": ("qwen3_moe", 2, {"tp_size": 2, "sequence_parallel": True, "expert_tp_size": 1}),
    "shared, EP2": ("qwen2_moe", 2, {"ep_size": 2}),
}


class Gang(NamedTuple):
    opened: Resident
    oracle: dict[str, OracleResult]


@pytest.fixture(scope="module", params=LAYOUTS)
def gang(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gang]:
    model_type, num_ranks, parallel = LAYOUTS[request.param]
    root = tmp_path_factory.mktemp("resident")
    specs = expert_jobs(SHARED if model_type == "qwen2_moe" else UNFUSED)
    shape: dict[str, Any] = {"specs": specs, "model_type": model_type}
    with resident(root, num_ranks, parallel, **shape) as opened:
        yield Gang(opened, oracle_of(root / "config.json"))


def test_all_get_what_they_get_alone(gang: Gang) -> None:
    opened, oracle = gang
    too_fast = opened.documents["outputs"]["optimizer"] | {"lr": 1e38}
    commands = [
        *opened.coming(1, "attention", "attention"),
        *opened.coming(2, "everything", "everything"),
        *opened.coming(3, "ill", "outputs", on_nonfinite="fail", optimizer=too_fast),
        *opened.coming(4, "mlp", "mlp"),
        leaving(2, "everything", behind_step=2, save=True),
        *opened.coming(4, "everything", "everything"),
        *opened.coming(5, "cancelled", "everything"),
        leaving(5, "cancelled", behind_step=1, save=False),
        *opened.coming(6, "outputs", "outputs"),
    ]
    events = opened.run(commands)
    last = {job: (kind, body) for kind, job, body in events if job is not None}
    for name in LORA:
        finished = {"status": "finished", "reason": None, "step": NUM_STEPS}
        assert last[name] == ("ended", finished)
        out, base = opened.folder / "out", opened.folder / "base"
        assert_equals_oracle(out, name, oracle[name], base)
        # What is sampled from while a job trains is what it exports.
        saved = max((opened.job_dir(name) / "checkpoints").iterdir())
        sampled = read_checkpoint(saved, model=read_model_spec(base / "config.json")).factors
        assert all(torch.equal(sampled[k], v) for k, v in exported(out, name, base).items())
    assert last["ill"][1]["status"] == "failed"
    assert last["cancelled"][0] == "left"
    expected = oracle["everything"].losses
    lost = losses(opened.folder / "out", "cancelled")
    assert 0 < len(lost) < NUM_STEPS
    assert lost == pytest.approx(expected[: len(lost)], rel=1e-5)
    (back,) = [body["step"] for kind, job, body in events if (kind, job) == ("left", "everything")]
    assert 0 < back < NUM_STEPS, "it came back in the middle"


def test_what_cannot_be_promised_is_refused(gang: Gang) -> None:
    opened = gang.opened
    lora = opened.documents["attention"]["lora"] | {"target_modules": ["linear_fc2"]}
    commands = opened.coming(1, "portions", "attention", portion_tokens=100)
    commands += opened.coming(1, "fused", "attention", lora=lora)
    told = {job: body["error"] for kind, job, body in opened.run(commands) if kind == "refused"}
    assert told["portions"].startswith("portion_tokens of job portions must be absent over a base")
    assert "job 'fused' must" in told["fused"]
    assert "experts.linear_fc2" in told["fused"]


def leaving(look: int, name: str, *, behind_step: int, save: bool) -> Command:
    body = {"save": save}
    return look, {"kind": "leave", "job": name, "body": body, "behind_step": behind_step}
