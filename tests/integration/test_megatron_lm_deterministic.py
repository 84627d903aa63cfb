"""`run.deterministic` under the flag: a job's bytes do not tell who was beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.scenario import losses
from tests.integration.test_megatron_lm import Launch, launch, root, summary

__all__ = ["launch", "root"]  # fixtures

pytestmark = [pytest.mark.megatron_lm, pytest.mark.slow]


def test_a_job_alone_has_the_bytes_of_the_job_in_company(launch: Launch, root: Path) -> None:
    document = json.loads((root / "jobs.json").read_text())
    run = {**document.get("run", {}), "deterministic": True}
    job = {**document["jobs"][-1], "portion_tokens": 60}
    found = []
    for name, jobs in (("alone", [job]), ("beside", [*document["jobs"][:-1], job])):
        config = root / f"deterministic {name}.json"
        config.write_text(json.dumps({**document, "run": run, "jobs": jobs}))
        flags = "--tensor-model-parallel-size 2 --sequence-parallel"
        out, _ = launch(f"deterministic {name}", flags, config=config.name)
        said = summary(out)["run"]["deterministic"]
        assert said["layout"]["lora_sharding"] == "s_lora"
        adapter = out / "jobs" / job["name"] / "adapter" / "adapter_model.safetensors"
        found.append((said, losses(out, job["name"]), adapter.read_bytes()))
    assert found[0] == found[1]
