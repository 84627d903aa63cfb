"""The policy of a service makes its moves on real gangs, and no job's training notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.elastic_worker import STEPS, documents
from tests.helpers.gang_driver import digest, quickstart_base
from tests.helpers.oracle import OracleResult, assert_equals_alone
from tests.helpers.scenario import exported, losses
from tests.helpers.scenario_worlds import entry, run_cases
from tests.helpers.standing_world import forked_result

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
        factors = dict(exported(alone, name, BASE))
        expected = OracleResult(losses=losses(alone, name), grad_norms=[], lrs=[], factors=factors)
        assert len(losses(root, job)) == steps, "no step is trained twice"
        assert_equals_alone(losses(root, job), exported(root, job, BASE), expected, name)
        if name in ("small", "other"):  # they had one process, as alone
            file = "adapter/adapter_model.safetensors"
            assert losses(root, job) == expected.losses
            assert digest(root / "jobs" / job / file) == digest(alone / "jobs" / name / file)
