"""`tlora serve` takes up a folder that commit b9fb101e wrote: its models train on."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.launch import HANG_S, REPO
from tests.helpers.older_service import MADE_IN, SESSION, unpack_b9fb101e
from tests.helpers.served_http import serving_http


@pytest.mark.slow
def test_models_of_an_older_service_train_on(tmp_path: Path) -> None:
    home = unpack_b9fb101e(tmp_path)
    with sqlite3.connect(home.store) as database:  # the base lies elsewhere than it did then
        database.execute("UPDATE document SET body = replace(body, ?, ?)", (MADE_IN, str(REPO)))
    database.close()
    with serving_http(home.root, tmp_path / "serve.log", "--sampler=off") as served:
        headers = {"X-API-Key": served.token("ann")}
        client = httpx.Client(base_url=f"{served.address}/api/v1/", headers=headers, timeout=HANG_S)

        def post(route: str, **body: Any) -> Any:
            found = client.post(route, json=body)
            assert found.status_code == 200, found.text
            return found.json()

        assert client.get("sessions").json()["sessions"] == [SESSION]
        model = f"{SESSION}:train:0"
        saved = post("save_weights", model_id=model, seq_id=8, path="later")["request_id"]
        told = {"type": "try_again"}
        while told["type"] == "try_again":
            told = post("retrieve_future", request_id=saved)
        assert told == {"type": "save_weights", "path": f"tinker://{model}/weights/later"}
        listed = client.get(f"training_runs/{model}/checkpoints").json()["checkpoints"]
        assert [one["checkpoint_id"] for one in listed][::2] == ["weights/kept", "weights/later"]
        client.close()
    assert "took up 2 sessions of Tinker's clients" in (tmp_path / "serve.log").read_text()
