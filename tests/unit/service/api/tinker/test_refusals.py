"""Refusals below `/api/v1`, with their status and sentence; and what silence ends."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.helpers.http_service import BASE, Api, bearer
from tests.helpers.tinker.raw import Raw, datum, message
from tlora_megatron.service.api.server import make_app
from tlora_megatron.service.api.tinker.context import TenantContext
from tlora_megatron.service.api.tinker.names import NotSigned
from tlora_megatron.service.api.tinker.runs import Signer
from tlora_megatron.service.api.tinker.sessions import FLUSH_S, SILENCE_S, Reaper


def test_without_the_extra_the_answer_says_what_to_install(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tlora_megatron.service.api.tinker.router.is_installed", lambda: False)
    with TestClient(make_app(api.service)) as client:
        found = client.post("/api/v1/client/config", json={}, headers=bearer(api.token()))
    assert found.status_code == 501
    assert found.json()["error"].endswith("pip install 'tlora-megatron[tinker]'")


def test_another_tenant_finds_nothing(api: Api) -> None:
    ann, bob = Raw(api), Raw(api, "bob")
    session_id = ann.session()
    model_id = ann.model(session_id)
    ann.post("save_weights", model_id=model_id, seq_id=1, path="mine")
    ann.models.step()
    path = f"tinker://{model_id}/weights/mine"
    future = f"{model_id}:1:save_weights"
    assert ann.post("retrieve_future", request_id=future).json()["path"] == path
    theirs = bob.session()
    refused = [
        bob.post("session_heartbeat", session_id=session_id),
        bob.post("create_model", session_id=session_id, model_seq_id=1, base_model=BASE),
        bob.post("get_info", model_id=model_id),
        bob.post("unload_model", model_id=model_id),
        bob.step(model_id, 2),
        bob.post("retrieve_future", request_id=future),
        bob.post("weights_info", tinker_path=path),
        bob.post("load_weights", session_id=theirs, model_seq_id=0, path=path, optimizer=False),
        bob.get(f"sessions/{session_id}"),
        bob.get(f"training_runs/{model_id}"),
        bob.get(f"training_runs/{model_id}/checkpoints"),
        bob.delete(f"training_runs/{model_id}/checkpoints/weights/mine"),
        bob.post(f"sessions/{session_id}/finish"),
    ]
    assert [found.status_code for found in refused] == [404] * len(refused)
    assert bob.forward_backward(model_id, 2, message(datum(1))).status_code == 404
    assert bob.get("training_runs").json()["training_runs"] == []
    assert bob.get("checkpoints").json()["checkpoints"] == []
    assert bob.get("sessions").json()["sessions"] == [theirs]
    assert ann.get("training_runs").json()["cursor"]["total_count"] == 1


@pytest.mark.parametrize(
    ("path", "body", "status", "sentence"),
    [
        ("get_info", {"model_id": "../../x"}, 404, "model_id must be one that create_model gave"),
        ("get_info", {}, 400, "model_id must be given"),
        ("session_heartbeat", {"session_id": "s/.."}, 404, "session_id must be one that"),
        ("retrieve_future", {"request_id": "x"}, 404, "request_id must be one that this service"),
        ("weights_info", {"tinker_path": "tinker://a/weights/.."}, 404, "a path must be tinker://"),
        ("weights_info", {"tinker_path": "file:///etc/passwd"}, 404, "a path must be tinker://"),
    ],
)
def test_ids_that_nobody_gave_are_refused(
    still: Api, path: str, body: dict[str, Any], status: int, sentence: str
) -> None:
    found = Raw(still).post(path, **body)
    assert found.status_code == status
    assert found.json()["error"].startswith(sentence)
    assert found.json()["category"] == "user"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"base_model": "/etc"}, "base_model must be one that this service offers (quickstart)"),
        ({"optimizer_config": {"type": "dimuon"}}, "optimizer_config.type must be adamw here, got"),
        (
            {"lora_config": {"rank": 4, "train_mlp": False, "train_attn": False}},
            "train_attn or train_mlp must be true",
        ),
        (
            {"lora_config": {"rank": 4, "new": None, "alpha": 16.0}},
            "lora_config.alpha must be left out: this service has it not, got 16.0",
        ),
        ({"user_metadata": {"tlora.init_from": "/etc"}}, "user_metadata must set tlora.lora.alpha"),
    ],
)
def test_models_that_cannot_be_are_refused(
    still: Api, changes: dict[str, Any], sentence: str
) -> None:
    client = Raw(still)
    body = {"session_id": client.session(), "model_seq_id": 0, "base_model": BASE, **changes}
    found = client.post("create_model", **body)
    assert (found.status_code, still.store.jobs.page()) == (422, [])
    assert found.json()["error"].startswith(sentence)


def test_requests_that_cannot_be_are_refused_and_leave_no_trace(api: Api, client: Raw) -> None:
    model_id = client.model()

    def passed(loss: str = "cross_entropy", **inputs: Any) -> Any:
        return client.forward_backward(model_id, 1, message(datum(1, 2, **inputs), loss=loss))

    garbage = client.send(b"\xff" * 99)
    assert garbage.status_code == 400
    assert "in protobuf, got 99 bytes that are none" in garbage.json()["error"]
    refused = {
        "loss_fn must be among": passed("custom"),
        "weights must be finite": passed(weights=[1.0, float("nan")]),
        "importance_sampling must have logprobs": passed("importance_sampling"),
        "cross_entropy must take": passed(advantages=[1.0, 1.0]),
        "optim_params must be AdamParams here, got those of 'dimuon'": client.post(
            "optim_step",
            model_id=model_id,
            seq_id=1,
            optimizer_params={"type": "dimuon", "learning_rate": 1.0},
        ),
        "beta1 must be in [0, 1)": client.post(
            "optim_step", model_id=model_id, seq_id=1, adam_params={"beta1": 1.5}
        ),
        "name must be letters": client.post(
            "save_weights", model_id=model_id, seq_id=1, path="../../x"
        ),
        "this service must generate": client.post(
            "create_sampling_session",
            session_id=model_id.split(":")[0],
            sampling_session_seq_id=0,
            base_model=BASE,
        ),
    }
    for sentence, found in refused.items():
        assert (found.status_code, sentence in found.json()["error"]) == (422, True), found.text
    (job,) = api.store.jobs.page()
    assert not (api.home.job(job.id) / "requests").exists()


def test_a_retry_changes_nothing_and_late_ones_wait(api: Api, client: Raw) -> None:
    session_id = client.session()
    model_id = client.model(session_id)
    assert client.model(session_id) == model_id
    assert len(api.store.jobs.page()) == 1
    second = client.step(model_id, 2)
    client.models.step()
    assert client.models.done == []
    sent = [client.forward_backward(model_id, 1, message(datum(1))) for _ in range(2)]
    assert sent[0].json() == sent[1].json()
    client.models.step()
    assert client.models.ops() == ["forward_backward", "optim_step"]
    again = client.step(model_id, 2)
    assert again.json() == second.json()
    client.models.step()
    assert len(client.models.done) == 2
    future = {"request_id": second.json()["request_id"]}
    for _ in range(2):
        assert client.post("retrieve_future", **future).json()["metrics"] == {"grad_norm": 0.5}
    never = client.post("retrieve_future", request_id=f"{model_id}:9:optim_step")
    assert never.status_code == 404
    assert "of a request that was made" in never.json()["error"]


def test_an_address_is_good_for_an_hour(api: Api) -> None:
    now_s = 1e9
    signer = Signer(api.home, clock=lambda: now_s)
    grant = signer.grant("ann", "tinker://x/weights/y", "state.json")
    word = signer.sign(grant)
    assert Signer(api.home, clock=lambda: now_s + 3599).read(word) == grant
    now_s += 3601
    with pytest.raises(NotSigned, match="must be fetched within an hour"):
        signer.read(word)
    for spoilt in (f"x{word}", word[:-1], "", "a.b", "é.é"):
        with pytest.raises(NotSigned, match="must hold a token"):
            signer.read(spoilt)


def test_too_many_requests_ahead_are_held_back(
    api: Api, client: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tlora_megatron.service.api.tinker.training.MOST_AHEAD", 3)
    model_id = client.model()
    sent = [client.step(model_id, number) for number in range(1, 5)]
    assert [found.status_code for found in sent] == [200, 200, 200, 429]


def later(api: Api, seconds: float) -> None:
    """Moves the store's clock: it is so much later than it really is."""
    api.store.database.clock = lambda: time.time() + seconds


