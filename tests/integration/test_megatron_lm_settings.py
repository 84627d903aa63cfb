"""Settings under Megatron-LM's own trainer: determinism, sharding, and the harness of layouts."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.helpers.launch import python
from tests.helpers.megatron_lm import SP, assert_equals_oracle
from tests.helpers.scenario import assert_same_bits, summary_of
from tests.integration.test_megatron_lm import NAMES, Launch, launch, root, variant

__all__ = ["launch", "root"]  # fixtures

pytestmark = [pytest.mark.megatron_lm, pytest.mark.slow]


def test_a_job_alone_has_the_bytes_of_the_job_in_company(launch: Launch, root: Path) -> None:
    job, run = NAMES[-1], {"deterministic": True}
    change = {job: {"portion_tokens": 60}}
    outs = {}
    for name, jobs in (("alone", (job,)), ("beside", NAMES)):
        config = variant(root, f"deterministic {name}", jobs, change, run=run)
        outs[name], _ = launch(f"deterministic {name}", SP, config=config)
    alone, beside = (summary_of(out)["run"]["deterministic"] for out in outs.values())
    assert alone == beside
    assert alone["layout"]["lora_sharding"] == "s_lora"
    assert_same_bits(outs["alone"], outs["beside"], job)


@pytest.mark.parametrize("sharding", ["rank_exchange", "s_lora"])
def test_losses_and_weights_equal_the_oracle(sharding: str, launch: Launch, root: Path) -> None:
    config = variant(root, sharding, parallel={"lora_sharding": sharding})
    out, _ = launch(sharding, SP, config=config)
    assert summary_of(out)["run"]["layout"]["lora_sharding"] == sharding
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
        (layout, job) for layout in LAYOUTS for job in NAMES
    }
    assert all(float(row["max_rel_loss_error"]) < 1e-5 for row in measured)
