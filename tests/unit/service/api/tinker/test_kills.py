"""A process that is killed while it makes a model leaves all of it or nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.helpers.http_service import BASE, Api
from tests.helpers.launch import HANG_S, REPO
from tests.helpers.played_models import PlayedModels
from tests.unit.service.api.tinker.test_refusals import model, post, session

KILLED = """
import json, os, signal, sys
from pathlib import Path
from tests.helpers.http_service import open_api
from tlora_megatron.service.request_log import RequestLog
from tlora_megatron.service.store.sessions import Sessions

def killed(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

root, where, route, body = sys.argv[1:]
owner, _, name = where.partition(".")
setattr({"Sessions": Sessions, "RequestLog": RequestLog}[owner], name, killed)
with open_api(Path(root)) as api:
    api.client().post(f"/api/v1/{route}", json=json.loads(body))
"""


def post_and_die(api: Api, where: str, route: str, **body: Any) -> None:
    """Sends a request to another process of the service, which is killed as it calls a method."""
    words = (str(api.home.root), where, route, json.dumps(body))
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *words], cwd=REPO, capture_output=True, timeout=HANG_S
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


def test_a_kill_between_a_job_and_its_model_leaves_neither(api: Api) -> None:
    client = api.client()
    session_id = session(client)
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE}
    before = api.store.events.last()
    post_and_die(api, "Sessions.add_model", "create_model", **body)
    assert api.store.jobs.page() == []
    assert api.store.sessions.models(tenant="ann") == []
    assert api.store.events.last() == before
    assert client.get(f"/api/v1/sessions/{session_id}").json()["training_run_ids"] == []
    model_id = model(client, session_id)
    (job,), (made,) = api.store.jobs.page(), api.store.sessions.models(tenant="ann")
    assert (made.id, made.job) == (model_id, job.id)


@pytest.mark.parametrize("is_retried", [True, False])
def test_a_kill_before_the_load_of_a_model_is_made_good(api: Api, is_retried: bool) -> None:
    client, models = api.client(), PlayedModels(api.home, api.store)
    session_id = session(client)
    first = model(client, session_id)
    post(client, "save_weights", model_id=first, seq_id=1, path="mine")
    models.step()
    body = {
        "session_id": session_id,
        "model_seq_id": 1,
        "path": f"tinker://{first}/weights/mine",
        "optimizer": True,
    }
    post_and_die(api, "RequestLog.write_request", "load_weights", **body)
    made = api.store.sessions.model(f"{session_id}:train:1", tenant="ann")
    assert not (api.home.job(made.job) / "requests").exists()
    if is_retried:
        for _ in range(2):
            assert post(client, "load_weights", **body).status_code == 200
        models.step()
        assert models.ops() == ["save_state", "load_state"]
        assert len(api.store.jobs.page()) == 2
    else:
        client.post(f"/api/v1/sessions/{session_id}/finish", json={})
        assert api.store.jobs.get(made.job).wish == "cancel"
