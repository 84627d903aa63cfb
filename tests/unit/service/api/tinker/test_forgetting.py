"""What becomes of sessions long after their end, and of clients who have too many bytes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from starlette.testclient import TestClient

from tests.helpers.http_service import Api
from tests.helpers.played_models import PlayedModels
from tests.unit.service.api.openai.conftest import CHATS
from tests.unit.service.api.tinker.test_refusals import PROTO, model, post, session
from tests.unit.service.api.tinker.test_wire import datum, message
from tlora_megatron.service.api.tinker.context import TenantContext
from tlora_megatron.service.api.tinker.sessions import Reaper
from tlora_megatron.service.request_log import RequestLog
from tlora_megatron.service.settings import KEEP_SESSIONS_S
from tlora_megatron.service.store import TenantLimits, tables
from tlora_megatron.service.store.sessions import Sessions


def age(api: Api, session_id: str, seconds: float) -> None:
    """Lets a session have ended so long ago."""
    change = update(tables.session).where(tables.session.c.id == session_id)
    with api.store.database.write() as connection:
        connection.execute(change.values(ended_at=time.time() - seconds))


def look(api: Api) -> None:
    asyncio.run(Reaper(api.service).look())


def future(client: TestClient, model_id: str, seq_id: int, op: str) -> Any:
    return post(client, "retrieve_future", request_id=f"{model_id}:{seq_id}:{op}")


def folder_of_samples(api: Api, session_id: str) -> Path:
    """The folder of a session's samples, with one in it."""
    folder = TenantContext(api.service, "ann").samples(session_id)
    (folder / "0").mkdir(parents=True)
    (folder / "0" / "1.json").write_text("{}")
    return folder


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def ended(api: Api) -> tuple[str, str]:
    """A session that has ended and its model, which is saved; its last request came too late."""
    client, models = api.client(), PlayedModels(api.home, api.store)
    session_id = session(client)
    model_id = model(client, session_id)
    for seq_id in (1, 3):  # nobody sends the second
        post(client, "optim_step", model_id=model_id, seq_id=seq_id, adam_params={})
    models.step()
    client.post(f"/api/v1/sessions/{session_id}/finish", json={})
    models.step()
    assert models.ops() == ["optim_step", "save_state", "optim_step", "leave"]
    return session_id, model_id


def test_requests_are_forgotten_and_checkpoints_stay(api: Api, ended: tuple[str, str]) -> None:
    client, (session_id, model_id) = api.client(), ended
    journal = api.home.job(api.store.jobs.page()[0].id)
    age(api, session_id, KEEP_SESSIONS_S - 60)
    look(api)
    assert future(client, model_id, 1, "optim_step").json()["metrics"] == {"grad_norm": 0.5}
    age(api, session_id, KEEP_SESSIONS_S + 60)
    for _ in range(2):
        look(api)
        assert files(journal / "requests") | files(journal / "answers") == {"covered.json"}
        for seq_id in (1, 3):
            told = future(client, model_id, seq_id, "optim_step")
            assert (told.status_code, "not kept any more" in told.json()["error"]) == (410, True)
    assert future(client, model_id, 9, "optim_step").status_code == 404
    path = f"tinker://{model_id}/weights/left-2"
    (listed,) = client.get(f"/api/v1/training_runs/{model_id}/checkpoints").json()["checkpoints"]
    assert listed["tinker_path"] == path
    body = {"session_id": session(client), "model_seq_id": 0, "optimizer": True}
    assert post(client, "load_weights", **body, path=path).status_code == 200


def test_a_session_without_checkpoints_is_forgotten_whole(api: Api, ended: tuple[str, str]) -> None:
    client, (session_id, model_id) = api.client(), ended
    samples = folder_of_samples(api, session_id)
    found = client.delete(f"/api/v1/training_runs/{model_id}/checkpoints/weights/left-2")
    assert found.status_code == 200, found.text
    other = session(client)
    age(api, session_id, KEEP_SESSIONS_S + 60)
    look(api)
    assert [row.id for row in api.store.sessions.all()] == [other]
    assert not samples.parent.exists()
    assert client.get(f"/api/v1/sessions/{session_id}").status_code == 404
    assert future(client, model_id, 1, "optim_step").status_code == 410
    assert future(api.client("bob"), model_id, 1, "optim_step").status_code == 404
    late = post(client, "optim_step", model_id=model_id, seq_id=4, adam_params={})
    assert late.status_code == 404


def test_the_requests_of_a_job_that_has_not_left_stay(api: Api) -> None:
    client, models = api.client(), PlayedModels(api.home, api.store)
    session_id = session(client)
    model_id = model(client, session_id)
    models.step()
    post(client, "optim_step", model_id=model_id, seq_id=1, adam_params={})
    client.post(f"/api/v1/sessions/{session_id}/finish", json={})
    age(api, session_id, 2 * KEEP_SESSIONS_S)
    look(api)
    assert future(client, model_id, 1, "optim_step").json()["type"] == "try_again"
    models.step()
    assert models.ops() == ["optim_step", "save_state", "leave"]
    assert future(client, model_id, 1, "optim_step").json()["type"] == "optim_step"


def test_a_removal_that_was_cut_off_is_finished(
    api: Api, ended: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, (session_id, model_id) = api.client(), ended
    client.delete(f"/api/v1/training_runs/{model_id}/checkpoints/weights/left-2")
    folder_of_samples(api, session_id)
    age(api, session_id, KEEP_SESSIONS_S + 60)
    with monkeypatch.context() as killed:
        killed.setattr(Sessions, "remove", lambda *_: 1 / 0)
        look(api)
    assert [row.id for row in api.store.sessions.all()] == [session_id]
    look(api)
    assert api.store.sessions.all() == []
    assert api.store.sessions.models(tenant="ann") == []
    assert list((api.home.tenant("ann") / "tinker").iterdir()) == []


def test_requests_count_among_the_bytes_of_a_tenant(api: Api) -> None:
    client, models = api.client(), PlayedModels(api.home, api.store)
    model_id = model(client, session(client))
    (job,) = api.store.jobs.page()
    journal = RequestLog(api.home.job(job.id))

    def send(seq_id: int) -> Any:
        body = message(datum(*range(200)))
        body.model_id, body.seq_id = model_id, seq_id
        return client.post(
            "/api/v1/forward_backward", content=body.SerializeToString(), headers=PROTO
        )

    assert send(1).status_code == 200
    one = journal.held_bytes()
    api.store.tenants.set_limits("ann", TenantLimits(upload_bytes=2 * one + 100))
    assert send(2).status_code == 200
    refused = send(3)
    assert refused.status_code == 402
    assert "the files and requests of a tenant must have at most" in refused.json()["error"]
    assert journal.state(3) == "unknown"
    assert send(2).status_code == 200, "a retry has its room already"
    step = post(client, "optim_step", model_id=model_id, seq_id=3, adam_params={})
    assert step.status_code == 200, "what was sent can always be taken"
    api.service.gate._known.clear()  # it knows the limits of a minute ago
    sent = client.post(
        "/v1/files", data={"purpose": "fine-tune"}, files={"file": ("chats.jsonl", CHATS)}
    )
    assert sent.status_code in (413, 429), sent.text
    assert api.store.uploads.bytes_of("ann") == 0
    models.step()
    journal.prune(3)
    for number in (1, 2, 3):
        journal.drop_answer(number)
    assert send(4).status_code == 200
    assert send(4).json()["request_id"] == f"{model_id}:4:forward_backward"
    models.step()
    assert models.ops() == [
        "forward_backward",
        "forward_backward",
        "optim_step",
        "forward_backward",
    ]
