"""Requests of `tinker` clients that come at once, by a proxy, or with a revoked token."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from starlette.requests import Request

from tests.helpers.http_service import BASE, Api, bearer
from tests.helpers.played_models import PlayedModels
from tests.unit.service.api.tinker.test_refusals import PROTO, model, post, session
from tests.unit.service.api.tinker.test_wire import datum, message
from tlora_megatron.service.api.tinker import models, training
from tlora_megatron.service.api.tinker.sessions import is_local


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
    body = {"session_id": session(api.client()), "model_seq_id": 0, "base_model": BASE}

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


def test_a_revoked_token_s_addresses_end_with_it(api: Api) -> None:
    client = api.client()
    model_id = model(client, session(client))
    post(client, "save_weights", model_id=model_id, seq_id=1, path="mine")
    PlayedModels(api.home, api.store).step()
    made = api.store.tokens.make("ann")
    path = f"/api/v1/training_runs/{model_id}/checkpoints/weights/mine/archive"
    url = client.get(path, headers=bearer(made.secret)).json()["url"]
    stranger = api.client(None)
    assert stranger.get(url).status_code == 200
    api.store.tokens.revoke(made.token.id)
    assert stranger.get(url).status_code == 401


def test_a_future_of_another_kind_than_its_request_is_none(api: Api) -> None:
    client = api.client()
    model_id = model(client, session(client))
    post(client, "optim_step", model_id=model_id, seq_id=1, adam_params={})
    post(client, "save_weights_for_sampler", model_id=model_id, seq_id=2, path="mine")
    PlayedModels(api.home, api.store).step()
    for future in ("1:save_weights", "1:save_weights_for_session", "2:save_weights_for_session"):
        found = post(client, "retrieve_future", request_id=f"{model_id}:{future}")
        assert found.status_code == 404, found.text


def test_a_save_whose_ttl_is_refused_saves_nothing(api: Api) -> None:
    client, models_of = api.client(), PlayedModels(api.home, api.store)
    model_id = model(client, session(client))
    body = {"model_id": model_id, "seq_id": 1, "path": "mine", "ttl_seconds": 1}
    assert post(client, "save_weights", **body).status_code == 422
    models_of.step()
    assert models_of.ops() == []


def test_a_model_of_which_much_waits_takes_no_large_pass(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "MOST_WAITING_BYTES", 100)
    monkeypatch.setattr(training, "LARGE_BYTES", 0)
    client, played = api.client(), PlayedModels(api.home, api.store)
    model_id = model(client, session(client))

    def send(seq_id: int) -> int:
        body = message(datum(*range(30)))
        body.model_id, body.seq_id = model_id, seq_id
        return client.post(
            "/api/v1/forward_backward", content=body.SerializeToString(), headers=PROTO
        ).status_code

    assert [send(1), send(2)] == [200, 429]
    played.step()
    assert send(2) == 200


def test_a_model_of_a_session_that_has_just_ended_is_not_made(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, client = models.submit, api.client()
    session_id = session(client)

    async def late(*args: Any, **kwargs: Any) -> Any:
        api.store.sessions.end(session_id, "its client has finished")
        return await submit(*args, **kwargs)

    monkeypatch.setattr(models, "submit", late)  # the session went on when the request came
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE}
    assert post(client, "create_model", **body).status_code == 410
    assert api.store.jobs.page() == []
    assert api.store.sessions.models(tenant="ann") == []
