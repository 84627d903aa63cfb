"""Requests of `tinker` clients that come at once or into a kill; sessions that ended long ago."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from starlette.requests import Request

from tests.helpers.http_service import BASE, Api, bearer
from tests.helpers.launch import HANG_S, REPO
from tests.helpers.tinker.raw import Raw, datum, message
from tests.unit.service.api.openai.conftest import CHATS
from tlora_megatron.service.api.tinker import models, training
from tlora_megatron.service.api.tinker.context import TenantContext
from tlora_megatron.service.api.tinker.sessions import Reaper, is_local
from tlora_megatron.service.request_log import RequestLog
from tlora_megatron.service.settings import KEEP_SESSIONS_S
from tlora_megatron.service.store import TenantLimits, tables
from tlora_megatron.service.store.tenants import Sessions


def test_a_retry_beside_its_first_request_does_not_make_the_model_anew(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, submit = [], models.submit

    async def slow(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs["key"])
        while len(asked) < 3:
            await asyncio.sleep(0.001)
        return await submit(*args, **kwargs)

    monkeypatch.setattr(models, "submit", slow)
    body = {"session_id": Raw(api).session(), "model_seq_id": 0, "base_model": BASE}

    async def send() -> list[Any]:
        async with api.async_client() as client:
            calls = [client.post("/api/v1/create_model", json=body) for _ in range(3)]
            return await asyncio.gather(*calls)

    answers = asyncio.run(send())
    assert [answer.status_code for answer in answers] == [200] * 3
    (job,), (made,) = api.store.jobs.page(), api.store.sessions.models(tenant="ann")
    assert made.job == job.id


def test_a_tenant_s_passes_wait_for_their_turn(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    at_work, most = [], []

    def take(*_: Any) -> dict[str, Any]:
        at_work.append(1)
        most.append(len(at_work))
        time.sleep(0.02)
        at_work.pop()
        return {}

    monkeypatch.setattr(training, "_take_pass", take)

    async def send() -> None:
        async with api.async_client() as client:
            calls = [client.post("/api/v1/forward_backward", content=b"x") for _ in range(20)]
            await asyncio.gather(*calls)

    asyncio.run(send())
    assert len(most) == 20
    assert max(most) <= training.AT_ONCE


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "Via", "X-Real-IP"])
def test_a_client_behind_a_proxy_of_this_host_is_not_local(header: str) -> None:
    scope: dict[str, Any] = {"type": "http", "client": ("127.0.0.1", 1), "headers": []}
    assert is_local(Request(scope))
    assert not is_local(Request({**scope, "headers": [(header.lower().encode(), b"x")]}))


def test_a_revoked_token_s_addresses_end_with_it(api: Api, client: Raw) -> None:
    model_id = client.model()
    client.post("save_weights", model_id=model_id, seq_id=1, path="mine")
    client.models.step()
    made = api.store.tokens.make("ann")
    path = f"/api/v1/training_runs/{model_id}/checkpoints/weights/mine/archive"
    url = client.http.get(path, headers=bearer(made.secret)).json()["url"]
    stranger = api.client(None)
    assert stranger.get(url).status_code == 200
    api.store.tokens.revoke(made.token.id)
    assert stranger.get(url).status_code == 401


def test_what_the_service_can_names_the_dtype_of_training_and_sampling(client: Raw) -> None:
    (model,) = client.get("get_server_capabilities").json()["supported_models"]
    assert (model["model_name"], model["dtype"]) == (BASE, "bfloat16")


def test_a_future_of_another_kind_than_its_request_is_none(client: Raw) -> None:
    model_id = client.model()
    client.step(model_id, 1)
    client.post("save_weights_for_sampler", model_id=model_id, seq_id=2, path="mine")
    client.models.step()
    for future in ("1:save_weights", "1:save_weights_for_session", "2:save_weights_for_session"):
        found = client.post("retrieve_future", request_id=f"{model_id}:{future}")
        assert found.status_code == 404, found.text


def test_a_save_whose_ttl_is_refused_saves_nothing(client: Raw) -> None:
    model_id = client.model()
    body = {"model_id": model_id, "seq_id": 1, "path": "mine", "ttl_seconds": 1}
    assert client.post("save_weights", **body).status_code == 422
    client.models.step()
    assert client.models.ops() == []


def test_a_model_of_which_much_waits_takes_no_large_pass(
    client: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "MOST_WAITING_BYTES", 100)
    monkeypatch.setattr(training, "LARGE_BYTES", 0)
    model_id = client.model()

    def send(seq_id: int) -> int:
        sent = client.forward_backward(model_id, seq_id, message(datum(*range(30))))
        return sent.status_code

    assert [send(1), send(2)] == [200, 429]
    client.models.step()
    assert send(2) == 200


def test_a_model_of_a_session_that_has_just_ended_is_not_made(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, client = models.submit, Raw(api)
    session_id = client.session()

    async def late(*args: Any, **kwargs: Any) -> Any:
        api.store.sessions.end(session_id, "its client has finished")
        return await submit(*args, **kwargs)

    monkeypatch.setattr(models, "submit", late)  # the session went on when the request came
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE}
    assert client.post("create_model", **body).status_code == 410
    assert api.store.jobs.page() == []
    assert api.store.sessions.models(tenant="ann") == []


KILLED = """
import json, os, signal, sys
from pathlib import Path
from tests.helpers.http_service import open_api
from tlora_megatron.service.request_log import RequestLog
from tlora_megatron.service.store.tenants import Sessions

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


