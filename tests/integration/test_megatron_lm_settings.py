"""Settings under Megatron-LM's own trainer: determinism, sharding, and the harness of layouts."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.helpers.launch import python
from tests.helpers.megatron_lm import SP, assert_equals_oracle
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
        out, _ = launch(f"deterministic {name}", SP, config=config.name)
        said = summary(out)["run"]["deterministic"]
        assert said["layout"]["lora_sharding"] == "s_lora"
        adapter = out / "jobs" / job["name"] / "adapter" / "adapter_model.safetensors"
        found.append((said, losses(out, job["name"]), adapter.read_bytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize("sharding", ["rank_exchange", "s_lora"])
def test_losses_and_weights_equal_the_oracle(sharding: str, launch: Launch, root: Path) -> None:
    document = json.loads((root / "jobs.json").read_text())
    config = root / f"{sharding}.json"
    config.write_text(json.dumps({**document, "parallel": {"lora_sharding": sharding}}))
    out, _ = launch(sharding, SP, config=config.name)
    assert summary(out)["run"]["layout"]["lora_sharding"] == sharding
    assert_equals_oracle(out, root)


LAYOUTS = ("local TP2+SP", "local PP2 full recompute")


def test_two_layouts_over_gloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    rows = tmp_path / "rows.csv"
    options = ("--layouts", ",".join(LAYOUTS), "--csv", rows)
    output = python("-m", "scripts.bench.megatron_lm", *options)
    assert "all 2 layouts passed" in output
    with rows.open() as file:
        measured = list(csv.DictReader(file))
    assert {(row["layout"], row["job"]) for row in measured} == {
        (layout, job) for layout in LAYOUTS for job in ("attention", "mlp", "everything", "outputs")
    }
    assert all(float(row["max_rel_loss_error"]) < 1e-5 for row in measured)
