"""`/v1/sweeps`: submits, answers, ends; and the commands that ask a service by its address."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.commands import Tlora
from tests.helpers.http_service import Api, job, listening, put_file
from tlora_megatron.client import Client
from tlora_megatron.service.store import JobState

OVER = {"optimizer.lr": [1e-4, 1e-3, 1e-2]}


def sweep(name: str = "a", **more: Any) -> dict[str, Any]:
    own = {key: value for key, value in job(name).items() if key != "base_model"}
    own |= {"data": {"train": "rows.jsonl", "eval": "rows.jsonl"}, "max_steps": 10}
    stop = {"keep": 0.34, "at": [0.1]}
    return {
        "base_model": job()["base_model"],
        "job": own,
        "sweep": {"over": OVER, "stop": stop},
    } | more


def test_a_sweep_is_submitted_once_shown_and_ended(api: Api) -> None:
    put_file(api)
    client = api.client()
    headers = {"Idempotency-Key": "night"}
    first = client.post("/v1/sweeps", content=yaml.safe_dump(sweep()), headers=headers)
    assert first.status_code == 201, first.text
    again = client.post("/v1/sweeps", content=yaml.safe_dump(sweep()), headers=headers)
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
    shown = client.get("/v1/sweeps/a").json()
    assert shown["states"] == {"validating": 3}
    assert [row["trial"] for row in shown["ranking"]] == ["a-0", "a-1", "a-2"]
    assert [row["settings"]["optimizer.lr"] for row in shown["ranking"]] == OVER["optimizer.lr"]
    schedule = api.store.jobs.get(shown["ranking"][0]["job"]).schedule
    assert (schedule["sweep"], schedule["gpus"]) == (shown["id"], 1)
    assert client.post("/v1/sweeps", json=sweep("b")).status_code == 201
    names = [one["name"] for one in client.get("/v1/sweeps").json()["sweeps"]]
    assert sorted(names) == ["a", "b"]
    for call in (api.client("bob").get, api.client("bob").delete):
        assert call("/v1/sweeps/a").status_code == 404
    assert api.client("bob").get("/v1/sweeps").json()["sweeps"] == []
    assert client.delete("/v1/sweeps/a").status_code == 200
    wishes = {job.name: job.wish for job in api.store.jobs.page(tenant="ann")}
    assert wishes == {
        **dict.fromkeys(("a-0", "a-1", "a-2"), "cancel"),
        "b-0": None,
        "b-1": None,
        "b-2": None,
    }


@pytest.mark.parametrize(
    ("document", "told"),
    [
        (sweep(sweep={"over": {"lora.rnak": [1]}}), "did you mean lora.rank?"),
        (sweep(sweep={"over": OVER, "stop": {"keep": 0.5, "at": [0.91]}}), "of their own before"),
        (sweep(sweep={"over": {"lora.rank": [0]}}), "rank must be at least 1, got 0 (job a-0)"),
        (sweep(job={"name": "a", "data": {"train": "no"}}), "needs data.eval"),
        (sweep(jobs=[]), "jobs is not a known key; did you mean job?"),
    ],
)  # fmt: skip
def test_mistakes_make_no_job(api: Api, document: dict[str, Any], told: str) -> None:
    put_file(api)
    answer = api.client().post("/v1/sweeps", json=document)
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]
    assert api.store.jobs.page() == []


def test_commands_reach_a_service_by_its_address(
    api: Api, tmp_path: Path, tlora: Tlora, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLORA_TOKEN", api.token())
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump(sweep("rates")))
    with listening(api.app) as address:
        told = tlora("sweep", file, "--service", address)
        assert "rates: 3 trials: 3 validating" in told
        told = tlora("sweep", file, "--service", address, "--dry-run", code=2)
        assert "--dry-run must be left out with --service" in told
        assert "rates-2" in tlora("jobs", "--group", "rates", "--service", address)
        with Client(address) as client:
            (found,) = client.sweeps()
            assert client.sweep(found["id"])["name"] == "rates"
        told = tlora(
            "adapters", "rates", "--best", "--out", tmp_path / "x", "--service", address, code=2
        )
        assert "sweep rates must have a trial that has finished" in told
        tlora("cancel", "--group", "rates", "--yes", "--service", address)
    assert {job.wish for job in api.store.jobs.page(states=[JobState.VALIDATING])} == {"cancel"}