def test_a_kill_between_a_job_and_its_model_leaves_neither(api: Api, client: Raw) -> None:
    session_id = client.session()
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE}
    before = api.store.events.last()
    post_and_die(api, "Sessions.add_model", "create_model", **body)
    assert api.store.jobs.page() == []
    assert api.store.sessions.models(tenant="ann") == []
    assert api.store.events.last() == before
    assert client.get(f"sessions/{session_id}").json()["training_run_ids"] == []
    model_id = client.model(session_id)
    (job,), (made,) = api.store.jobs.page(), api.store.sessions.models(tenant="ann")
    assert (made.id, made.job) == (model_id, job.id)


def test_a_kill_before_the_load_of_a_model_is_made_good(api: Api, client: Raw) -> None:
    session_id = client.session()
    first = client.model(session_id)
    client.post("save_weights", model_id=first, seq_id=1, path="mine")
    client.models.step()
    body = {
        "session_id": session_id,
        "model_seq_id": 1,
        "path": f"tinker://{first}/weights/mine",
        "optimizer": True,
    }
    post_and_die(api, "RequestLog.write_request", "load_weights", **body)
    made = api.store.sessions.model(f"{session_id}:train:1", tenant="ann")
    assert not (api.home.job(made.job) / "requests").exists()
    for _ in range(2):
        assert client.post("load_weights", **body).status_code == 200
    client.models.step()
    assert client.models.ops() == ["save_state", "load_state"]
    assert len(api.store.jobs.page()) == 2


def age(api: Api, session_id: str, seconds: float) -> None:
    """Lets a session have ended so long ago."""
    change = update(tables.session).where(tables.session.c.id == session_id)
    with api.store.database.write() as connection:
        connection.execute(change.values(ended_at=time.time() - seconds))


def look(api: Api) -> None:
    asyncio.run(Reaper(api.service).look())


def folder_of_samples(api: Api, session_id: str) -> Path:
    """The folder of a session's samples, with one in it."""
    folder = TenantContext(api.service, "ann").samples(session_id)
    (folder / "0").mkdir(parents=True)
    (folder / "0" / "1.json").write_text("{}")
    return folder


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def ended(client: Raw) -> tuple[str, str]:
    """A session that has ended and its model, which is saved; its last request came too late."""
    session_id = client.session()
    model_id = client.model(session_id)
    for seq_id in (1, 3):  # nobody sends the second
        client.step(model_id, seq_id)
    client.models.step()
    client.finish(session_id)
    client.models.step()
    assert client.models.ops() == ["optim_step", "save_state", "optim_step", "leave"]
    return session_id, model_id


