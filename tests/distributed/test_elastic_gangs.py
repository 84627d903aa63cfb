"""The policy of a service makes its moves on real gangs, and no job's training notices."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.helpers.elastic_worker import STEPS, documents, expert_documents
from tests.helpers.gang_driver import digest, quickstart_base
from tests.helpers.oracle import OracleResult, assert_equals_alone
from tests.helpers.scenario import exported, losses, oracle_results
from tests.helpers.scenario_worlds import entry, run_cases
from tests.helpers.standing_world import forked_result
from tests.helpers.tiny_models import make_tiny_model
from tlora_megatron.config.load import read_config
from tlora_megatron.model.spec import read_model_spec
from tlora_megatron.runtime.sampling.adapters import read_checkpoint

BASE = Path(quickstart_base()["path"])


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("elastic") / "service"
    return root, forked_result("-m", "tests.helpers.elastic_worker", root)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the same jobs, each trained by a run of its own in one process."""
    out = tmp_path_factory.mktemp("alone")
    run = {"output_dir": str(out), "tensorboard": False, "micro_batch_tokens": 4096}
    cases = []
    for name, job in documents().items():
        document = {"base_model": quickstart_base(), "run": run, "jobs": [job]}
        config = out / f"{name}.yaml"
        config.write_text(yaml.safe_dump(document))
        cases.append(entry(config, out))
    run_cases(1, cases, out / "cases.json")
    return out


def test_a_long_job_shrinks_grows_and_is_paused(service: tuple[Path, dict[str, Any]]) -> None:
    _, told = service
    made = [(m["job"], m["kind"], m["gpus_before"], m["gpus_after"]) for m in told["moves"]]
    assert made == [("long", "shrink", 2, 1), ("long", "grow", 1, 2), ("long", "pre-empt", 2, 2)]
    assert told["fused"] == [["other", "small"]]
    shrunk, grown, paused = told["moves"]
    assert 0 < shrunk["step"] < grown["step"] <= paused["step"] < STEPS["long"]
    assert ["wide", 2, STEPS["wide"]] in told["stays"], "it had the GPUs of the paused job"


def test_jobs_are_trained_as_if_alone(service: tuple[Path, dict[str, Any]], alone: Path) -> None:
    root, told = service
    for name, steps in STEPS.items():
        job = told["ids"][name]
        expected = trained(alone, name)
        assert len(losses(root, job)) == steps, "no step is trained twice"
        assert_equals_alone(losses(root, job), exported(root, job, BASE), expected, name)
        if name in ("small", "other"):  # they had one process, as alone
            file = "adapter/adapter_model.safetensors"
            assert losses(root, job) == expected.losses
            assert digest(root / "jobs" / job / file) == digest(alone / "jobs" / name / file)


@pytest.fixture(scope="module")
def over_experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """A base with four experts a layer, the service's folder, and what became of its jobs."""
    folder = tmp_path_factory.mktemp("experts")
    vocabulary = {"vocab_size": read_model_spec(BASE / "config.json").vocab_size}
    shape = {"num_hidden_layers": 2, "seed": 1, **vocabulary}
    base = make_tiny_model(folder / "base", "qwen3_moe", **shape)
    for file in BASE.glob("*token*"):
        shutil.copy(file, base)
    root = folder / "service"
    return base, root, forked_result("-m", "tests.helpers.elastic_worker", root, base)


def test_over_routed_experts_jobs_get_what_peft_gives_them(
    over_experts: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    base, root, told = over_experts
    assert [(m["job"], m["kind"]) for m in told["moves"]] == [
        ("long", kind) for kind in ("shrink", "grow", "pre-empt")
    ]
    assert told["layouts"] == ["1", "2"], "gangs of two processes shared the experts"
    jobs = list(expert_documents().values())
    document = {"base_model": {"path": str(base), "dtype": "float32"}, "jobs": jobs}
    expected = oracle_results(read_config(document, tmp_path, output_dir=str(tmp_path)))
    spec = read_model_spec(base / "config.json")
    for name, steps in STEPS.items():
        job = told["ids"][name]
        assert len(losses(root, job)) == steps, "no step is trained twice"
        assert_equals_alone(losses(root, job), exported(root, job, base), expected[name], name)
        # What is sampled from while a job trains is what it exports.
        saved = max((root / "jobs" / job / "checkpoints").iterdir())
        sampled, final = read_checkpoint(saved, model=spec).factors, exported(root, job, base)
        assert all(torch.equal(sampled[key], value) for key, value in final.items())


def trained(out: Path, name: str) -> OracleResult:
    factors = dict(exported(out, name, BASE))
    return OracleResult(losses=losses(out, name), grad_norms=[], lrs=[], factors=factors)