def test_a_client_that_is_silent_leaves_its_model_saved(api: Api, client: Raw) -> None:
    reaper, session_id = Reaper(api.service), client.session()
    model_id = client.model(session_id)
    client.step(model_id, 1)
    later(api, SILENCE_S)
    assert client.post("session_heartbeat", session_id=session_id).status_code == 200
    later(api, 2 * SILENCE_S - 10)
    asyncio.run(reaper.look())
    assert api.store.sessions.get(session_id, tenant="ann").ended is None
    later(api, 2 * SILENCE_S + 10)
    for _ in range(2):
        asyncio.run(reaper.look())
        client.models.step()
    assert client.models.ops() == ["optim_step", "save_state", "leave"]
    for path, body in {
        "session_heartbeat": {"session_id": session_id},
        "optim_step": {"model_id": model_id, "seq_id": 4, "adam_params": {}},
    }.items():
        found = client.post(path, **body)
        assert found.status_code == 410
        assert "its client was not heard of for 300 s" in found.json()["error"]
    body = {"session_id": client.session(), "model_seq_id": 0, "optimizer": True}
    again = client.post("load_weights", **body, path=f"tinker://{model_id}/weights/left-2")
    assert again.status_code == 200
    client.models.step()
    told = client.post("retrieve_future", request_id=again.json()["request_id"]).json()
    assert told["model_id"] == again.json()["model_id"]