def test_requests_are_forgotten_and_checkpoints_stay(api: Api, ended: tuple[str, str]) -> None:
    client, (session_id, model_id) = Raw(api), ended
    folder = api.home.job(api.store.jobs.page()[0].id)
    age(api, session_id, KEEP_SESSIONS_S - 60)
    look(api)
    assert client.future(model_id, 1).json()["metrics"] == {"grad_norm": 0.5}
    age(api, session_id, KEEP_SESSIONS_S + 60)
    for _ in range(2):
        look(api)
        assert files(folder / "requests") | files(folder / "answers") == {"covered.json"}
        for seq_id in (1, 3):
            told = client.future(model_id, seq_id)
            assert (told.status_code, "not kept any more" in told.json()["error"]) == (410, True)
    assert client.future(model_id, 9).status_code == 404
    path = f"tinker://{model_id}/weights/left-2"
    (listed,) = client.get(f"training_runs/{model_id}/checkpoints").json()["checkpoints"]
    assert listed["tinker_path"] == path
    body = {"session_id": client.session(), "model_seq_id": 0, "optimizer": True}
    assert client.post("load_weights", **body, path=path).status_code == 200


def test_a_session_without_checkpoints_is_forgotten_whole(api: Api, ended: tuple[str, str]) -> None:
    client, (session_id, model_id) = Raw(api), ended
    samples = folder_of_samples(api, session_id)
    found = client.delete(f"training_runs/{model_id}/checkpoints/weights/left-2")
    assert found.status_code == 200, found.text
    other = client.session()
    age(api, session_id, KEEP_SESSIONS_S + 60)
    look(api)
    assert [row.id for row in api.store.sessions.all()] == [other]
    assert not samples.parent.exists()
    assert client.get(f"sessions/{session_id}").status_code == 404
    assert client.future(model_id, 1).status_code == 410
    assert Raw(api, "bob").future(model_id, 1).status_code == 404
    late = client.step(model_id, 4)
    assert late.status_code == 404


def test_the_requests_of_a_job_that_has_not_left_stay(
    api: Api, client: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "POLL_S", 0.2)
    session_id = client.session()
    model_id = client.model(session_id)
    client.models.step()
    client.step(model_id, 1)
    client.finish(session_id)
    age(api, session_id, 2 * KEEP_SESSIONS_S)
    look(api)
    assert client.future(model_id, 1).json()["type"] == "try_again"
    client.models.step()
    assert client.models.ops() == ["optim_step", "save_state", "leave"]
    assert client.future(model_id, 1).json()["type"] == "optim_step"


def test_a_removal_that_was_cut_off_is_finished(
    api: Api, ended: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, (session_id, model_id) = Raw(api), ended
    client.delete(f"training_runs/{model_id}/checkpoints/weights/left-2")
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


def test_requests_count_among_the_bytes_of_a_tenant(api: Api, client: Raw) -> None:
    model_id = client.model()
    (job,) = api.store.jobs.page()
    log = RequestLog(api.home.job(job.id))

    def send(seq_id: int) -> Any:
        return client.forward_backward(model_id, seq_id, message(datum(*range(200))))

    assert send(1).status_code == 200
    one = log.held_bytes()
    api.store.tenants.set_limits("ann", TenantLimits(upload_bytes=2 * one + 100))
    assert send(2).status_code == 200
    refused = send(3)
    assert refused.status_code == 402
    assert "the files and requests of a tenant must have at most" in refused.json()["error"]
    assert log.state(3) == "unknown"
    assert send(2).status_code == 200, "a retry has its room already"
    step = client.step(model_id, 3)
    assert step.status_code == 200, "what was sent can always be taken"
    api.service.gate._known.clear()  # it knows the limits of a minute ago
    sent = client.http.post(
        "/v1/files", data={"purpose": "fine-tune"}, files={"file": ("chats.jsonl", CHATS)}
    )
    assert sent.status_code in (413, 429), sent.text
    assert api.store.uploads.bytes_of("ann") == 0
    client.models.step()
    log.prune(3)
    for number in (1, 2, 3):
        log.drop_answer(number)
    assert send(4).status_code == 200
    assert send(4).json()["request_id"] == f"{model_id}:4:forward_backward"
    client.models.step()
    assert client.models.ops() == [
        "forward_backward",
        "forward_backward",
        "optim_step",
        "forward_backward",
    ]