def test_a_model_that_is_unloaded_takes_nothing_more(client: Raw) -> None:
    model_id = client.model()
    sent = [client.post("unload_model", model_id=model_id) for _ in range(2)]
    assert sent[0].json() == sent[1].json()
    client.models.step()
    future = client.post("retrieve_future", request_id=sent[0].json()["request_id"])
    assert future.json() == {"type": "unload_model", "model_id": model_id}
    late = client.step(model_id, 2)
    assert (late.status_code, "that was unloaded" in late.json()["error"]) == (410, True)


def test_a_model_that_waited_in_vain_is_cancelled(api: Api, client: Raw) -> None:
    session_id = client.session()
    client.model(session_id)
    client.finish(session_id)
    (job,) = api.store.jobs.page()
    assert job.wish == "cancel"
    assert not (api.home.job(job.id) / "requests").exists()


def test_a_process_that_begins_gives_all_clients_their_whole_time(api: Api) -> None:
    silent = Raw(api).session()
    later(api, 10 * SILENCE_S)
    reaper = Reaper(api.service)
    asyncio.run(reaper.look())
    assert api.store.sessions.get(silent, tenant="ann").ended is None
    later(api, 11 * SILENCE_S + 1)
    asyncio.run(reaper.look())
    assert api.store.sessions.get(silent, tenant="ann").ended is not None


def test_heartbeats_are_written_together_every_half_minute(api: Api) -> None:
    clients = [Raw(api), Raw(api, "bob")]
    reaper, ids = Reaper(api.service), [client.session() for client in clients]
    begun = {row.id: row.heard_at for row in api.store.sessions.all()}

    def beat(seconds: float) -> list[float]:
        """Lets both clients give a sign of life; returns how far the rows have come by then."""
        later(api, seconds)
        for client, session_id in zip(clients, ids, strict=True):
            assert client.post("session_heartbeat", session_id=session_id).status_code == 200
        asyncio.run(reaper.look())
        return [row.heard_at - begun[row.id] for row in api.store.sessions.all()]

    assert beat(FLUSH_S - 10) == [0.0, 0.0]
    assert all(far >= FLUSH_S for far in beat(FLUSH_S))
    assert all(far < 2 * FLUSH_S - 10 for far in beat(2 * FLUSH_S - 10))
    asyncio.run(reaper.close())
    rows = api.store.sessions.all()
    assert all(row.heard_at - begun[row.id] >= 2 * FLUSH_S - 10 for row in rows)


def test_settings_in_metadata_do_not_unfold(client: Raw) -> None:
    session_id = client.session()
    for value, sentence in {
        "[&a [q_proj], *a]": "must have no YAML aliases",
        "[" * 40 + "]" * 40: "must be nested at most 32 deep",
        "q" * 600: "must have at most 512 characters",
        "2026-99-99": "must be a value",
    }.items():
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE}
        metadata = {"tlora.lora.target_modules": value}
        found = client.post("create_model", **body, user_metadata=metadata)
        assert found.status_code in (400, 422), found.text
        assert sentence in found.json()["error"]


def test_models_of_a_session_whose_end_was_cut_off_leave_all_the_same(
    api: Api, client: Raw
) -> None:
    session_id = client.session()
    model_id = client.model(session_id)
    client.step(model_id, 1)
    api.store.sessions.end(session_id, "and the process was killed")
    for _ in range(2):
        asyncio.run(Reaper(api.service).look())
        client.models.step()
    assert client.models.ops() == ["optim_step", "save_state", "leave"]


def test_a_model_that_was_refused_has_no_checkpoints(client: Raw) -> None:
    session_id = client.session()
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE}
    metadata = {"tlora.lora.alpha": "-1"}
    assert client.post("create_model", **body, user_metadata=metadata).status_code == 400
    path = f"training_runs/{session_id}:train:0/checkpoints/weights/a/archive"
    assert client.get(f"{path}").status_code == 404


def test_a_session_that_cannot_be_looked_after_does_not_keep_the_others_alive(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, client = Raw(api, "bob").session(), Raw(api)
    broken = client.session()  # newer, so it is looked at first
    reaper = Reaper(api.service)

    def samples(context: TenantContext, session_id: str) -> Any:
        raise OSError(f"the disk must be whole, got {session_id}")

    later(api, SILENCE_S + 1)
    assert client.post("session_heartbeat", session_id=broken).status_code == 200
    monkeypatch.setattr(TenantContext, "samples", samples)
    asyncio.run(reaper.look())
    assert api.store.sessions.get(silent, tenant="bob").ended is not None
